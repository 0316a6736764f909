"""Ties a process to its parent, and becomes the command: `launch.py PARENT COMMAND…`. Its files are its owner's alone.

A program of its own, and not a function between fork and exec: the parent has threads, and their locks would stay held.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    os.umask(0o077)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent may have died before the line above: then nobody would tell us.
        if os.getppid() != parent:
            sys.exit("the supervisor is gone")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be run: {error.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

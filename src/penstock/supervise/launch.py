"""Runs a command that ends with its parent: `launch.py PARENT COMMAND…`. Its files are private to the user.

It is a program, not a function between fork and exec: the parent has threads, whose locks could stay locked.
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
        # The parent may have ended before the line above.
        if os.getppid() != parent:
            sys.exit("the supervisor has ended")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be run: {error.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

"""Children that outlived a supervisor which was killed: remembered while they run, ended at the next start."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from penstock.core.errors import Unavailable
from penstock.supervise.notes import read_note, write_note

_PATIENCE = 10.0


class Children:
    """A file of the children that run now, by pid and time of birth: a pid alone may belong to somebody else by now."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known: dict[str, tuple[int, float]] = {}

    def remember(self, name: str, pid: int, created: float) -> None:
        self._known[name] = (pid, created)
        self._write()

    def forget(self, name: str) -> None:
        if self._known.pop(name, None):
            self._write()

    def _write(self) -> None:
        # On a full disk the children go on: only what ends them after a kill of the supervisor is out of date.
        with suppress(OSError):
            write_note(self._file, self._known)

    def end_leftovers(self) -> list[str]:
        """End those whom an earlier run left, and wait until they are gone; their names."""
        found = list(self._leftovers())
        for _, process in found:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs([process for _, process in found], timeout=_PATIENCE)
        if alive:
            pids = ", ".join(str(process.pid) for process in alive)
            raise Unavailable("the state folder", f"an earlier run left the process {pids}, and it cannot be killed")
        self._known.clear()
        self._file.unlink(missing_ok=True)
        return [name for name, _ in found]

    def _leftovers(self) -> Iterator[tuple[str, psutil.Process]]:
        for name, noted in read_note(self._file).items():
            match noted:
                case [int(pid), float(created)] if pid > 1:
                    with suppress(psutil.Error):
                        process = psutil.Process(pid)
                        if process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE:
                            yield name, process

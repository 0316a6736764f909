"""`.penstock/`: what a pipeline keeps on this machine between two runs. One run at a time, and one set of services."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil

from penstock.core.errors import Misconfigured
from penstock.supervise.leftovers import Children
from penstock.supervise.notes import read_note
from penstock.supervise.ports import Ports

NAME = ".penstock"
_MOMENT = 1.0
_TICK = 0.01


class StateFolder:
    """The folder, its sub-folders and its files. Change something in it only while it is held.

    Who holds it in one role shares it with whoever holds it in another: a run with the services that it stands on.
    """

    def __init__(self, path: Path, role: str = "run") -> None:
        self.path = path.absolute()
        self._lock = self.path / ("lock" if role == "run" else f"{role}.lock")
        self.children = Children(self.path / ("children.json" if role == "run" else f"{role}-children.json"))
        self._ports = Ports(self.path / "ports.json")

    @contextmanager
    def held(self) -> Iterator["StateFolder"]:
        """Hold the folder alone, once what a killed run left behind is ended; Misconfigured when somebody holds it."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _close_to_others(self.path)
            (self.path / ".gitignore").write_text("*\n")
            lock = self._lock.open("a+")
        except OSError as error:
            raise Misconfigured(
                str(self.path),
                f"no state can be kept there: {error.strerror}",
                "make it writable, or use another folder",
            ) from error
        with lock:
            self._take(lock)
            lock.truncate(0)
            lock.write(f"{os.getpid()} {psutil.Process().create_time()}\n")
            lock.flush()
            self.children.end_leftovers()
            yield self

    def holder(self) -> int | None:
        """The pid of the process that holds the folder now, for certain: it may be asked to end."""
        try:
            with self._lock.open() as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return _alive(lock.read())
        except FileNotFoundError:
            pass
        except PermissionError as error:
            raise Misconfigured(
                str(self.path), "only its owner may read it", "run this command as the user who runs the pipeline"
            ) from error
        return None

    def told(self, file: str) -> dict[str, object]:
        """What the process that holds the folder has noted in a file, with its pid; nothing when there is no such one.

        The note of one that was killed counts no more, even when somebody else holds the folder by now.
        """
        if (holder := self.holder()) is None:
            return {}
        note = read_note(self.path / file)
        return note if note.get("pid") == holder else {}

    def sub(self, *names: str) -> Path:
        """A folder below this one, made if need be."""
        path = self.path.joinpath(*names)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def log(self, name: str) -> Path:
        return self.sub("logs") / f"{name}.log"

    def port(self, name: str, wanted: int | None = None, setting: str = "") -> int:
        """A port for a name, the same in the next run; see `Ports.port`."""
        return self._ports.port(name, wanted, setting)

    def _take(self, lock: IO[str]) -> None:
        """Lock the file. Who only looks at it has it for a moment: that is waited for."""
        until = time.monotonic() + _MOMENT
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if (pid := self.holder()) is not None or time.monotonic() > until:
                    raise self._in_use(pid) from None
                time.sleep(_TICK)
            else:
                return

    def _in_use(self, pid: int | None) -> Misconfigured:
        return Misconfigured(
            str(self.path),
            f"it is in use by the process {pid}" if pid else "it is in use by another process",
            f"stop that one (kill {pid or 'PID'}), or start this one in another folder",
        )


def private(path: str, flags: int) -> int:
    """An opener of files that only their owner can read."""
    return os.open(path, flags, 0o600)


def _close_to_others(folder: Path) -> None:
    """Take from others what an earlier version gave them: the folder, and once all that lies in it."""
    if not folder.stat().st_mode & 0o077:
        return
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            # What cannot be changed belongs to somebody else, or is just being removed.
            with suppress(OSError):
                path = Path(place, name)
                if not path.is_symlink():
                    path.chmod(path.stat().st_mode & 0o700)
    # Last: a walk that was broken off is done again.
    folder.chmod(0o700)


def _alive(written: str) -> int | None:
    """The pid, if it is still that of the process that wrote it: who has just come may not have written yet."""
    try:
        pid, born = written.split()
        return int(pid) if psutil.Process(int(pid)).create_time() == float(born) else None
    except (ValueError, psutil.Error):
        return None

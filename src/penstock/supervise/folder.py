"""`.penstock/`: what a pipeline keeps on this machine between two runs. One run at a time."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import Misconfigured
from penstock.supervise.leftovers import Children
from penstock.supervise.ports import Ports

NAME = ".penstock"


class StateFolder:
    """The folder, its sub-folders and its files. Change something in it only while it is held."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.children = Children(self.path / "children.json")
        self._ports = Ports(self.path / "ports.json")

    @contextmanager
    def held(self) -> Iterator["StateFolder"]:
        """Hold the folder alone, once what a killed run left behind is ended; Misconfigured when somebody holds it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / ".gitignore").write_text("*\n")
            lock = (self.path / "lock").open("a+")
        except OSError as error:
            raise Misconfigured(
                str(self.path),
                f"no state can be kept there: {error.strerror}",
                "make it writable, or use another folder",
            ) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._in_use() from None
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()
            self.children.end_leftovers()
            yield self

    def holder(self) -> int | None:
        """The pid of the run that holds the folder now."""
        try:
            with (self.path / "lock").open() as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return int(lock.read() or 0) or None
        except FileNotFoundError:
            pass
        return None

    def sub(self, *names: str) -> Path:
        """A folder below this one, made if need be."""
        path = self.path.joinpath(*names)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def log(self, name: str) -> Path:
        return self.sub("logs") / f"{name}.log"

    def port(self, name: str, wanted: int | None = None, setting: str = "") -> int:
        """A port for a name, the same in the next run; see `Ports.port`."""
        return self._ports.port(name, wanted, setting)

    def _in_use(self) -> Misconfigured:
        pid = self.holder()
        return Misconfigured(
            str(self.path),
            f"it is in use by the process {pid}" if pid else "it is in use by another process",
            f"stop that one (kill {pid or 'PID'}), or start this one in another folder",
        )

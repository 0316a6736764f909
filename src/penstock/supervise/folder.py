"""`.penstock/`: the state of a pipeline on this machine, and the settings `[local]`.

One run at a time can use it, and one set of services.
"""

import fcntl
import json
import os
import random
import shutil
import signal
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, TypeVar

import psutil
from pydantic import Field, TypeAdapter, ValidationError, field_validator

from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.settings import Section


class LocalSettings(Section):
    """Kafka and Redis as `penstock run` starts them. Without a port it takes a free one, and keeps it."""

    brokers: int | None = Field(default=None, description="1, 3 or 5; empty: the number of the existing cluster, or 1")
    kafka_port: int | None = Field(default=None, ge=1, le=65535)
    kafka_memory: str = Field(default="384m", pattern=r"^[1-9][0-9]*[mg]$")
    redis_port: int | None = Field(default=None, ge=1, le=65535)
    reserve: int = Field(
        256 << 20,
        ge=0,
        description="bytes that have to stay free on the disk of the state folder; "
        "below that, sources wait and an alarm is raised",
    )
    redis_fsync: Literal["everysec", "always"] = "everysec"

    @field_validator("brokers")
    @classmethod
    def _odd(cls, brokers: int | None) -> int | None:
        if brokers not in (None, 1, 3, 5):
            raise ValueError("use 1, 3 or 5: a cluster of 2F + 1 brokers survives the loss of F")
        return brokers


T = TypeVar("T")


def read_note(file: Path) -> dict[str, object]:
    """Read a JSON object; empty if the file is missing or invalid."""
    try:
        note = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def from_note(cls: type[T], note: Mapping[str, object]) -> T | None:
    """Make a dataclass from a note of any version: unknown fields are ignored. None if a required field is missing."""
    try:
        return TypeAdapter(cls).validate_python(note)
    except ValidationError:
        return None


def write_note(file: Path, note: object) -> None:
    """Replace the file at once: a reader never sees a part of it. Only its owner can read it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.new")
    with new.open("w", encoding="utf-8") as out:
        os.fchmod(out.fileno(), 0o600)
        json.dump(note, out, indent=1, sort_keys=True)
        out.flush()
        os.fsync(out.fileno())
    new.replace(file)


HOST = "127.0.0.1"
# Below the ephemeral ports: an outgoing connection could use one of those at the next start.
_RANGE = range(20_000, 32_000)


def require_free(port: int, setting: str, used: Collection[int] = ()) -> None:
    """Misconfigured if a process listens on the port, or another service will."""
    if port in used or not _free(port):
        fix = f"stop the process that uses it, set another port, or leave {setting} out to get a free one"
        raise Misconfigured(setting, f"port {port} is in use", fix)


def _free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: connections in TIME_WAIT do not block the port, a listener does.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError):
            return False
        return True


def _any_free(used: set[int]) -> int:
    for port in random.sample(_RANGE, len(_RANGE)):
        if port not in used and _free(port):
            return port
    raise Misconfigured("ports", f"none of {_RANGE.start}–{_RANGE.stop - 1} is free", "set the ports in penstock.toml")


_KILL_TIMEOUT = 10.0


class Children:
    """A file of the running child processes: the pid and the creation time of each, because pids are reused."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._running: dict[str, tuple[int, float]] = {}

    def add(self, name: str, pid: int, created: float) -> None:
        self._running[name] = (pid, created)
        self._write()

    def remove(self, name: str) -> None:
        if self._running.pop(name, None):
            self._write()

    def _write(self) -> None:
        # On a full disk the children keep running. After a kill of the supervisor, some may not be found.
        with suppress(OSError):
            write_note(self._file, self._running)

    def end_leftovers(self) -> list[str]:
        """Kill the children of an earlier run and wait for their end; return their names."""
        leftovers = list(self._leftovers())
        for _, process in leftovers:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        _, remaining = psutil.wait_procs([process for _, process in leftovers], timeout=_KILL_TIMEOUT)
        if remaining:
            pids = ", ".join(str(process.pid) for process in remaining)
            raise Unavailable("the state folder", f"process {pids} of an earlier run cannot be killed")
        self._running.clear()
        self._file.unlink(missing_ok=True)
        return [name for name, _ in leftovers]

    def _leftovers(self) -> Iterator[tuple[str, psutil.Process]]:
        for name, noted in read_note(self._file).items():
            match noted:
                case [int(pid), float(created)] if pid > 1:
                    with suppress(psutil.Error):
                        process = psutil.Process(pid)
                        if process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE:
                            yield name, process


NAME = ".penstock"
_LOCK_TIMEOUT = 1.0
_TICK = 0.01


class StateFolder:
    """The folder, its sub-folders and its files. Only the process that has locked it may change it.

    There is a lock for each role: a run and its services lock the folder at the same time.
    """

    def __init__(self, path: Path, role: str = "run") -> None:
        self.path = path.absolute()
        self._lock = self.path / ("lock" if role == "run" else f"{role}.lock")
        self.children = Children(self.path / ("children.json" if role == "run" else f"{role}-children.json"))
        self._ports: dict[str, int] = {}

    @contextmanager
    def locked(self) -> Iterator["StateFolder"]:
        """Lock the folder, and kill the leftovers of a killed run; Misconfigured if another process has the lock."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Earlier versions allowed other users to read it.
            self.path.chmod(0o700)
            (self.path / ".gitignore").write_text("*\n")
            lock = self._lock.open("a+")
        except OSError as error:
            raise Misconfigured(
                str(self.path),
                f"the state folder cannot be created: {error.strerror}",
                "make it writable, or use another folder",
            ) from error
        with lock:
            self._acquire(lock)
            lock.truncate(0)
            lock.write(f"{os.getpid()} {psutil.Process().create_time()}\n")
            lock.flush()
            self.children.end_leftovers()
            yield self

    def owner(self) -> int | None:
        """The pid of the process that has the lock; None if there is none. It is safe to send signals to it."""
        try:
            with self._lock.open() as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return _running_pid(lock.read())
        except FileNotFoundError:
            pass
        except PermissionError as error:
            raise Misconfigured(
                str(self.path), "only its owner can read it", "run this command as the user who runs the pipeline"
            ) from error
        return None

    def read_note(self, file: str) -> dict[str, object]:
        """Read a note of the process that has the lock; empty if there is none, or if another process wrote it."""
        if (owner := self.owner()) is None:
            return {}
        note = read_note(self.path / file)
        return note if note.get("pid") == owner else {}

    def sub(self, *names: str) -> Path:
        """A sub-folder, which is created if necessary."""
        path = self.path.joinpath(*names)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def log(self, name: str) -> Path:
        return self.sub("logs") / f"{name}.log"

    def port(self, name: str, wanted: int | None = None, setting: str = "") -> int:
        """Return `wanted` if it is set, else the last port of this name, else a free port.

        Two names never get the same port. Misconfigured if `wanted` is in use.
        """
        file = self.path / "ports.json"
        last_ports = {key: port for key, port in read_note(file).items() if isinstance(port, int)}
        others = {port for key, port in self._ports.items() if key != name}
        if wanted is not None:
            require_free(wanted, setting or name, others)
            port = wanted
        elif (last := last_ports.get(name)) is not None and last not in others and _free(last):
            port = last
        else:
            port = _any_free(others | set(last_ports.values()))
        self._ports[name] = port
        if last_ports.get(name) != port:
            write_note(file, {**last_ports, name: port})
        return port

    def _acquire(self, lock: IO[str]) -> None:
        """Lock the file. `owner` locks it for a short time, so this waits a little."""
        until = time.monotonic() + _LOCK_TIMEOUT
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if (pid := self.owner()) is not None or time.monotonic() > until:
                    raise Misconfigured(
                        str(self.path),
                        f"it is in use by process {pid}" if pid else "it is in use by another process",
                        f"stop that process (kill {pid or 'PID'}), or use another folder",
                    ) from None
                time.sleep(_TICK)
            else:
                return


def private_opener(path: str, flags: int) -> int:
    """An opener for files that only their owner can read."""
    return os.open(path, flags, 0o600)


def _running_pid(written: str) -> int | None:
    """The pid in the lock file, if that process still runs. The owner may not have written it yet."""
    try:
        pid, born = written.split()
        return int(pid) if psutil.Process(int(pid)).create_time() == float(born) else None
    except (ValueError, psutil.Error):
        return None


@dataclass(frozen=True)
class DiskSpace:
    """The disk of a folder, and the space on it that has to stay free."""

    folder: Path
    reserve: int

    def figures(self) -> dict[str, object]:
        """Folder, free bytes and reserve, for the status."""
        return {"folder": str(self.folder.absolute()), "free": self._free(), "reserve": self.reserve}

    def shortage(self) -> str | None:
        """A warning if less than the reserve is free; None if there is enough, or the free space is unknown."""
        free = self._free()
        if free is None or free >= self.reserve:
            return None
        sizes = f"{free >> 20:,} MiB are free, less than the {self.reserve >> 20:,} MiB of [local] reserve"
        return f"the disk of {self.folder.absolute()} is full: {sizes}; free some space; then it continues"

    def _free(self) -> int | None:
        try:
            return shutil.disk_usage(self.folder).free
        except OSError:
            return None

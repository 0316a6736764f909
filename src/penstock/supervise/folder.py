"""`.penstock/`: what a pipeline keeps on this machine between two runs. One run at a time, and one set of services."""

import fcntl
import json
import os
import random
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import psutil

from penstock.core.errors import Misconfigured, Unavailable

T = TypeVar("T")


def read_note(file: Path) -> dict[str, object]:
    """What the file holds; nothing when it is missing or was spoilt by hand."""
    try:
        note = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def fitting(shape: type[T], note: Mapping[str, object]) -> T | None:
    """The dataclass that a note holds, whichever version has written it: what is unknown is passed over.

    None when the note lacks what cannot be done without.
    """
    known = {field.name: note[field.name] for field in fields(cast(Any, shape)) if field.name in note}
    try:
        return shape(**known)
    except TypeError:
        return None


def write_note(file: Path, note: Mapping[str, object]) -> None:
    """Put the note in the place of what was there. Only its owner can read it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.new")
    with new.open("w", encoding="utf-8") as out:
        os.fchmod(out.fileno(), 0o600)
        json.dump(note, out, indent=1, sort_keys=True)
        out.flush()
        os.fsync(out.fileno())
    new.replace(file)


HOST = "127.0.0.1"
# Below the ports that systems hand out to outgoing connections: one of those could sit on ours when we come back.
_RANGE = range(20_000, 32_000)


class Ports:
    """The ports of one state folder. Two names never get the same one."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._given: dict[str, int] = {}

    def port(self, name: str, wanted: int | None = None, setting: str = "") -> int:
        """`wanted` if it is set, Misconfigured if it is taken; else the last port of this name; else a free one."""
        known = {key: port for key, port in read_note(self._file).items() if isinstance(port, int)}
        others = {port for key, port in self._given.items() if key != name}
        if wanted is not None:
            if wanted in others:
                raise _taken(wanted, setting or name)
            require_free(wanted, setting or name)
            port = wanted
        elif (last := known.get(name)) is not None and last not in others and _free(last):
            port = last
        else:
            port = _any_free(others | set(known.values()))
        self._given[name] = port
        if known.get(name) != port:
            write_note(self._file, {**known, name: port})
        return port


def require_free(port: int, setting: str) -> None:
    """Misconfigured when something listens at a port that is set."""
    if not _free(port):
        raise _taken(port, setting)


def _taken(port: int, setting: str) -> Misconfigured:
    fix = f"stop what listens there, set another, or leave {setting} out to get a free one"
    return Misconfigured(setting, f"port {port} is taken", fix)


def _free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: connections of the last run that linger are no obstacle, a listener is.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError):
            return False
        return True


def _any_free(taken: set[int]) -> int:
    for port in random.sample(_RANGE, len(_RANGE)):
        if port not in taken and _free(port):
            return port
    raise Misconfigured("ports", f"none of {_RANGE.start}–{_RANGE.stop - 1} is free", "set the ports yourself")


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

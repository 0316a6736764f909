"""Child processes: how a service is described, and the process that runs it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from penstock.supervise import launch
from penstock.supervise.folder import private


def running() -> bool:
    """The probe of a service that is ready as soon as it runs."""
    return True


@dataclass(frozen=True, slots=True)
class Service:
    """A description of a child process; nothing happens before a supervisor starts it.

    `ready` asks the service itself; it answers within a second or so, and never raises. `env` comes over the
    environment of the supervisor. `needs` names the services that have to be ready before this one starts, and that
    are stopped after it; those that it `uses` are only stopped after it. With
    `restart="on-failure"` an exit with code 0 is an end, not a death.
    """

    name: str
    command: tuple[str, ...]
    log: Path
    ready: Callable[[], bool] = running
    env: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    needs: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    patience: float = 60.0
    restart: Literal["always", "on-failure"] = "always"
    stop_signal: signal.Signals = signal.SIGTERM
    stdin: bool = False
    """It reads what is piped into us. A terminal is never passed on: it belongs to whoever sits there."""


_LOG_LIMIT = 16 * 1024 * 1024
_TAIL = 64 * 1024


@dataclass(frozen=True, slots=True)
class Process:
    """A child that was started. It leads a session of its own: Ctrl-C in a terminal reaches only the supervisor."""

    log: Path
    log_start: int
    created: float
    _popen: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self._popen.pid

    def exit_code(self) -> int | None:
        """None while it runs; as for subprocess, the negative number of the signal that ended it."""
        return self._popen.poll()

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def end(self) -> None:
        """Kill it at once, and whatever it started that lives on."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        # One that hangs in the kernel may stay: then its end is not worth ours.
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=2)

    def last_lines(self, count: int = 20) -> list[str]:
        """What it logged last, in this life."""
        return tail(self.log, count, self.log_start)

    def memory(self) -> int:
        """Bytes of the process and all below it; where the system tells, a page that several share counts once."""
        try:
            leader = psutil.Process(self.pid)
            family = [leader, *leader.children(recursive=True)]
        except psutil.NoSuchProcess:
            return 0
        return sum(_memory(member) for member in family)


def tied(*command: str) -> list[str]:
    """The command, so that its process ends with this one, however this one ends."""
    return [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), *command]


def start(service: Service) -> Process:
    """Start the service, from a thread that lives as long as it may: Linux ends it with the thread."""
    service.log.parent.mkdir(parents=True, exist_ok=True)
    rotate(service.log)
    with open(service.log, "ab", opener=private) as log:  # Path.open has no opener
        log_start = log.tell()
        popen = subprocess.Popen(
            tied(*service.command),
            stdin=None if service.stdin and not os.isatty(0) else subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=service.folder,
            env={**os.environ, **service.env},
            start_new_session=True,
        )
    return Process(service.log, log_start, psutil.Process(popen.pid).create_time(), popen)


def tail(log: Path, count: int, since: int = 0) -> list[str]:
    """The last lines of a log, of what was written after the position `since`."""
    try:
        with log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(since, end - _TAIL))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except FileNotFoundError:
        return []


def rotate(log: Path) -> None:
    """Put a log aside that has become too long; the one before it goes."""
    with suppress(FileNotFoundError):
        if log.stat().st_size > _LOG_LIMIT:
            log.replace(log.with_name(f"{log.name}.1"))


def _memory(process: psutil.Process) -> int:
    try:
        with suppress(psutil.AccessDenied, AttributeError):
            return int(process.memory_full_info().pss)
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0

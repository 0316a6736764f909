"""Child processes: how a service is described, and the process that runs it. Signals and limits of this process."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import psutil

from penstock.supervise import launch
from penstock.supervise.folder import private_opener


def running() -> bool:
    """The readiness probe of a service that is ready as soon as it runs."""
    return True


@dataclass(frozen=True, slots=True)
class Service:
    """The description of a child process. A supervisor starts it.

    `ready`: a readiness probe, which returns within about a second and never raises. `env`: added to the environment
    of the supervisor. `needs`: services that have to be ready before this one starts; they stop after it. `uses`:
    services that stop after it. `ready_within`: seconds until it has to be ready.
    """

    name: str
    command: tuple[str, ...]
    log: Path
    ready: Callable[[], bool] = running
    env: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    needs: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    ready_within: float = 60.0
    stdin: bool = False
    """It inherits standard input, unless that is a terminal."""


_LOG_LIMIT = 16 * 1024 * 1024
_TAIL = 64 * 1024


@dataclass(frozen=True, slots=True)
class Process:
    """A running child process. It has its own session, so that Ctrl-C in a terminal reaches only the supervisor."""

    log: Path
    log_start: int
    created: float
    _popen: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self._popen.pid

    def exit_code(self) -> int | None:
        """The exit code; None while it runs; the negative signal number if a signal ended it."""
        return self._popen.poll()

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def kill(self) -> None:
        """Kill it and its own children."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        # A process that hangs in the kernel may not end. Do not wait for it.
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=2)

    def last_lines(self, count: int = 20) -> list[str]:
        """The last lines of its log since it started."""
        return tail(self.log, count, self.log_start)

    def memory(self) -> int:
        """Bytes of the process and its descendants. On Linux, shared pages count once."""
        try:
            leader = psutil.Process(self.pid)
            family = [leader, *leader.children(recursive=True)]
        except psutil.NoSuchProcess:
            return 0
        return sum(_memory(member) for member in family)


def tied_to_parent(*command: str) -> list[str]:
    """The command with a launcher that ends it when this process ends, even by kill -9."""
    return [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), *command]


def start(service: Service) -> Process:
    """Start the service. Linux ends it when the calling thread ends."""
    service.log.parent.mkdir(parents=True, exist_ok=True)
    rotate(service.log)
    with open(service.log, "ab", opener=private_opener) as log:  # Path.open has no opener
        log_start = log.tell()
        popen = subprocess.Popen(
            tied_to_parent(*service.command),
            stdin=None if service.stdin and not os.isatty(0) else subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=service.folder,
            env={**os.environ, **service.env},
            start_new_session=True,
        )
    return Process(service.log, log_start, psutil.Process(popen.pid).create_time(), popen)


def tail(log: Path, count: int, since: int = 0) -> list[str]:
    """The last lines of a log after byte `since`."""
    try:
        with log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(since, end - _TAIL))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except FileNotFoundError:
        return []


def rotate(log: Path) -> None:
    """Rename a log that is too long to `.1`, which is replaced."""
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


REQUIRED_FILES = 4_096
"""Open files that one process of Kafka or Spark, or one with many connections, may need."""
_LARGEST_LIMIT = 65_536
"""A larger limit makes programs slow that iterate over all file descriptors."""


def raise_file_limit() -> int:
    """Raise the limit of open files of this process and its children as far as allowed; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _LARGEST_LIMIT if hard == resource.RLIM_INFINITY else min(hard, _LARGEST_LIMIT)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        soft = target
    return _LARGEST_LIMIT if soft == resource.RLIM_INFINITY else soft


def file_limit_warning(limit: int) -> str | None:
    """A warning if the limit of open files is too low."""
    if limit >= REQUIRED_FILES:
        return None
    return (
        f"a process may open {limit:,} files, but {REQUIRED_FILES:,} are needed; raise the limit: "
        f"ulimit -n {_LARGEST_LIMIT} as root, nofile in /etc/security/limits.conf, or LimitNOFILE= of systemd"
    )


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """An event that the first signal sets; the second signal raises KeyboardInterrupt. Only in the main thread.

    Ignored signals stay ignored, as with `nohup`.
    """
    stop = threading.Event()

    def handle(_number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    caught = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in caught:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number in caught:
            signal.signal(number, before[number])


def async_stop_event() -> asyncio.Event:
    """An event of the running loop that SIGINT or SIGTERM sets."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop

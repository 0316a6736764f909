"""Keeps services running: starts them in the order of their needs, restarts them, stops them in reverse order."""

import re
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from graphlib import TopologicalSorter

from penstock.core.clock import Clock, SystemClock
from penstock.core.errors import Unavailable
from penstock.supervise.folder import StateFolder
from penstock.supervise.process import Process, Service, start


class EventKind(StrEnum):
    STARTED = "started"
    READY = "ready"
    DIED = "died"
    RESTARTING = "restarting"
    STOPPED = "stopped"
    KILLED = "killed"


_LONGEST = 500
_OWN_ERROR = "penstock: "
"""The start of the line with which a penstock process reports its error."""
_DAMAGE = re.compile(r"corrupt|redis-check-aof|bad file format|invalid record|checksum", re.IGNORECASE)
"""In the logs of Kafka and Redis: their files are damaged."""


@dataclass(frozen=True, slots=True)
class Event:
    """A change of the state of a service."""

    service: str
    kind: EventKind
    pid: int | None = None
    code: int | None = None
    """The exit code; negative: the signal that ended it."""
    delay: float | None = None
    """Seconds until it starts again, or seconds until it was ready."""
    lines: tuple[str, ...] = ()
    """The last lines of its log."""

    def __str__(self) -> str:
        text = {
            EventKind.STARTED: f"started as process {self.pid}",
            EventKind.READY: f"is ready after {self.delay or 0:.1f} s",
            EventKind.DIED: f"died: {exit_reason(self.code)}",
            EventKind.RESTARTING: f"starts again in {self.delay or 0:g} s",
            EventKind.STOPPED: "stopped",
            EventKind.KILLED: "did not stop in time and was killed",
        }[self.kind]
        return f"{self.service} {text}"


def exit_reason(code: int | None) -> str:
    """Why a process ended, as text."""
    if code is None:
        return "it did not become ready"
    if code >= 0:
        return f"it ended with code {code}"
    try:
        return f"it was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was ended by signal {-code}"


def last_line(lines: Sequence[str]) -> str:
    """The line of a log with the error: that of a penstock process if there is one, otherwise the last line."""
    lines = [line.strip() for line in lines if line.strip()]
    errors = [line.removeprefix(_OWN_ERROR) for line in lines if line.startswith(_OWN_ERROR)]
    return (errors or lines or [""])[-1][:_LONGEST]


def repair_hint(lines: Sequence[str]) -> str:
    """What to do if the log reports damaged files; otherwise empty."""
    damaged = any(_DAMAGE.search(line) for line in lines)
    return "; its files are damaged: stop the pipeline and run penstock repair" if damaged else ""


STOP_WITHIN = 10.0
HEALTHY_AFTER = 60.0
RECENT = 60.0
MEASURE_EVERY = 5.0
"""Seconds between two measurements of memory, which are slow for a JVM."""
_TICK = 0.05


@dataclass(frozen=True, slots=True)
class Usage:
    """The state of a service: its pid (None while it is down), bytes of memory, and how often it died."""

    pid: int | None
    memory: int
    deaths: int
    lately: int = 0
    """How often it died in the last minute."""
    error: str | None = None
    """Why it died last: the exit code, and the last line of its log."""


def backoff(failures: int) -> float:
    """Seconds until the next attempt after a number of failures in a row."""
    return min(0.5 * 2.0 ** min(failures - 1, 6), 30.0)


class Supervisor:
    """Runs the services of a state folder that the caller has locked.

    It works in the thread that calls `start`, `run_until` and `stop`, and calls `on_event` there. That thread must
    exist until the end, because Linux ends the children of a thread with it.
    """

    def __init__(
        self,
        services: Iterable[Service],
        folder: StateFolder,
        on_event: Callable[[Event], None] = lambda _event: None,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock = clock or SystemClock()
        services = list(services)
        self._runners = {service.name: _ServiceRunner(service, folder, on_event, clock) for service in services}
        if len(self._runners) < len(services):
            raise ValueError("two services have the same name")
        self._waves = _waves(services)

    def start(self, stop: threading.Event | None = None) -> None:
        """Start all services, in parallel where possible; return when all are ready, or `stop` is set.

        If a service ends, or is not ready in time, all are stopped, and Unavailable has the last lines of its log.
        """
        stop = stop or threading.Event()
        try:
            while not all(runner.ready for runner in self._runners.values()) and not stop.wait(_TICK):
                for runner in self._runners.values():
                    self._check(runner)
                    if runner.failures:
                        raise runner.failure()
        except BaseException:
            self.stop()
            raise

    def run_until(self, stop: threading.Event) -> None:
        """Supervise until `stop` is set."""
        while not stop.wait(_TICK):
            for runner in self._runners.values():
                self._check(runner)

    def stop(self, within: float = STOP_WITHIN) -> None:
        """Stop all services in reverse order; after `within` seconds, or when interrupted, kill the rest."""
        until = self._clock.elapsed() + within
        try:
            for left, wave in zip(range(len(self._waves), 0, -1), reversed(self._waves), strict=True):
                now = self._clock.elapsed()
                self._stop_wave([self._runners[name] for name in wave], now + (until - now) / left)
        finally:
            for runner in self._runners.values():
                runner.kill()

    def processes(self) -> dict[str, Usage]:
        """The usage of each service."""
        return {name: runner.usage() for name, runner in self._runners.items()}

    def _check(self, runner: "_ServiceRunner") -> None:
        runner.check(may_start=all(self._runners[need].ready for need in runner.service.needs))

    def _stop_wave(self, runners: list["_ServiceRunner"], until: float) -> None:
        for runner in runners:
            runner.ask_to_stop()
        waiting = threading.Event()
        while (running := [runner for runner in runners if not runner.stopped()]) and self._clock.elapsed() < until:
            waiting.wait(_TICK)
        for runner in running:
            runner.kill()


class _ServiceRunner:
    """Runs one service. Its states: down, starting, ready; after a failure down until the next attempt."""

    def __init__(self, service: Service, folder: StateFolder, on_event: Callable[[Event], None], clock: Clock) -> None:
        self.service = service
        self.failures = 0
        self._folder, self._on_event, self._clock = folder, on_event, clock
        self._event = partial(Event, service.name)
        self._process: Process | None = None
        self._since = 0.0
        self._ready_since: float | None = None
        self._not_before = 0.0
        self._deaths = 0
        self._measured = (0, 0.0, 0)
        """The process whose memory was measured last, when, and the bytes."""
        self._died: deque[float] = deque(maxlen=10)
        self._last_exit: tuple[int | None, tuple[str, ...]] = (None, ())

    @property
    def ready(self) -> bool:
        return self._ready_since is not None

    def check(self, may_start: bool) -> None:
        """Check the service once; start or restart it if necessary."""
        now = self._clock.elapsed()
        if self._process is None:
            if may_start and now >= self._not_before:
                self._start(now)
        elif (code := self._process.exit_code()) is not None:
            self._ended(code, now)
        elif self._ready_since is None:
            if self.service.ready():
                self._ready_since = self._clock.elapsed()
                self._on_event(self._event(EventKind.READY, delay=self._ready_since - self._since))
            elif now - self._since > self.service.ready_within:
                self._ended(None, now)

    def failure(self) -> Unavailable:
        code, lines = self._last_exit
        why = exit_reason(code) + (f" within {self.service.ready_within:g} s" if code is None else "")
        log = "\n".join(["; the last lines of its log:", *lines]) if lines else ""
        return Unavailable(self.service.name, f"{why} ({self.service.log}){log}{repair_hint(lines)}")

    def ask_to_stop(self) -> None:
        if self._process and self._process.exit_code() is None:
            self._process.signal(signal.SIGTERM)

    def stopped(self) -> bool:
        if self._process and self._process.exit_code() is not None:
            self._kill_process()
            self._on_event(self._event(EventKind.STOPPED))
        return self._process is None

    def kill(self) -> None:
        if self._process:
            self._kill_process()
            self._on_event(self._event(EventKind.KILLED))

    def usage(self) -> Usage:
        process, now = self._process, self._clock.elapsed()
        lately = sum(now - at < RECENT for at in tuple(self._died))
        if process is None:
            return Usage(None, 0, self._deaths, lately, self._error())
        measured_pid, measured_at, memory = self._measured
        if measured_pid != process.pid or now - measured_at >= MEASURE_EVERY:
            memory = process.memory()
            self._measured = process.pid, now, memory
        return Usage(process.pid, memory, self._deaths, lately, self._error())

    def _error(self) -> str | None:
        if not self._deaths:
            return None
        code, lines = self._last_exit
        line = last_line(lines)
        return f"{exit_reason(code)}: {line}{repair_hint(lines)}" if line else exit_reason(code)

    def _start(self, now: float) -> None:
        self._process = process = start(self.service)
        self._folder.children.add(self.service.name, process.pid, process.created)
        self._since, self._ready_since = now, None
        self._on_event(self._event(EventKind.STARTED, pid=process.pid))

    def _ended(self, code: int | None, now: float) -> None:
        assert self._process is not None
        pid, lines = self._process.pid, tuple(self._process.last_lines())
        if self._ready_since is not None and now - self._ready_since > HEALTHY_AFTER:
            self.failures = 0
        self._kill_process()
        self.failures += 1
        self._last_exit = (code, lines)
        self._deaths += 1
        self._died.append(now)
        self._not_before = now + backoff(self.failures)
        self._on_event(self._event(EventKind.DIED, pid=pid, code=code, lines=lines))
        self._on_event(self._event(EventKind.RESTARTING, delay=backoff(self.failures)))

    def _kill_process(self) -> None:
        """Kill the process and its children, so that none of them is left at the next start."""
        assert self._process is not None
        self._process.kill()
        self._folder.children.remove(self.service.name)
        self._process = self._ready_since = None


def _waves(services: list[Service]) -> list[tuple[str, ...]]:
    """The names in groups: each group needs only earlier groups."""
    names = {service.name for service in services}
    for service in services:
        if unknown := {*service.needs, *service.uses} - names:
            raise ValueError(f"{service.name} needs {', '.join(sorted(unknown))}, which is not there")
    sorter = TopologicalSorter({service.name: (*service.needs, *service.uses) for service in services})
    sorter.prepare()
    waves: list[tuple[str, ...]] = []
    while sorter.is_active():
        waves.append(sorter.get_ready())
        sorter.done(*waves[-1])
    return waves

"""Keeps services running: started in the order of their needs, again when they die, stopped in reverse order."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from graphlib import TopologicalSorter

from penstock.core.clock import Clock, SystemClock
from penstock.core.errors import Unavailable
from penstock.supervise.events import Event, Kind, last_line, reason, repair_of
from penstock.supervise.folder import StateFolder
from penstock.supervise.process import Process, Service, start

STOP_WITHIN = 10.0
HEALTHY_AFTER = 60.0
LATELY = 60.0
_TICK = 0.05


@dataclass(frozen=True, slots=True)
class Usage:
    """A service as the system sees it now: pid (None while it is down), bytes of memory, how often it died."""

    pid: int | None
    memory: int
    deaths: int
    lately: int = 0
    """How often it died within the last minute."""
    error: str | None = None
    """Why it died last: its exit, and the last line that it logged."""


def backoff(failures: int) -> float:
    """Seconds until the next attempt, after so many failures in a row."""
    return min(0.5 * 2.0 ** min(failures - 1, 6), 30.0)


class Supervisor:
    """Runs the services of a state folder that the caller holds.

    It has no thread of its own: whoever calls `start`, `run_until` and `stop` supervises, and has to be a thread that
    lives until the end, because Linux ends the children of a thread with it. `on_event` is called from that thread.
    """

    def __init__(
        self,
        services: Iterable[Service],
        folder: StateFolder,
        on_event: Callable[[Event], None] = lambda _event: None,
        clock: Clock | None = None,
    ) -> None:
        services = list(services)
        self._keepers = {
            service.name: _Keeper(service, folder, on_event, clock or SystemClock()) for service in services
        }
        if len(self._keepers) < len(services):
            raise ValueError("two services have the same name")
        self._waves = _waves(services)
        self._clock = clock or SystemClock()

    def start(self, stop: threading.Event | None = None) -> None:
        """Start all, side by side where needs allow it; return when each is ready, or `stop` is set.

        When one ends or stays silent, the others are stopped, and Unavailable shows the last lines of its log.
        """
        stop = stop or threading.Event()
        try:
            while not all(keeper.arrived for keeper in self._keepers.values()) and not stop.wait(_TICK):
                for keeper in self._keepers.values():
                    keeper.tend(self._may_start(keeper))
                    if keeper.failures:
                        raise keeper.failure()
        except BaseException:
            self.stop()
            raise

    def run_until(self, stop: threading.Event) -> None:
        """Watch until `stop` is set, or no service is left to watch."""
        while not all(keeper.finished for keeper in self._keepers.values()) and not stop.wait(_TICK):
            for keeper in self._keepers.values():
                keeper.tend(self._may_start(keeper))

    def stop(self, within: float = STOP_WITHIN) -> None:
        """Stop all, those that others need last; after so many seconds, or when interrupted, the rest is killed."""
        until = self._clock.elapsed() + within
        try:
            for left, wave in zip(range(len(self._waves), 0, -1), reversed(self._waves), strict=True):
                now = self._clock.elapsed()
                self._stop_wave([self._keepers[name] for name in wave], now + (until - now) / left)
        finally:
            for keeper in self._keepers.values():
                keeper.kill()

    def processes(self, measured: bool = True) -> dict[str, Usage]:
        """What each service uses now; `measured`: its memory as well, which takes a while for a JVM."""
        return {name: keeper.usage(measured) for name, keeper in self._keepers.items()}

    def _may_start(self, keeper: "_Keeper") -> bool:
        return all(self._keepers[need].arrived for need in keeper.service.needs)

    def _stop_wave(self, keepers: list["_Keeper"], until: float) -> None:
        for keeper in keepers:
            keeper.ask_to_stop()
        waiting = threading.Event()
        while (alive := [keeper for keeper in keepers if not keeper.stopped()]) and self._clock.elapsed() < until:
            waiting.wait(_TICK)
        for keeper in alive:
            keeper.kill()


class _Keeper:
    """One service through its lives: down, starting, ready; down again after a death, for a while; or finished."""

    def __init__(self, service: Service, folder: StateFolder, on_event: Callable[[Event], None], clock: Clock) -> None:
        self.service = service
        self.failures = 0
        self.finished = False
        self._folder, self._on_event, self._clock = folder, on_event, clock
        self._process: Process | None = None
        self._since = 0.0
        self._ready_since: float | None = None
        self._not_before = 0.0
        self._deaths = 0
        self._died: deque[float] = deque(maxlen=10)
        self._last_words: tuple[int | None, tuple[str, ...]] = (None, ())

    @property
    def arrived(self) -> bool:
        """It did what others wait for: it is ready, or it came to its end."""
        return self.finished or self._ready_since is not None

    def tend(self, may_start: bool) -> None:
        """Look at it once, and do what is due."""
        now = self._clock.elapsed()
        if self.finished:
            return
        if self._process is None:
            if may_start and now >= self._not_before:
                self._start(now)
        elif (code := self._process.exit_code()) is not None:
            self._ended(code, now)
        elif self._ready_since is None:
            if self.service.ready():
                self._ready_since = self._clock.elapsed()
                self._tell(Kind.READY, delay=self._ready_since - self._since)
            elif now - self._since > self.service.patience:
                self._ended(None, now)

    def failure(self) -> Unavailable:
        code, lines = self._last_words
        why = reason(code) + (f" within {self.service.patience:g} s" if code is None else "")
        said = "\n".join(["; the last lines of its log:", *lines]) if lines else ""
        return Unavailable(self.service.name, f"{why} ({self.service.log}){said}{repair_of(lines)}")

    def ask_to_stop(self) -> None:
        if self._process and self._process.exit_code() is None:
            self._process.signal(self.service.stop_signal)

    def stopped(self) -> bool:
        if self._process and self._process.exit_code() is not None:
            self._gone()
            self._tell(Kind.STOPPED)
        return self._process is None

    def kill(self) -> None:
        if self._process:
            self._gone()
            self._tell(Kind.KILLED)

    def usage(self, measured: bool) -> Usage:
        process = self._process
        pid, memory = (process.pid, process.memory() if measured else 0) if process else (None, 0)
        lately = sum(self._clock.elapsed() - at < LATELY for at in tuple(self._died))
        return Usage(pid, memory, self._deaths, lately, self._error())

    def _error(self) -> str | None:
        if not self._deaths:
            return None
        code, lines = self._last_words
        said = last_line(lines)
        return f"{reason(code)}: {said}{repair_of(lines)}" if said else reason(code)

    def _start(self, now: float) -> None:
        self._process = process = start(self.service)
        self._folder.children.remember(self.service.name, process.pid, process.created)
        self._since, self._ready_since = now, None
        self._tell(Kind.STARTED, pid=process.pid)

    def _ended(self, code: int | None, now: float) -> None:
        assert self._process is not None
        pid, lines = self._process.pid, tuple(self._process.last_lines())
        if self._ready_since is not None and now - self._ready_since > HEALTHY_AFTER:
            self.failures = 0
        self._gone()
        if code == 0 and self.service.restart == "on-failure":
            self.finished = True
            self._tell(Kind.FINISHED, pid=pid)
            return
        self.failures += 1
        self._last_words = (code, lines)
        self._deaths += 1
        self._died.append(now)
        self._not_before = now + backoff(self.failures)
        self._tell(Kind.DIED, pid=pid, code=code, lines=lines)
        self._tell(Kind.RESTARTING, delay=backoff(self.failures))

    def _gone(self) -> None:
        """End what may be left of it, its own children too, so that its next life does not meet them."""
        assert self._process is not None
        self._process.end()
        self._folder.children.forget(self.service.name)
        self._process = self._ready_since = None

    def _tell(
        self,
        kind: Kind,
        pid: int | None = None,
        code: int | None = None,
        delay: float | None = None,
        lines: tuple[str, ...] = (),
    ) -> None:
        self._on_event(Event(self.service.name, kind, pid, code, delay, lines))


def _waves(services: list[Service]) -> list[tuple[str, ...]]:
    """The names in groups, each of which needs only groups before it."""
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

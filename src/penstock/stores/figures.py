"""What a loader measures of itself."""

from collections import deque
from collections.abc import Sequence
from threading import Lock
from typing import Any

from penstock.audit.findings import time_of
from penstock.audit.latency import Sketch
from penstock.clock import Clock
from penstock.contracts import Entry

_RATE_OVER = 10.0


class Figures:
    """Counted by the loader's thread, told to any other."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = Lock()
        self._count = self._refused = self._lag = 0
        self._latency = Sketch()
        self._recent: deque[tuple[float, int]] = deque()
        self._state, self._why = "starting", ""

    def wrote(self, entries: Sequence[Entry], rows: int, refused: int) -> None:
        now = self._clock.now()
        times = [time for entry in entries if (time := time_of(entry.headers)) is not None]
        with self._lock:
            self._count += rows
            self._refused += refused
            self._lag = max(0, self._lag - len(entries))
            self._recent.append((self._clock.elapsed(), rows))
            self._forget()
            for time in times:
                self._latency.add((now - time) / 1_000)

    def lags(self, behind: int) -> None:
        with self._lock:
            self._lag = behind

    def says(self, state: str, why: str = "") -> None:
        with self._lock:
            self._state, self._why = state, why

    def told(self) -> dict[str, Any]:
        with self._lock:
            self._forget()
            return {
                "count": self._count,
                "rate": sum(rows for _, rows in self._recent) / _RATE_OVER,
                "lag": self._lag,
                "refused": self._refused,
                "latency": self._latency.summary(),
                "state": self._state,
                "why": self._why,
            }

    def _forget(self) -> None:
        since = self._clock.elapsed() - _RATE_OVER
        while self._recent and self._recent[0][0] < since:
            self._recent.popleft()

"""What a loader measures of itself."""

from collections.abc import Sequence
from threading import Lock
from typing import Any

from penstock.audit.findings import time_of
from penstock.core.clock import Clock, Micros
from penstock.core.contracts import Entry
from penstock.core.rate import Rate
from penstock.core.sketch import Recent


class Figures:
    """Counted by the loader's thread, told to any other."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = Lock()
        self._rows = Rate(clock)
        self._refused = self._lag = 0
        self._latency = Recent(clock)
        self._state, self._why = "starting", ""

    def wrote(self, entries: Sequence[Entry], rows: int, refused: int) -> None:
        now = self._clock.now()
        times = [time for entry in entries if (time := time_of(entry.headers)) is not None]
        with self._lock:
            self._rows.add(rows)
            self._refused += refused
            self._lag = max(0, self._lag - len(entries))
            for time in times:
                self._latency.add((now - time) / 1_000)

    def stored(self, taken: int, rows: int, refused: int, time: Micros | None) -> None:
        """A batch was written; `time` is when its newest record was sent."""
        now = self._clock.now()
        with self._lock:
            self._rows.add(rows)
            self._refused += refused
            self._lag = max(0, self._lag - taken)
            if time is not None:
                self._latency.add((now - time) / 1_000)

    def lags(self, behind: int) -> None:
        with self._lock:
            self._lag = behind

    def says(self, state: str, why: str = "") -> None:
        with self._lock:
            self._state, self._why = state, why

    def told(self) -> dict[str, Any]:
        with self._lock:
            return {
                "count": self._rows.count,
                "rate": self._rows.per_second(),
                "lag": self._lag,
                "refused": self._refused,
                "latency": self._latency.summary(),
                "state": self._state,
                "why": self._why,
            }

"""Doubles and helpers for the tests of pipelines: a clock that a test moves, and channels in memory."""

from penstock.channels.memory import MemoryChannels
from penstock.core.clock import Micros

__all__ = ["ManualClock", "MemoryChannels"]


class ManualClock:
    """Stands still until it is moved; then both its times go on together."""

    def __init__(self, now: Micros = 1_700_000_000_000_000) -> None:
        self._now = now
        self._elapsed: Micros = 0

    def now(self) -> Micros:
        return self._now

    def elapsed(self) -> float:
        return self._elapsed / 1e6

    def move(self, seconds: float) -> None:
        step = round(seconds * 1e6)
        self._now += step
        self._elapsed += step

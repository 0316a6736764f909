"""The latencies of the last minutes: what a start or an outage did to them passes away."""

from collections import deque

from penstock.audit.latency import Sketch
from penstock.clock import Clock

OVER = 300.0
SLOT = 30.0


class Recent:
    """A sketch over the last five minutes, in slots of half a minute that are forgotten one by one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._slots: deque[tuple[int, Sketch]] = deque()

    def add(self, ms: float, times: int = 1) -> None:
        slot = int(self._clock.elapsed() // SLOT)
        if not self._slots or self._slots[-1][0] != slot:
            self._slots.append((slot, Sketch()))
            self._forget(slot)
        self._slots[-1][1].add(ms, times)

    def sketch(self) -> Sketch:
        """All that was counted lately."""
        self._forget(int(self._clock.elapsed() // SLOT))
        whole = Sketch()
        for _, sketch in list(self._slots):
            whole.merge(sketch)
        return whole

    def summary(self) -> dict[str, float] | None:
        return self.sketch().summary()

    def _forget(self, now: int) -> None:
        while self._slots and self._slots[0][0] <= now - OVER / SLOT:
            self._slots.popleft()


class Lately:
    """The last five minutes of a sketch that somebody else fills and never empties."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._states: deque[tuple[int, Sketch]] = deque()

    def of(self, whole: Sketch) -> Sketch:
        """What was counted since this was first asked, and not longer ago than that."""
        slot = int(self._clock.elapsed() // SLOT)
        if not self._states or self._states[-1][0] != slot:
            self._states.append((slot, whole))
        while len(self._states) > 1 and self._states[1][0] <= slot - OVER / SLOT:
            self._states.popleft()
        return whole.without(self._states[0][1])

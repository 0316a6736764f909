"""Records per second over the last few seconds."""

from collections import deque

from penstock.core.clock import Clock

OVER = 5.0
STEP = 0.25


class Rate:
    """Counts, and remembers what the count was up to some seconds ago."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.count = 0
        self._marks: deque[tuple[float, int]] = deque([(clock.elapsed(), 0)])

    def add(self, number: int) -> None:
        self._advance()
        self.count += number

    def reach(self, total: int) -> None:
        """Take over a total that somebody else counts. What was there before the first call is no rate."""
        if self.count == 0:
            self._marks = deque([(self._clock.elapsed(), total)])
        # In this order: the total is that of now, not that of the last look.
        self.count = total
        self._advance()

    def per_second(self) -> float:
        self._advance()
        since, before = self._marks[0]
        # In the first moments a tiny interval would make a huge rate of a single record.
        return round((self.count - before) / max(self._clock.elapsed() - since, 1.0), 1)

    def _advance(self) -> None:
        now = self._clock.elapsed()
        if now - self._marks[-1][0] >= STEP:
            self._marks.append((now, self.count))
        while len(self._marks) > 1 and self._marks[1][0] <= now - OVER:
            self._marks.popleft()

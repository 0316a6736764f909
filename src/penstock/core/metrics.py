"""Figures that a process measures: rates, and sketches of durations."""

import math
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from penstock.core.clock import Clock

RATE_WINDOW, RATE_STEP = 5.0, 0.25


class Rate:
    """Counts records, and measures records per second over the last few seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.count = 0
        self._samples: deque[tuple[float, int]] = deque([(clock.elapsed(), 0)])

    def add(self, number: int) -> None:
        self._advance()
        self.count += number

    def set_total(self, total: int) -> None:
        """Set the count to a total from elsewhere. The first total does not count towards the rate."""
        if self.count == 0:
            self._samples = deque([(self._clock.elapsed(), total)])
        # In this order: the total is the current one, not that of the last sample.
        self.count = total
        self._advance()

    def per_second(self) -> float:
        self._advance()
        since, before = self._samples[0]
        # Without a minimum, the first record after the start would give a huge rate.
        return round((self.count - before) / max(self._clock.elapsed() - since, 1.0), 1)

    def _advance(self) -> None:
        now = self._clock.elapsed()
        if now - self._samples[-1][0] >= RATE_STEP:
            self._samples.append((now, self.count))
        while len(self._samples) > 1 and self._samples[1][0] <= now - RATE_WINDOW:
            self._samples.popleft()


_ERROR = 0.01
STEP = math.log((1 + _ERROR) / (1 - _ERROR))
"""A duration in ms lies in the bucket ceil(ln(ms) / STEP)."""
_MIDDLE = 1 - _ERROR
# One microsecond to 300 years. Other durations are counted at the edges, so there are at most 1,900 buckets.
_LOWEST, HIGHEST = 0.001, 1e13


def _value(bucket: int) -> float:
    """The duration that represents a bucket."""
    return math.exp(bucket * STEP) * _MIDDLE


class Sketch:
    """Durations in milliseconds, counted in logarithmic buckets, so that quantiles are exact within 1 %.

    A negative duration counts as 0 and as `skewed`: two clocks disagreed.
    """

    __slots__ = ("_buckets", "_max", "_min", "_sum", "_zeros", "count", "skewed")

    def __init__(self) -> None:
        self.count = 0
        self.skewed = 0
        self._zeros = 0
        self._buckets: Counter[int] = Counter()
        self._sum = 0.0
        self._min = math.inf
        self._max = 0.0

    def add(self, ms: float, times: int = 1) -> None:
        """Count a duration; ValueError if it is not a number or `times` is negative."""
        if math.isnan(ms) or times < 0:
            raise ValueError(f"{times} times {ms} ms cannot be counted")
        if times == 0:
            return
        if ms < 0:
            self.skewed += times
        ms = min(max(ms, 0.0), HIGHEST)
        if ms < _LOWEST:
            self._zeros += times
        else:
            self._buckets[math.ceil(math.log(ms) / STEP)] += times
        self.count += times
        self._sum += ms * times
        self._min = min(self._min, ms)
        self._max = max(self._max, ms)

    def merge(self, other: "Sketch") -> None:
        """Add the counts of another sketch."""
        self.count += other.count
        self.skewed += other.skewed
        self._zeros += other._zeros
        self._buckets.update(other._buckets)
        self._sum += other._sum
        self._min = min(self._min, other._min)
        self._max = max(self._max, other._max)

    def without(self, earlier: "Sketch") -> "Sketch":
        """What was counted since an earlier state of this sketch. Minimum and maximum are exact within 1 %."""
        rest = Sketch()
        rest.count, rest.skewed = self.count - earlier.count, self.skewed - earlier.skewed
        rest._zeros, rest._sum = self._zeros - earlier._zeros, self._sum - earlier._sum
        rest._buckets = self._buckets - earlier._buckets
        if rest._buckets:
            rest._min = 0.0 if rest._zeros else _value(min(rest._buckets))
            rest._max = min(_value(max(rest._buckets)), self._max)
        elif rest._zeros:
            rest._min = 0.0
        return rest

    def quantile(self, q: float) -> float | None:
        """The duration that the share `q` (0 to 1) did not exceed; None if nothing was counted."""
        if not 0 <= q <= 1:
            raise ValueError(f"a quantile lies between 0 and 1, not at {q}")
        if not self.count:
            return None
        left = math.ceil(q * self.count) - self._zeros
        if left <= 0:
            return self._min
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                return min(max(_value(bucket), self._min), self._max)
        return self._max

    def summary(self) -> dict[str, float] | None:
        """count, min, mean, p50, p95, p99, max; None if nothing was counted."""
        p50, p95, p99 = self.quantile(0.5), self.quantile(0.95), self.quantile(0.99)
        if p50 is None or p95 is None or p99 is None:
            return None
        mean = self._sum / self.count
        return {
            "count": self.count,
            "min": self._min,
            "mean": mean,
            "p50": p50,
            "p95": p95,
            "p99": p99,
            "max": self._max,
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "zeros": self._zeros,
            "skewed": self.skewed,
            "buckets": {str(bucket): times for bucket, times in sorted(self._buckets.items())},
            "sum": self._sum,
            "min": self._min if self.count else None,
            "max": self._max,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Sketch":
        sketch = cls()
        sketch._zeros = int(document["zeros"])
        sketch.skewed = int(document["skewed"])
        sketch._buckets = Counter({int(bucket): int(times) for bucket, times in document["buckets"].items()})
        sketch.count = sketch._zeros + sketch._buckets.total()
        sketch._sum = float(document["sum"])
        sketch._min = math.inf if document["min"] is None else float(document["min"])
        sketch._max = float(document["max"])
        return sketch


SKETCH_WINDOW, SLOT = 300.0, 30.0


class RecentSketch:
    """A sketch of the last five minutes, in slots of half a minute."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._slots: deque[tuple[int, Sketch]] = deque()

    def add(self, ms: float, times: int = 1) -> None:
        slot = int(self._clock.elapsed() // SLOT)
        if not self._slots or self._slots[-1][0] != slot:
            self._slots.append((slot, Sketch()))
            self._drop_old(slot)
        self._slots[-1][1].add(ms, times)

    def sketch(self) -> Sketch:
        """What was counted in the last five minutes."""
        self._drop_old(int(self._clock.elapsed() // SLOT))
        whole = Sketch()
        for _, sketch in list(self._slots):
            whole.merge(sketch)
        return whole

    def summary(self) -> dict[str, float] | None:
        return self.sketch().summary()

    def _drop_old(self, now: int) -> None:
        while self._slots and self._slots[0][0] <= now - SKETCH_WINDOW / SLOT:
            self._slots.popleft()


class SketchWindow:
    """The last five minutes of a sketch that only grows."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._states: deque[tuple[int, Sketch]] = deque()

    def update(self, total: Sketch) -> Sketch:
        """Take the current state of the sketch; return what was counted in the window."""
        slot = int(self._clock.elapsed() // SLOT)
        if not self._states or self._states[-1][0] != slot:
            self._states.append((slot, total))
        while len(self._states) > 1 and self._states[1][0] <= slot - SKETCH_WINDOW / SLOT:
            self._states.popleft()
        return total.without(self._states[0][1])

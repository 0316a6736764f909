"""A class that keeps state, without Spark: records in, rows out, and a clock that a test moves by hand.

def test_two_cities_are_one_too_many():
    approve = keyed(Approve, key="card")
    approve.feed("card-1", {"city": "Paris"})
    assert approve.feed("card-1", {"city": "Rome"}) == [{"card": "card-1", "verdict": "declined"}]
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import count
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, TimerValues

from penstock.analysis.operators.keyed import Keyed, Processor
from penstock.analysis.plans import CLOCK
from penstock.core.clock import duration
from penstock.core.errors import Misconfigured
from penstock.testing import ManualClock

Input = list[dict[str, Any]]
"""Rows, by their columns."""


def keyed(kind: type[Keyed], key: str | Sequence[str] = "key") -> "Driver":
    """Drive a class. `key` names the columns of its key, for rows that leave them out, and for keys of several."""
    return Driver(kind, (key,) if isinstance(key, str) else tuple(key))


class Driver:
    """Feeds records to a class and moves its time. Timers and times to live go by the same clock here.

    Types are not checked: that is done by Spark, which alone can read them.
    """

    def __init__(self, kind: type[Keyed], key: tuple[str, ...]) -> None:
        self._key = key
        self._clock = ManualClock()
        self._kept = _Kept(self._milliseconds)
        self._processor = Processor(kind, key, CLOCK, lambda ddl: ddl)
        self._processor.init(self._kept)
        self._numbers = count(1)

    @property
    def now(self) -> datetime:
        return datetime.fromtimestamp(self._clock.now() / 1e6, UTC)

    def feed(self, key: Any, *records: Mapping[str, Any]) -> Input:
        """The rows that these records of a key give, and timers that are due.

        A record comes now, by its `event_time`, and as the next one of its channel, by its `origin`, if it says no
        other. What the class raises is raised.
        """
        whole = tuple(key) if len(self._key) > 1 else (key,)
        self._kept.key = whole
        rows = [self._record(whole, record) for record in records]
        return [*self._collected(self._processor.handleInputRows(whole, rows, self._times())), *self._due()]

    def move(self, by: float | str) -> Input:
        """Let time pass, in seconds or as in "10 minutes"; the rows of the timers that are due by then."""
        self._clock.move(duration(by).total_seconds() if isinstance(by, str) else by)
        return self._due()

    def _record(self, key: tuple[Any, ...], record: Mapping[str, Any]) -> Row:
        number = next(self._numbers)
        origin = {
            "sender": "test",
            "epoch": 1,
            "seq": number,
            "time": self._clock.now(),
            "appended": self._clock.now(),
            "partition": 0,
            "offset": number - 1,
        }
        return Row(**{**dict(zip(self._key, key, strict=True)), "event_time": self.now, "origin": origin, **record})

    def _due(self) -> Input:
        found: Input = []
        for at, key in sorted(self._kept.due(), key=lambda due: due[0]):
            self._kept.key = key
            input_ = self._processor.handleExpiredTimer(key, self._times(), ExpiredTimerInfo(at))
            found += self._collected(input_)
            self._kept.deleteTimer(at)
        return found

    def _collected(self, input_: Iterator[Any]) -> Input:
        try:
            rows = [row.asDict() for row in input_]
        except Misconfigured as error:
            raise (error.__cause__ or error) from None
        return [{name: value for name, value in row.items() if name != "origin"} for row in rows]

    def _times(self) -> TimerValues:
        return TimerValues(self._milliseconds())

    def _milliseconds(self) -> int:
        return self._clock.now() // 1_000


class _Kept:
    """What Spark would keep: variables and timers, of the key that is handled now."""

    def __init__(self, now: Callable[[], int]) -> None:
        self.now = now
        self.key: tuple[Any, ...] = ()
        self._timers: dict[tuple[Any, ...], set[int]] = {}

    def getValueState(self, stateName: str, schema: object, ttlDurationMs: int | None = None) -> "_Value":
        return _Value(self, ttlDurationMs)

    def getListState(self, stateName: str, schema: object, ttlDurationMs: int | None = None) -> "_List":
        return _List(self, ttlDurationMs)

    def getMapState(
        self, stateName: str, userKeySchema: object, valueSchema: object, ttlDurationMs: int | None = None
    ) -> "_Map":
        return _Map(self, ttlDurationMs)

    def registerTimer(self, expiryTimestampMs: int) -> None:
        self._timers.setdefault(self.key, set()).add(expiryTimestampMs)

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        self._timers.get(self.key, set()).discard(expiryTimestampMs)

    def listTimers(self) -> list[int]:
        return sorted(self._timers.get(self.key, ()))

    def due(self) -> list[tuple[int, tuple[Any, ...]]]:
        return [(at, key) for key, times in self._timers.items() for at in times if at <= self.now()]


class _Variable:
    """Tuples in slots, per key; a slot is gone when its time is over."""

    def __init__(self, kept: _Kept, ttl: int | None) -> None:
        self._kept, self._ttl = kept, ttl
        self._slots: dict[tuple[Any, ...], dict[Hashable, tuple[tuple[Any, ...], float]]] = {}

    def exists(self) -> bool:
        return bool(self._live())

    def clear(self) -> None:
        self._slots.pop(self._kept.key, None)

    def _live(self) -> dict[Any, tuple[Any, ...]]:
        now = self._kept.now()
        held = self._slots.get(self._kept.key, {})
        return {slot: value for slot, (value, end) in held.items() if end > now}

    def _put(self, slot: Hashable, value: tuple[Any, ...]) -> None:
        end = float("inf") if self._ttl is None else self._kept.now() + self._ttl
        self._slots.setdefault(self._kept.key, {})[slot] = (value, end)

    def _drop(self, slot: Hashable) -> None:
        self._slots.get(self._kept.key, {}).pop(slot, None)


class _Value(_Variable):
    def get(self) -> tuple[Any, ...] | None:
        return self._live().get(None)

    def update(self, newValue: tuple[Any, ...]) -> None:
        self._put(None, newValue)


class _List(_Variable):
    def get(self) -> list[tuple[Any, ...]]:
        return list(self._live().values())

    def put(self, newState: Sequence[tuple[Any, ...]]) -> None:
        self.clear()
        self.appendList(newState)

    def appendValue(self, newState: tuple[Any, ...]) -> None:
        self._put(object(), newState)

    def appendList(self, newState: Sequence[tuple[Any, ...]]) -> None:
        for value in newState:
            self.appendValue(value)


class _Map(_Variable):
    def getValue(self, key: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return self._live().get(key)

    def containsKey(self, key: tuple[Any, ...]) -> bool:
        return key in self._live()

    def updateValue(self, key: tuple[Any, ...], value: tuple[Any, ...]) -> None:
        self._put(key, value)

    def removeKey(self, key: tuple[Any, ...]) -> None:
        self._drop(key)

    def keys(self) -> list[tuple[Any, ...]]:
        return list(self._live())

    def values(self) -> list[tuple[Any, ...]]:
        return list(self._live().values())

    def iterator(self) -> list[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        return list(self._live().items())

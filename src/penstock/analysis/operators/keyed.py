"""User-defined state per key in plain Python, stored by Spark.

class Approve(Keyed):
    last = ValueState("city STRING, at TIMESTAMP", ttl="1 hour")
    schema = "card STRING, verdict STRING"

    def process(self, key, row):
        before = self.last.get()
        self.last.set(city=row.city, at=row.event_time)
        yield {"verdict": "declined" if before and before.city != row.city else "approved"}
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType

from penstock.analysis import plans
from penstock.analysis.frames import description, line_in
from penstock.analysis.operators.variables import Columns, Maps, Read, Schema, Variable, plain
from penstock.core.errors import Misconfigured

_ORIGIN = "origin"
_VERSION = "seen"
_TIMED, _UNNUMBERED = "penstock_timers", "penstock_unnumbered"


class Keyed:
    """A stateful processor: called for each record of a key, with the state of that key.

    Its state is declared in the class: `ValueState`, `ListState`, `MapState`. It belongs to the key that is handled
    now. Any other attribute may be lost before the next record. `schema`: the columns of the rows it yields, as DDL.
    """

    schema: ClassVar[str] = ""
    clock: ClassVar[bool] = False
    """Timers use the clock even if the query has a watermark; without a watermark they always do."""

    def process(self, key: Any, row: Any) -> Any:
        """Called with each record, in the order of the key's records in their channel; yields rows, or returns one.

        A row is a mapping, or a tuple of all columns. Columns of the key may be left out. The first row of a record
        keeps its `origin`, if the frame holds each record once. `key` is the value of the key's column, or a tuple.
        Every class must define it.
        """

    def on_timer(self, key: Any, at: datetime) -> Any:
        """Called once when a timer is due, with its time; yields rows as `process` does.

        Only a class that defines it may set timers.
        """

    @property
    def now(self) -> datetime:
        """The current time of timers in this batch: the watermark, or the clock."""
        return _timestamp(_timers(self).now)

    def set_timer(self, at: datetime) -> None:
        """Call `on_timer` for this key in the first batch at or after this time."""
        _timers(self).handle.registerTimer(_milliseconds(at))

    def delete_timer(self, at: datetime | None = None) -> None:
        """Remove a timer of this key, or all of them."""
        handle = _timers(self).handle
        for one in [_milliseconds(at)] if at is not None else list(handle.listTimers()):
            handle.deleteTimer(one)

    @classmethod
    def over(cls, frame: DataFrame, key: str | Sequence[str]) -> DataFrame:
        """Apply the class to a frame, by key: the columns of `schema`, and `origin`.

        Misconfigured when the class or the frame is invalid.
        """
        names = (key,) if isinstance(key, str) else tuple(key)
        for name in (*names, _ORIGIN):
            if name not in frame.columns:
                problem = f'the frame has no column "{name}", only {", ".join(frame.columns)}'
                fix = "keep origin, which holds the order of records" if name == _ORIGIN else "group by columns of it"
                raise Misconfigured(cls.__name__, problem, fix)
        # Of all operators with state in Python, only Keyed returns origins.
        if _ORIGIN in plans.from_state(frame):
            problem = "its frame has rows from another Keyed: the order of rows without a record is unknown"
            fix = "do both in one class; or read the result of the first in another query"
            raise Misconfigured(cls.__name__, problem, fix)
        mode = _time(cls, any(map(plans.watermarked, frame.schema.fields)))
        if has_timers(cls) and not cls.clock and mode != plans.EVENT_TIME and "EventTimeWatermark" in plans.text(frame):
            problem = "its timers use event time, because the query has a watermark, but the frame has lost event_time"
            raise Misconfigured(
                cls.__name__, problem, "keep event_time; or set clock = True in the class, for timers by the clock"
            )
        numbered = not plans.multiplied(frame)
        processor = Processor(cls, names, mode, _read, Maps(frame.schema), numbered)
        assert isinstance(processor.schema, StructType)
        schema = StructType([*processor.schema.fields, frame.schema[_ORIGIN]])
        result = frame.groupBy(*names).transformWithState(processor, schema, "update", mode)
        result = result if numbered else result.alias(_UNNUMBERED)
        return result.alias(_TIMED) if has_timers(cls) else result


def declared(kind: type[Keyed]) -> dict[str, Variable[Any]]:
    """The variables of a class and its base classes."""
    found: dict[str, Variable[Any]] = {}
    for one in reversed(kind.__mro__):
        found |= {name: variable for name, variable in vars(one).items() if isinstance(variable, Variable)}
    return found


def has_timers(kind: type[Keyed]) -> bool:
    return kind.on_timer is not Keyed.on_timer


def keeps_state(frame: DataFrame) -> bool:
    """Whether a result uses state in Python."""
    return plans.STATE_IN_PYTHON in plans.text(frame)


def waits(frame: DataFrame) -> bool:
    """Whether timers may write rows without records: then Spark must run batches without data."""
    return f"SubqueryAlias {_TIMED}" in plans.text(frame)


def unnumbered(frame: DataFrame) -> str | None:
    """Why rows from state in Python have no origin; None when the first row of each record has."""
    if waits(frame):
        return "rows of timers have no record, so no number"
    if f"SubqueryAlias {_UNNUMBERED}" in plans.text(frame):
        return "its frame has several rows of one record, so their results have no distinct number"
    return None


def _time(kind: type[Keyed], watermark: bool) -> str:
    """The time mode of timers and TTLs. Spark supports only one for both."""
    mortal = [name for name, variable in declared(kind).items() if variable.ttl is not None]
    if has_timers(kind) and watermark and not kind.clock:
        if mortal:
            raise Misconfigured(
                f"{kind.__name__}.{mortal[0]}",
                "its ttl uses the clock, and the timers use event time, because the query has a watermark; "
                "Spark supports only one",
                "leave ttl= out and clear it in on_timer(); or set clock = True in the class, for timers by the clock",
            )
        return plans.EVENT_TIME
    return plans.CLOCK if mortal or has_timers(kind) else plans.NO_TIME


_OWN = {name for name in vars(Keyed) if not name.startswith("_")} | {"timers"}
"""Reserved names."""


class Processor(StatefulProcessor):
    """Adapts a user's class to Spark's StatefulProcessor. Also used in tests."""

    def __init__(
        self,
        kind: type[Keyed],
        key: Sequence[str],
        time: str,
        read: Read,
        maps: Maps | None = None,
        numbered: bool = True,
    ) -> None:
        """`read` parses a DDL. Misconfigured when the class is invalid.

        `maps` converts maps in records to dicts. `numbered`: each record comes once, so its first row gets its origin.
        """
        self._kind, self._key, self._time = kind, tuple(key), time
        self._maps, self._numbered = maps or Maps(StructType()), numbered
        if kind.process is Keyed.process:
            raise Misconfigured(kind.__name__, "it has no process()", "write def process(self, key, row)")
        self._variables = {}
        for name, variable in declared(kind).items():
            if name.startswith("_"):
                raise Misconfigured(f"{kind.__name__}.{name}", "Spark does not support this name", "remove the _")
            if name in _OWN:
                raise Misconfigured(f"{kind.__name__}.{name}", "this name is reserved", "choose another")
            self._variables[name] = variable.read(kind.__name__, read)
        if not kind.schema:
            raise Misconfigured(kind.__name__, "it has no schema", 'write schema = "card STRING, …"')
        try:
            self._columns = Columns(f"{kind.__name__}.schema", read(kind.schema))
        except ValueError as error:
            raise Misconfigured(f"{kind.__name__}.schema", str(error)) from error
        for name in self._columns.names:
            if name.lower() == _ORIGIN:
                raise Misconfigured(f"{kind.__name__}.schema", "origin is added automatically", "leave it out")
            if name.lower() == _VERSION:
                raise Misconfigured(f"{kind.__name__}.schema", "seen is reserved for seen()", "choose another name")
        self.schema = self._columns.schema

    def init(self, handle: Any) -> None:
        self._user = self._kind()
        self._row = Row(*self._columns.names, _ORIGIN)
        # As everywhere in Spark, names are case-insensitive.
        named = {name.lower(): name for name in self._columns.names}
        self._filled_in = [named.get(name.lower()) for name in self._key]
        self._timers = _Timers(handle) if has_timers(self._kind) else None
        self._user.__dict__["_timers"] = self._timers
        for name, variable in declared(self._kind).items():
            self._user.__dict__[f"_{name}"] = variable.open(handle, self._variables[name])

    def handleInputRows(self, key: Any, rows: Iterable[Any], timerValues: Any) -> Iterator[Any]:
        self._set_time(timerValues)
        key = tuple(map(plain, key))
        # All records of a key in a batch are in memory: they are sorted by offset.
        for record in self._in_order(key, rows):
            origin = record[_ORIGIN] if self._numbered else None
            for made in self._called("process", key, self._maps.read(record)):
                yield self._made(key, made, origin)
                origin = None

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        self._set_time(timerValues)
        key = tuple(map(plain, key))
        for made in self._called("on_timer", key, _timestamp(expiredTimerInfo.getExpiryTimeInMs())):
            yield self._made(key, made, None)

    def _in_order(self, key: Any, rows: Iterable[Any]) -> list[Any]:
        records = list(rows)
        if any(record[_ORIGIN] is None for record in records):
            location = f"{self._kind.__name__} for the key {_key_text(key)}"
            problem = "a row has no origin, so its order is unknown"
            raise Misconfigured(location, problem, "keep the origin of a record in each row of the frame")
        return sorted(records, key=_location)

    def _set_time(self, values: Any) -> None:
        if self._timers is not None:
            by_event = self._time == plans.EVENT_TIME
            self._timers.now = values.getCurrentWatermarkInMs() if by_event else values.getCurrentProcessingTimeInMs()

    def _called(self, method: str, key: Any, argument: Any) -> Iterator[Any]:
        """Call the user's code; errors become Misconfigured with file, line and key."""
        try:
            yield from _each(getattr(self._user, method)(key[0] if len(key) == 1 else tuple(key), argument))
        except Exception as error:
            raise self._wrong(method, key, error) from error

    def _made(self, key: Any, made: Any, origin: Any) -> Any:
        try:
            if isinstance(made, Mapping):
                return self._row(*self._columns.named({**self._of_key(key), **made}), origin)
            return self._row(*self._columns.to_spark(made), origin)
        except (TypeError, ValueError) as error:
            raise self._wrong("schema", key, error) from error

    def _of_key(self, key: Any) -> dict[str, Any]:
        return {name: value for name, value in zip(self._filled_in, key, strict=True) if name is not None}

    def _wrong(self, method: str, key: Any, error: Exception) -> Misconfigured:
        location = f"{self._kind.__name__}.{method} for the key {_key_text(key)}"
        message = " ".join(f"{type(error).__name__}: {error}".split())
        return Misconfigured(line_in(getattr(self._kind, method, None), error, location), message)


class _Timers:
    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.now = 0


def _timers(keyed: Keyed) -> _Timers:
    found: _Timers | None = keyed.__dict__.get("_timers")
    if found is None:
        raise AttributeError(f"{type(keyed).__name__} has no timers: write def on_timer(self, key, at)")
    return found


def _each(columns: Any) -> Iterable[Any]:
    """The rows that a method returned: none, one row, or several."""
    if columns is None:
        return ()
    if isinstance(columns, str | bytes):
        raise TypeError(f"{columns!r} is not a row: return a mapping, or a tuple of all columns")
    return (columns,) if isinstance(columns, Mapping | tuple) else columns


def _location(record: Any) -> tuple[int, int]:
    origin = record[_ORIGIN]
    return origin["partition"], origin["offset"]


def _timestamp(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1_000, UTC)


def _milliseconds(at: datetime) -> int:
    """Milliseconds since 1970, rounded up."""
    if at.tzinfo is None:
        raise ValueError(f"{at} has no time zone; use one, as in datetime.now(UTC)")
    return math.ceil((at - datetime.fromtimestamp(0, UTC)) / timedelta(milliseconds=1))


def _key_text(key: Sequence[Any]) -> str:
    text = repr(key[0] if len(key) == 1 else tuple(key))
    return text if len(text) <= 80 else f"{text[:79]}…"


def _read(ddl: str) -> Schema:
    try:
        schema = StructType.fromDDL(ddl)
    except PySparkException as error:
        raise ValueError(f'"{ddl}" cannot be read as columns: {description(error)}') from None
    return schema if isinstance(schema, StructType) else StructType().add("value", schema)

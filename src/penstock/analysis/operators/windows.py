"""Windows by count: a fixed number of records each, in the order of their channel.

For windows by time, use Spark's `F.window` and `F.session_window` over `event_time`.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from itertools import groupby
from operator import xor
from typing import Any, NamedTuple

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import ArrayType, StructField, StructType

from penstock.analysis.frames import ADDED, DELETED, EXACT, MARK, columns_of
from penstock.core.errors import Misconfigured

_ADDED = (
    "window STRUCT<number: BIGINT, first: BIGINT, last: BIGINT>, rows STRING, "
    "seen STRUCT<count: BIGINT, newest: BIGINT, appended: BIGINT, mark: BIGINT>"
)
_ALL, _RECORD = "_all", "_record"


def count_window(
    frame: DataFrame, size: int, slide: int | None = None, key: str | Sequence[str] = (), partial: bool = False
) -> DataFrame:
    """Windows of `size` records: one after the other, or one every `slide` records; for each `key`, or for all records.

    A row for each full window: the columns `key`; `window` with its number, first and last record, counted from 1 in
    the key; `rows`, its records in order, without `origin` and `key`; and `seen`. With `partial`, open windows are
    written with each batch that adds to them.

    Records of a partition are counted in order, so a key in one partition always gets the same windows. Records of
    several partitions are merged by event time within a batch: their windows depend on the batches, and a recomputation
    may differ. The state of a key is its number of records, and the records of its open windows.
    """
    keys = [key] if isinstance(key, str) else list(key)
    step = size if slide is None else slide
    _check(frame, size, step, keys)
    kept = [name for name in frame.columns if name != "origin" and name not in keys]
    # Records are passed and stored as JSON: Spark loses maps in the state of a Python function.
    record = F.struct(
        F.to_json(F.struct(*(F.col(f"`{name}`") for name in kept)), EXACT).alias("row"),
        F.unix_micros("event_time").alias("at"),
        F.col("origin.partition").alias("partition"),
        F.col("origin.offset").alias("offset"),
        F.col("origin.time").alias("newest"),
        F.col("origin.appended").alias("appended"),
        F.expr(MARK).alias("mark"),
    )
    columns = [F.col(f"`{name}`") for name in keys] or [F.lit(True).alias(_ALL)]
    records = frame.select(*columns, record.alias(_RECORD))
    by = StructType([field for field in records.schema.fields if field.name != _RECORD])
    schema = StructType([*by.fields, *columns_of(_ADDED).fields])
    made = records.groupBy(*(f"`{name}`" for name in by.names)).transformWithState(
        _Counting(size, step, partial, schema.names), schema, "update", "none"
    )
    shape = ArrayType(StructType([StructField(name, frame.schema[name].dataType) for name in kept]), False)
    # explode keeps the optimizer from parsing in every expression over the rows.
    parsed = F.explode(F.array(F.from_json("rows", shape, EXACT)))
    return made.select(*(f"`{name}`" for name in keys), "window", parsed.alias("rows"), "seen")


def total(values: str | Column, kind: str = "double") -> Column:
    """The sum of an array, such as `"rows.amount"`, as type `kind`; null when it is empty."""
    there = F.filter(F.col(values) if isinstance(values, str) else values, lambda value: value.isNotNull())
    zero = F.lit(0).cast(kind)
    return F.when(F.size(there) > 0, F.aggregate(there, zero, lambda sum_, value: (sum_ + value).cast(kind)))


def average(values: str | Column) -> Column:
    """The mean of an array, such as `"rows.amount"`; null when it is empty."""
    there = F.filter(F.col(values) if isinstance(values, str) else values, lambda value: value.isNotNull())
    return total(there) / F.size(there)


class Kept(NamedTuple):
    """The fields of a record in a window."""

    row: str
    newest: int | None
    appended: int | None
    mark: int


class Window(NamedTuple):
    number: int
    first: int
    last: int
    """The last record of the full window, also while it is open: it is part of the row's key."""
    records: Sequence[Kept]


def open_from(count: int, size: int, slide: int) -> int:
    """The first record, counted from 1, of the first window that is not full after `count` records."""
    return max(0, (count - size) // slide + 1) * slide + 1


def windows(count: int, fresh: int, records: Sequence[Kept], size: int, slide: int, partial: bool) -> Iterator[Window]:
    """The windows that `fresh` new records fill, and with `partial` also those that remain open.

    `records` are all records from the first window that was open after `count` records.
    """
    begin, until = open_from(count, size, slide), count + fresh
    for first in range(begin, until + 1, slide):
        last = first + size - 1
        if last <= until or partial:
            some = records[first - begin : last - begin + 1]
            yield Window((first - 1) // slide + 1, first, last, some)


def in_order(rows: Iterable[Row]) -> list[Kept]:
    """The records of a batch in order: by offset in a partition, partitions merged by event time."""
    placed = sorted((row[_RECORD] for row in rows), key=lambda one: (one["partition"], one["offset"]))
    partitions = [list(some) for _, some in groupby(placed, key=lambda one: one["partition"])]
    merged = heapq.merge(*partitions, key=lambda one: (one["at"], one["partition"]))
    return [Kept(one["row"], one["newest"], one["appended"], one["mark"]) for one in merged]


class _Counting(StatefulProcessor):
    def __init__(self, size: int, slide: int, partial: bool, names: Sequence[str]) -> None:
        self._size, self._slide, self._partial = size, slide, partial
        self._row = Row(*names)

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._count = handle.getValueState("count", "count BIGINT")
        self._open = handle.getListState("open", "row STRING, newest BIGINT, appended BIGINT, mark BIGINT")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        fresh = in_order(rows)
        stored = self._count.get()
        count = 0 if stored is None else stored[0]
        now = count + len(fresh)
        self._count.update((now,))
        begin, after = (open_from(one, self._size, self._slide) for one in (count, now))
        if begin == after and not self._partial:
            self._open.appendList([*fresh])
            return
        records = [*(map(Kept._make, self._open.get()) if begin <= count else ()), *fresh]
        if left := records[after - begin :]:
            self._open.put(left)
        else:
            self._open.clear()
        for window in windows(count, len(fresh), records, self._size, self._slide, self._partial):
            yield self._row(*key, *_columns(window))


def _columns(window: Window) -> tuple[Row, str, Row]:
    """window, rows and seen."""
    records = window.records
    span = Row("number", "first", "last")(window.number, window.first, window.last)
    newest, appended = (
        max((one for one in some if one is not None), default=None)
        for some in ((one.newest for one in records), (one.appended for one in records))
    )
    mark = reduce(xor, (one.mark for one in records))
    seen = Row("count", "newest", "appended", "mark")(len(records), newest, appended, mark)
    return span, f"[{','.join(one.row for one in records)}]", seen


def _check(frame: DataFrame, size: int, slide: int, keys: Sequence[str]) -> None:
    location = "count_window()"
    if size < 1:
        raise Misconfigured(location, f"size is {size}", "use 1 or more")
    if not 1 <= slide <= size:
        problem = f"slide is {slide}, with windows of {size} records"
        raise Misconfigured(location, problem, f"use a slide from 1 to {size}, so that each record is in a window")
    columns = frame.columns
    if missing := [name for name in ADDED if name not in columns]:
        fix = "pass the frame of a channel, or keep these columns in select()"
        raise Misconfigured(location, f"its frame has no column {' and '.join(missing)}", fix)
    if DELETED in columns:
        fix = "use tables.latest, join or foreign_key_join"
        raise Misconfigured(location, "its frame is a table, whose rows change and may have no time", fix)
    if unknown := [name for name in keys if name not in columns or name == "origin"]:
        others = ", ".join(name for name in columns if name != "origin")
        raise Misconfigured(location, f"key= names {' and '.join(unknown)}", f"name columns of its frame: {others}")
    if reserved := [name for name in keys if name in ("window", "rows", "seen")]:
        raise Misconfigured(location, f"{reserved[0]} is a column of the result", "rename the one in key=")

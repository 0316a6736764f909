"""Tables: the last record of a key in a channel is its row, and a record without a value deletes it.

Operators on tables return tables: results with the columns `key` and `seen`, whose rows are deleted when an inner join
loses a side. The order within a table is by offset: a key is in one partition.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any, Literal, NamedTuple

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import StructType

from penstock.analysis.frames import ADDED, DELETED, EXACT, KEY, MARK
from penstock.analysis.plans import AS_IT_CAME
from penstock.core.errors import Misconfigured

FOUND = "found"
"""The column with the row that a lookup finds."""

_ORIGIN_FIELDS = "offset BIGINT, newest BIGINT, appended BIGINT, mark BIGINT"
MOVED = f"place STRING, key STRING, row STRING, gone BOOLEAN, told BOOLEAN, changes BIGINT, {_ORIGIN_FIELDS}"
RELATED = (
    "key STRING, left STRING, right STRING, "
    "seen STRUCT<count: BIGINT, newest: BIGINT, appended: BIGINT, mark: BIGINT, deleted: BOOLEAN>"
)
LOOKED_UP = f"row STRING, {FOUND} STRING"

CHANGES = 2**22
"""How often a row, and the row that it references, may change before versions run out."""


class _Held(NamedTuple):
    """A row of a table: its text, whether it is deleted, how often it has changed, and its last record."""

    row: str | None = None
    gone: bool = True
    changes: int = 0
    offset: int = -1
    newest: int | None = None
    appended: int | None = None
    mark: int = 0

    def then(self, row: Row) -> "_Held":
        """The row after one more record. A deleted row keeps its text."""
        changes = self.changes + 1
        if row.offset < self.offset:
            return self._replace(changes=changes)
        text = self.row if row.gone else row.row
        return _Held(text, row.gone, changes, row.offset, row.newest, row.appended, row.mark)


_HELD = f"row STRING, gone BOOLEAN, changes BIGINT, {_ORIGIN_FIELDS}"


class Moves(StatefulProcessor):
    """Left rows by their key: sends each to its current place, and a removal to its previous place.

    A place is the referenced row, `=KEY`, or without a reference, the row's own place, `-KEY`. Only the current place
    of a row writes its result. So the last record of a key in the result is correct in any order of places.
    """

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._at = handle.getValueState("at", "place STRING, changes BIGINT, offset BIGINT")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        before, changes, offset = self._at.get() or (None, 0, -1)
        held, names = _Held(changes=changes, offset=offset), None
        for row in rows:
            if row.offset > held.offset:
                names = row.names
            held = held.then(row)
        if held.offset == offset:
            # All are older than the stored row: the key was moved to another partition.
            self._at.update((before, held.changes, offset))
            return
        own = f"-{key[0]}"
        location = own if names is None else f"={names}"
        if held.gone:
            location = before or own
        self._at.update((None if held.gone else location, held.changes, held.offset))
        fields = {"key": key[0], **held._asdict()}
        if before is not None and before != location:
            yield Row(**{**fields, "gone": True}, place=before, told=False)
        yield Row(**fields, place=location, told=True)


class Relation(StatefulProcessor):
    """A right row and the left rows that reference it: writes each pair when one of the two changes."""

    def __init__(self, without: bool) -> None:
        """`without`: whether a left row is written without a right row."""
        self._without = without

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._right = handle.getValueState("right", _HELD)
        self._lefts = handle.getMapState("lefts", "key STRING", _HELD)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        lefts: dict[str, Row] = {}
        before = right = _Held(*(self._right.get() or ()))
        for row in rows:
            if row.key is None:
                right = right.then(row)
            elif row.key not in lefts or row.changes > lefts[row.key].changes:
                lefts[row.key] = row
        if right != before:
            self._right.update(right)
        # A row without a reference is not stored: only its own changes matter.
        alone = key[0].startswith("-")
        for name, row in lefts.items():
            stored = None if alone else self._lefts.getValue((name,))
            left = _Held(*(row[field] for field in _Held._fields))
            if row.gone:
                if stored is not None:
                    self._lefts.removeKey((name,))
                if row.told:
                    last = left._replace(row=row.row or (stored[0] if stored else None))
                    yield _related(name, last, _Held(row=right.row), True)
            elif alone:
                yield self._pair(name, left, right)
            else:
                self._lefts.updateValue((name,), left)
                if right == before:
                    yield self._pair(name, left, right)
        if right != before:
            for (name,), values in list(self._lefts.iterator()):
                yield self._pair(name, _Held(*values), right)

    def _pair(self, name: str, left: _Held, right: _Held) -> Row:
        if self._without and right.gone:
            return _related(name, left, right._replace(row=None), False)
        return _related(name, left, right, right.gone)


class Lookup(StatefulProcessor):
    """A row of a table and the records of a stream that reference it: writes each record with the current row."""

    def __init__(self, without: bool) -> None:
        """`without`: whether a record is written that finds no row."""
        self._without = without

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._row = handle.getValueState("row", "row STRING, offset BIGINT")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        found, offset = self._row.get() or (None, -1)
        before, records = offset, []
        for row in rows:
            if not row.known:
                records.append(row)
            elif row.offset > offset:
                found, offset = None if row.gone else row.row, row.offset
        if offset > before:
            self._row.update((found, offset))
        if found is not None or self._without:
            for row in sorted(records, key=lambda row: (row.partition, row.offset)):
                yield Row(row=row.row, found=found)


def _related(name: str, left: _Held, right: _Held, deleted: bool) -> Row:
    """A row of the result. Its version grows with each change of the left row, and between these of the right row."""
    if max(left.changes, right.changes) >= CHANGES:
        problem = f"the row {name}, or its right row, has changed {CHANGES} times: no version is left"
        raise Misconfigured("tables.foreign_key_join", problem, "start a new generation: --new-checkpoint QUERY")
    seen = {
        "count": left.changes * CHANGES + right.changes,
        "newest": _later(left.newest, right.newest),
        "appended": _later(left.appended, right.appended),
        "mark": left.mark ^ right.mark,
        "deleted": deleted,
    }
    return Row(key=name, left=left.row, right=right.row, seen=seen)


def _later(one: int | None, other: int | None) -> int | None:
    return max((at for at in (one, other) if at is not None), default=None)


_OWN = ("key", "seen")
_TAG, _DELETED, _ORIGIN = "_tag", "_gone", "_origin"


def latest(table: DataFrame) -> DataFrame:
    """The last value of each key: `key`, the columns of the payload, `seen`."""
    payload = _payload("latest", table)
    if reserved := [name for name in payload if name in _OWN]:
        raise Misconfigured("tables.latest", f"the table has a column {reserved[0]} of its own", "rename it before")
    folded = _folded([("row", table)])
    return folded.select("key", *(F.col(f"_known.row.`{name}`").alias(name) for name in payload), _seen(~_there(0)))


def join(how: Literal["inner", "left", "outer"] = "inner", **tables: DataFrame) -> DataFrame:
    """Join tables by their keys: `key`, a struct for each table under its name, `seen`.

    A row exists while all tables have the key ("inner"), the first has it ("left"), or any has it ("outer"). Without a
    row in a table, its struct is null. In a deleted row, each struct keeps its last value.
    """
    _check_choice("join", how, ("inner", "left", "outer"))
    if len(tables) < 2:
        raise Misconfigured("tables.join", "it needs two tables or more", "name them: join(one=…, another=…)")
    if reserved := [name for name in tables if name in _OWN]:
        raise Misconfigured("tables.join", f"{reserved[0]} is a column that it adds", "rename the table")
    folded = _folded(list(tables.items()))
    there = [_there(index) for index in range(len(tables))]
    whole = {"inner": reduce(Column.__and__, there), "left": there[0], "outer": reduce(Column.__or__, there)}[how]
    rows = [F.when(there[index] | ~whole, F.col(f"_known.`{name}`")).alias(name) for index, name in enumerate(tables)]
    return folded.select("key", *rows, _seen(~whole))


def foreign_key_join(
    left: DataFrame, right: DataFrame, *, key: str, how: Literal["inner", "left"] = "inner"
) -> DataFrame:
    """Join each row of a table with the row of another one that its column `key` references.

    The columns are `key`, `left`, `right` and `seen`.

    The result has the keys of the left table. A change on either side changes all affected rows. The count in `seen` is
    only a version, not a number of records.
    """
    _check_choice("foreign_key_join", how, ("inner", "left"))
    columns, others = _payload("foreign_key_join", left), _payload("foreign_key_join", right)
    if key not in left.columns:
        raise Misconfigured(
            "tables.foreign_key_join", f'the left table has no column "{key}"', f"it has {', '.join(columns)}"
        )
    changes = left.select(
        F.col(KEY).alias("key"),
        F.col(f"`{key}`").cast("string").alias("names"),
        _text(columns).alias("row"),
        F.col(DELETED).alias("gone"),
        *_origin_columns(),
    )
    moves = changes.groupBy("key").transformWithState(Moves(), MOVED, "update", "none")
    rows = right.select(
        F.concat(F.lit("="), KEY).alias("place"),
        F.lit(None).cast("string").alias("key"),
        _text(others).alias("row"),
        F.col(DELETED).alias("gone"),
        F.lit(True).alias("told"),
        F.lit(1).cast("bigint").alias("changes"),
        *_origin_columns(),
    )
    related = moves.unionByName(rows).groupBy("place")
    result = related.transformWithState(Relation(how == "left"), RELATED, "update", "none")
    return result.select(
        "key", _read("left", left, columns).alias("left"), _read("right", right, others).alias("right"), "seen"
    )


def lookup(stream: DataFrame, table: DataFrame, *, key: str, how: Literal["inner", "left"] = "inner") -> DataFrame:
    """Join each record of a stream with the current row of a table: its own columns, and `found`.

    `key` is the column of the stream that references the row. Later changes of the table do not change results. In a
    batch, records of the table come first.
    """
    _check_choice("lookup", how, ("inner", "left"))
    columns = _payload("lookup", table)
    if absent := [name for name in (key, "origin") if name not in stream.columns]:
        raise Misconfigured("tables.lookup", f'the stream has no column "{absent[0]}"', "keep it in the frame")
    if FOUND in stream.columns:
        raise Misconfigured("tables.lookup", f'the stream has a column "{FOUND}" of its own', "rename it before")
    reference = F.col(f"`{key}`").cast("string")
    records = stream.select(
        F.when(reference.isNotNull(), F.concat(F.lit("="), reference)).otherwise("-").alias("place"),
        F.lit(False).alias("known"),
        _text(stream.columns).alias("row"),
        F.lit(False).alias("gone"),
        *_position(),
    )
    rows = table.select(
        F.concat(F.lit("="), KEY).alias("place"),
        F.lit(True).alias("known"),
        _text(columns).alias("row"),
        F.col(DELETED).alias("gone"),
        *_position(),
    )
    looked = rows.unionByName(records).groupBy("place")
    result = looked.transformWithState(Lookup(how == "left"), LOOKED_UP, "update", "none")
    own = F.from_json("row", _shape(stream, stream.columns), EXACT)
    read = result.select(own.alias("own"), _read(FOUND, table, columns).alias(FOUND))
    return read.select("own.*", FOUND).alias(AS_IT_CAME)


def where(result: DataFrame, condition: str | Column) -> DataFrame:
    """Keep the rows of a result that meet a condition, and delete the others.

    A plain `where()` would keep the last version of a row that met the condition.
    """
    if "seen" not in result.columns or "deleted" not in _fields(result, "seen"):
        raise Misconfigured("tables.where", "its frame is not a result of latest, join or foreign_key_join", "use one")
    holds = F.expr(condition) if isinstance(condition, str) else condition
    gone = F.col("seen.deleted") | ~F.coalesce(holds, F.lit(False))
    return result.withColumn("seen", F.col("seen").withField("deleted", gone))


def _folded(tables: Sequence[tuple[str, DataFrame]]) -> DataFrame:
    """Per key: the last row of each table with its offset, the offset of the last deletion, and `seen`."""
    tagged = [
        frame.select(
            F.col(KEY).alias("key"),
            F.lit(index).alias(_TAG),
            F.col(DELETED).alias(_DELETED),
            F.col("origin").alias(_ORIGIN),
            *(_row(name, other, index == at) for at, (name, other) in enumerate(tables)),
        )
        for index, (_, frame) in enumerate(tables)
    ]

    def of(index: int, deleted: bool) -> str:
        return f"FILTER (WHERE {_TAG} = {index} AND {'' if deleted else 'NOT '}{_DELETED})"

    last = [
        F.expr(f"max_by(`{name}`, {_ORIGIN}.offset) {of(index, False)}").alias(f"_row{index}")
        for index, (name, _) in enumerate(tables)
    ]
    positions = [
        F.expr(f"max({_ORIGIN}.offset) {of(index, deleted)}").alias(f"_{'gone' if deleted else 'there'}{index}")
        for index in range(len(tables))
        for deleted in (False, True)
    ]
    mark = MARK.replace("origin.", f"{_ORIGIN}.")
    counted = f"struct(count(1) AS count, max({_ORIGIN}.time) AS newest, max({_ORIGIN}.appended) AS appended"
    union = reduce(DataFrame.unionByName, tagged)
    folded = union.groupBy("key").agg(*last, *positions, F.expr(f"{counted}, bit_xor({mark}) AS mark)").alias("seen"))
    rows = F.struct(*(F.col(f"_row{index}").alias(name) for index, (name, _) in enumerate(tables)))
    return folded.withColumn("_known", rows)


def _row(name: str, frame: DataFrame, own: bool) -> Column:
    """A table's struct: the payload of its own records, null for records of other tables."""
    payload = _payload(name, frame)
    if own:
        return F.struct(*(F.col(f"`{column}`") for column in payload)).alias(name)
    return F.lit(None).cast(_shape(frame, payload)).alias(name)


def _there(index: int) -> Column:
    there, gone = F.col(f"_there{index}"), F.col(f"_gone{index}")
    return there.isNotNull() & (gone.isNull() | (there > gone))


def _seen(deleted: Column) -> Column:
    return F.col("seen").withField("deleted", deleted).alias("seen")


def _payload(function: str, table: DataFrame) -> list[str]:
    """The columns of a table's payload, without `key` and `seen` of a result, which are computed again."""
    columns = table.columns
    if not {KEY, DELETED, "origin"} <= set(columns):
        problem = f"one of its frames has no {KEY}, {DELETED} and origin"
        fix = "declare the channel with table=True, and keep these columns"
        raise Misconfigured(f"tables, {function}", problem, fix)
    own = _OWN if "seen" in columns and _fields(table, "seen") == ["count", "newest"] else ()
    return [name for name in columns if name not in (*ADDED, KEY, DELETED, *own)]


def _fields(frame: DataFrame, column: str) -> list[str]:
    return list(getattr(frame.schema[column].dataType, "names", ()))


def _shape(frame: DataFrame, columns: Sequence[str]) -> StructType:
    """The columns as a struct type of nullable fields."""
    shape = StructType()
    for name in columns:
        shape = shape.add(name, frame.schema[name].dataType)
    return shape


def _text(columns: Sequence[str]) -> Column:
    """A row as JSON, to pass it through Python."""
    return F.to_json(F.struct(*(F.col(f"`{name}`") for name in columns)), EXACT)


def _read(column: str, frame: DataFrame, columns: Sequence[str]) -> Column:
    return F.from_json(column, _shape(frame, columns), EXACT)


def _position() -> list[Column]:
    return [F.col("origin.partition").alias("partition"), F.col("origin.offset").alias("offset")]


def _origin_columns() -> list[Column]:
    return [
        F.col("origin.offset").alias("offset"),
        F.col("origin.time").alias("newest"),
        F.col("origin.appended").alias("appended"),
        F.expr(MARK).alias("mark"),
    ]


def _check_choice(function: str, how: str, choices: Sequence[str]) -> None:
    if how not in choices:
        raise Misconfigured(f"tables.{function}", f'how is "{how}"', f"the choices are {', '.join(choices)}")

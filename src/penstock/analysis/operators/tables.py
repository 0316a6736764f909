"""Tables: channels of which the last record of a key is the row of that key, and one without a value deletes it.

What is made of tables here is a table again: a result with the columns `key` and `seen`, whose rows are deleted when
they are not whole any more. Within a table, order is by offset: a key lies in one partition.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Literal

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from penstock.analysis.conserving import AS_IT_CAME
from penstock.analysis.frames import ADDED, DELETED, EXACT, KEY, MARK
from penstock.analysis.operators.related import FOUND, LOOKED_UP, MOVED, RELATED, Lookup, Moves, Relation
from penstock.core.errors import Misconfigured

_OWN = ("key", "seen")
_TAG, _DELETED, _ORIGIN = "_tag", "_gone", "_origin"


def latest(table: DataFrame) -> DataFrame:
    """The last value of each key: `key`, the columns of the payload, `seen`."""
    payload = _payload("latest", table)
    if taken := [name for name in payload if name in _OWN]:
        raise Misconfigured("tables.latest", f"the table has a column {taken[0]} of its own", "rename it before")
    folded = _folded([("row", table)])
    return folded.select("key", *(F.col(f"_known.row.`{name}`").alias(name) for name in payload), _seen(~_there(0)))


def join(how: Literal["inner", "left", "outer"] = "inner", **tables: DataFrame) -> DataFrame:
    """Tables joined by their keys: `key`, a struct for each table under its given name, `seen`.

    A row is there while all tables have one ("inner"), while the first has ("left"), or while any has ("outer"). Where
    a table has none, its struct is null. Of a row that is deleted, each struct keeps its last value.
    """
    _chosen("join", how, ("inner", "left", "outer"))
    if len(tables) < 2:
        raise Misconfigured("tables.join", "it joins two tables or more", "name them: join(one=…, another=…)")
    if taken := [name for name in tables if name in _OWN]:
        raise Misconfigured("tables.join", f"{taken[0]} is a column that it adds", "name the table otherwise")
    folded = _folded(list(tables.items()))
    there = [_there(index) for index in range(len(tables))]
    whole = {"inner": reduce(Column.__and__, there), "left": there[0], "outer": reduce(Column.__or__, there)}[how]
    rows = [F.when(there[index] | ~whole, F.col(f"_known.`{name}`")).alias(name) for index, name in enumerate(tables)]
    return folded.select("key", *rows, _seen(~whole))


def foreign(left: DataFrame, right: DataFrame, *, on: str, how: Literal["inner", "left"] = "inner") -> DataFrame:
    """Each row of a table with the row of another whose key its column `on` names: `key`, `left`, `right`, `seen`.

    The key is that of the left table. A change on either side changes all rows that it concerns. The count in `seen` is
    a version only: it does not tell a number of records.
    """
    _chosen("foreign", how, ("inner", "left"))
    kept, known = _payload("foreign", left), _payload("foreign", right)
    if on not in left.columns:
        raise Misconfigured("tables.foreign", f'the left table has no column "{on}"', f"it has {', '.join(kept)}")
    changes = left.select(
        F.col(KEY).alias("key"),
        F.col(f"`{on}`").cast("string").alias("names"),
        _text(left, kept).alias("row"),
        F.col(DELETED).alias("gone"),
        *_told(),
    )
    moves = changes.groupBy("key").transformWithState(Moves(), MOVED, "update", "none")
    rows = right.select(
        F.concat(F.lit("="), KEY).alias("place"),
        F.lit(None).cast("string").alias("key"),
        _text(right, known).alias("row"),
        F.col(DELETED).alias("gone"),
        F.lit(True).alias("told"),
        F.lit(1).cast("bigint").alias("changes"),
        *_told(),
    )
    related = moves.unionByName(rows).groupBy("place")
    result = related.transformWithState(Relation(how == "left"), RELATED, "update", "none")
    return result.select(
        "key", _read("left", left, kept).alias("left"), _read("right", right, known).alias("right"), "seen"
    )


def lookup(stream: DataFrame, table: DataFrame, *, on: str, how: Literal["inner", "left"] = "inner") -> DataFrame:
    """Each record of a stream with the row that a table has when it comes: its own columns, and `found`.

    `on` is the column of the stream that names the key of the row. What a table learns later changes nothing. Of what
    comes in one batch, the table's records are taken first.
    """
    _chosen("lookup", how, ("inner", "left"))
    known = _payload("lookup", table)
    if absent := [name for name in (on, "origin") if name not in stream.columns]:
        raise Misconfigured("tables.lookup", f'the stream has no column "{absent[0]}"', "keep it in the frame")
    if FOUND in stream.columns:
        raise Misconfigured("tables.lookup", f'the stream has a column "{FOUND}" of its own', "rename it before")
    place = F.col(f"`{on}`").cast("string")
    records = stream.select(
        F.when(place.isNotNull(), F.concat(F.lit("="), place)).otherwise("-").alias("place"),
        F.lit(False).alias("known"),
        _text(stream, stream.columns).alias("row"),
        F.lit(False).alias("gone"),
        *_place(),
    )
    rows = table.select(
        F.concat(F.lit("="), KEY).alias("place"),
        F.lit(True).alias("known"),
        _text(table, known).alias("row"),
        F.col(DELETED).alias("gone"),
        *_place(),
    )
    looked = rows.unionByName(records).groupBy("place")
    result = looked.transformWithState(Lookup(how == "left"), LOOKED_UP, "update", "none")
    own = F.from_json("row", _shape(stream, stream.columns), EXACT)
    read = result.select(own.alias("own"), _read(FOUND, table, known).alias(FOUND))
    return read.select("own.*", FOUND).alias(AS_IT_CAME)


def where(result: DataFrame, condition: str | Column) -> DataFrame:
    """The rows of a result for which a condition holds; the others are deleted from it.

    A plain `where()` would leave a row as it was when it last fulfilled the condition.
    """
    if "seen" not in result.columns or "deleted" not in _fields(result, "seen"):
        raise Misconfigured("tables.where", "this is not the result of latest, join or foreign", "begin with one")
    holds = F.expr(condition) if isinstance(condition, str) else condition
    gone = F.col("seen.deleted") | ~F.coalesce(holds, F.lit(False))
    return result.withColumn("seen", F.col("seen").withField("deleted", gone))


def _folded(tables: Sequence[tuple[str, DataFrame]]) -> DataFrame:
    """Per key: of each table the last row that had a value, its offset, that of the last deletion; and what is seen."""
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
    places = [
        F.expr(f"max({_ORIGIN}.offset) {of(index, deleted)}").alias(f"_{'gone' if deleted else 'there'}{index}")
        for index in range(len(tables))
        for deleted in (False, True)
    ]
    mark = MARK.replace("origin.", f"{_ORIGIN}.")
    counted = f"struct(count(1) AS count, max({_ORIGIN}.time) AS newest, max({_ORIGIN}.appended) AS appended"
    union = reduce(DataFrame.unionByName, tagged)
    folded = union.groupBy("key").agg(*last, *places, F.expr(f"{counted}, bit_xor({mark}) AS mark)").alias("seen"))
    known = F.struct(*(F.col(f"_row{index}").alias(name) for index, (name, _) in enumerate(tables)))
    return folded.withColumn("_known", known)


def _row(name: str, frame: DataFrame, own: bool) -> Column:
    """A table's struct: of its own records the payload, of those of other tables null."""
    payload = _payload(name, frame)
    if own:
        return F.struct(*(F.col(f"`{column}`") for column in payload)).alias(name)
    return F.lit(None).cast(_shape(frame, payload)).alias(name)


def _there(index: int) -> Column:
    there, gone = F.col(f"_there{index}"), F.col(f"_gone{index}")
    return there.isNotNull() & (gone.isNull() | (there > gone))


def _seen(deleted: Column) -> Column:
    return F.col("seen").withField("deleted", deleted).alias("seen")


def _payload(place: str, table: DataFrame) -> list[str]:
    """The columns of a table's payload. Of a result, what it says of itself is left out: that is said anew."""
    columns = table.columns
    if not {KEY, DELETED, "origin"} <= set(columns):
        problem = f"one of its frames has no {KEY}, {DELETED} and origin"
        way_out = "declare the channel with table=True, and keep these columns"
        raise Misconfigured(f"tables, {place}", problem, way_out)
    said = _OWN if "seen" in columns and _fields(table, "seen") == ["count", "newest"] else ()
    return [name for name in columns if name not in (*ADDED, KEY, DELETED, *said)]


def _fields(frame: DataFrame, column: str) -> list[str]:
    return list(getattr(frame.schema[column].dataType, "names", ()))


def _shape(frame: DataFrame, columns: Sequence[str]) -> StructType:
    """The columns as a type, all of which may be null."""
    shape = StructType()
    for name in columns:
        shape = shape.add(name, frame.schema[name].dataType)
    return shape


def _text(frame: DataFrame, columns: Sequence[str]) -> Column:
    """A row on its way through Python, which need not know what is in it."""
    return F.to_json(F.struct(*(F.col(f"`{name}`") for name in columns)), EXACT)


def _read(column: str, frame: DataFrame, columns: Sequence[str]) -> Column:
    return F.from_json(column, _shape(frame, columns), EXACT)


def _place() -> list[Column]:
    return [F.col("origin.partition").alias("partition"), F.col("origin.offset").alias("offset")]


def _told() -> list[Column]:
    return [
        F.col("origin.offset").alias("offset"),
        F.col("origin.time").alias("newest"),
        F.col("origin.appended").alias("appended"),
        F.expr(MARK).alias("mark"),
    ]


def _chosen(place: str, how: str, choices: Sequence[str]) -> None:
    if how not in choices:
        raise Misconfigured(f"tables.{place}", f'how is "{how}"', f"the choices are {', '.join(choices)}")

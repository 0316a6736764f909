"""Tables: joins by key and by a foreign key, lookups, and what is remembered of rows that name each other."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle
from tests.analysis.operators.table_oracles import Change, flat, generate, looked_up, related

from penstock import tables
from penstock.analysis.connectors import KafkaConnector
from penstock.analysis.engine import Engine
from penstock.analysis.frames import RAW, encoded, typed
from penstock.analysis.operators.tables import CHANGES, Moves, Relation
from penstock.analysis.query import Query, Shape
from penstock.analysis.settings import SparkSettings
from penstock.core.errors import Misconfigured
from penstock.core.record import Origin


class Value:
    """A value as Spark keeps it for one key."""

    def __init__(self) -> None:
        self.held: tuple[Any, ...] | None = None

    def get(self) -> tuple[Any, ...] | None:
        return self.held

    def update(self, held: tuple[Any, ...]) -> None:
        self.held = held


class Values:
    """A map as Spark keeps it for one key."""

    def __init__(self) -> None:
        self.held: dict[tuple[str], tuple[Any, ...]] = {}

    def getValue(self, key: tuple[str]) -> tuple[Any, ...] | None:
        return self.held.get(key)

    def updateValue(self, key: tuple[str], value: tuple[Any, ...]) -> None:
        self.held[key] = value

    def iterator(self) -> Iterator[tuple[tuple[str], tuple[Any, ...]]]:
        return iter(self.held.items())


class Handle:
    """The state of one key."""

    def __init__(self) -> None:
        self.value, self.values = Value(), Values()

    def getValueState(self, name: str, schema: str) -> Value:
        return self.value

    def getMapState(self, name: str, key: str, value: str) -> Values:
        return self.values


def row(offset: int, **fields: Any) -> Row:
    told = {"row": "{}", "gone": False, "offset": offset, "newest": None, "appended": None, "mark": 0}
    return Row(**{**told, **fields})


def test_a_record_that_is_older_than_the_last_one_moves_nothing() -> None:
    handle, moves = Handle(), Moves()
    moves.init(cast(StatefulProcessorHandle, handle))
    [moved] = moves.handleInputRows(("k",), iter([row(9, names="b"), row(7, names="a")]), None)
    assert (moved.place, moved.changes) == ("=b", 2)
    assert list(moves.handleInputRows(("k",), iter([row(8, names="c")]), None)) == []
    assert handle.value.held == ("=b", 3, 9)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_row_whose_versions_are_used_up_is_told(side: str) -> None:
    handle, relation = Handle(), Relation(without=False)
    relation.init(cast(StatefulProcessorHandle, handle))
    left = row(1, key="k", told=True, changes=CHANGES - 2 if side == "left" else 1)
    right = row(1, key=None)
    handle.value.held = ("{}", False, CHANGES - 2 if side == "right" else 0, 0, None, None, 0)
    [related] = relation.handleInputRows(("=b",), iter([left, right]), None)
    assert related.seen["count"] == ((CHANGES - 2) * CHANGES + 1 if side == "left" else CHANGES + CHANGES - 1)
    with pytest.raises(Misconfigured, match="the row k, or its right row, has changed 4194304 times"):
        list(relation.handleInputRows(("=b",), iter([row(2, key="k", told=True, changes=CHANGES), right]), None))


DDL = "n BIGINT NOT NULL, text STRING, to BIGINT"
NOW = datetime(2026, 1, 2, tzinfo=UTC)
NAMES = {"a": ("to", 12)}
ALL = ("a", "b", "c")


def shape(channel: str) -> Shape:
    return Shape(channel, DDL, table=True)


def value(row: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A row without what is null in it."""
    return None if row is None else {name: inner for name, inner in row.items() if inner is not None}


def of(frame: DataFrame) -> dict[str, dict[str, Any]]:
    """The rows of a result that are there, by key, as dicts."""
    rows = [row.asDict(True) for row in frame.collect()]
    return {row["key"]: row for row in rows if not row["seen"]["deleted"]}


def frames(spark: SparkSession, changes: Sequence[Change]) -> dict[str, DataFrame]:
    """A frame of each table, as a query sees its channel."""
    offsets: dict[tuple[str, int], int] = {}
    records: dict[str, list[tuple[Any, ...]]] = {name: [] for name in ALL}
    for seq, change in enumerate(changes):
        partition = crc32(change.key.encode()) % 2
        offset = offsets[change.table, partition] = offsets.get((change.table, partition), -1) + 1
        text = None if change.value is None else json.dumps(change.value).encode()
        headers = Origin("s", 1, seq, 1_700_000_000_000_000 + seq).headers()
        records[change.table].append(
            (change.key.encode(), text, change.table, partition, offset, NOW, 0, headers),
        )
    return {name: typed(spark.createDataFrame(some, RAW), shape(name)) for name, some in records.items()}


def test_a_whole_history_at_once_gives_what_plain_python_gives(spark: SparkSession) -> None:
    """What the streams do not do: rows without a match, records that find nothing, tables before the stream."""
    history = flat(generate(1, ALL, names=NAMES))
    by_name = frames(spark, history)
    a, b = by_name["a"], by_name["b"]
    pairs = of(tables.foreign_key_join(a, b, key="to", how="left"))
    assert {key: (value(row["left"]), value(row["right"])) for key, row in pairs.items()} == {
        key: (value(left), value(right)) for key, (left, right) in related(history, "a", "b", "to", "left").items()
    }
    stream = a.where("NOT _deleted").drop("_key", "_deleted")
    enriched = tables.lookup(stream, b, key="to")
    assert enriched.columns == [*stream.columns, "found"]
    assert told(enriched) == wanted(looked_up([history], "a", "b", "to", "inner"))


def told(enriched: DataFrame) -> list[str]:
    rows = [row.asDict(True) for row in enriched.collect()]
    return wanted([({name: row[name] for name in ("n", "text", "to")}, row["found"]) for row in rows])


def wanted(pairs: Sequence[tuple[dict[str, Any], dict[str, Any] | None]]) -> list[str]:
    """Pairs that can be compared: in some order."""
    return sorted(json.dumps([value(record), value(row)], sort_keys=True) for record, row in pairs)


def test_a_row_that_is_not_whole_any_more_keeps_its_columns_and_is_deleted(spark: SparkSession) -> None:
    history = [
        Change("a", "1", {"n": 1, "to": 7}),
        Change("b", "1", {"n": 2}),
        Change("b", "7", {"n": 3}),
        Change("a", "2", None),
        Change("b", "1", None),
        Change("b", "7", None),
    ]
    by_name = frames(spark, history)
    one, two = by_name["a"], by_name["b"]
    rows = {row["key"]: row for row in tables.join(one=one, two=two).collect()}
    assert {key: (row["seen"]["count"], row["seen"]["deleted"]) for key, row in rows.items()} == {
        "1": (3, True),
        "2": (1, True),
        "7": (2, True),
    }
    assert (rows["1"]["one"]["n"], rows["1"]["two"]["n"]) == (1, 2)
    assert rows["2"]["one"] is None
    [row] = tables.join(how="left", one=one, two=two).where("NOT seen.deleted").collect()
    assert (row["one"]["n"], row["two"]) == (1, None)
    rows = {row["key"]: row for row in tables.foreign_key_join(one, two, key="to").collect()}
    assert {key: row["seen"]["deleted"] for key, row in rows.items()} == {"1": True, "2": True}
    assert (rows["1"]["left"]["n"], rows["1"]["right"]["n"]) == (1, 3)
    query = Query("q", ("a", "b"), "q", ("key",), tables.join)
    records = encoded(tables.join(one=one, two=two), query).collect()
    assert [record["value"] for record in records] == [None, None, None]
    assert sorted(bytes(record["key"]) for record in records) == [b'["1"]', b'["2"]', b'["7"]']


def test_rows_that_a_condition_does_not_hold_for_are_deleted(spark: SparkSession) -> None:
    a = frames(spark, [Change("a", "1", {"n": 1}), Change("a", "2", {"n": 5}), Change("a", "3", None)])["a"]
    assert of(tables.where(tables.latest(a), "n > 3")).keys() == {"2"}
    assert tables.where(tables.latest(a), "to > 3").where("seen.deleted").count() == 3
    with pytest.raises(Misconfigured, match=r"tables\.where: "):
        tables.where(a, "n > 3")


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda a, b, s: tables.join(a=a), "it needs two tables or more"),
        (lambda a, b, s: tables.join(a=a, seen=b), "seen is a column that it adds"),
        (
            lambda a, b, s: tables.join(how=cast(Any, "right"), a=a, b=b),
            'how is "right"; the choices are inner, left, outer',
        ),
        (lambda a, b, s: tables.join(a=a, s=s), "has no _key, _deleted and origin; declare the channel with table"),
        (
            lambda a, b, s: tables.foreign_key_join(a, b, key="too"),
            'the left table has no column "too"; it has n, text, to',
        ),
        (
            lambda a, b, s: tables.foreign_key_join(a, b, key="to", how=cast(Any, "outer")),
            "the choices are inner, left",
        ),
        (lambda a, b, s: tables.lookup(s, b, key="too"), 'the stream has no column "too"'),
        (lambda a, b, s: tables.lookup(s.withColumnRenamed("n", "found"), b, key="to"), 'a column "found" of its own'),
        (lambda a, b, s: tables.latest(a.withColumnRenamed("n", "key")), "the table has a column key of its own"),
    ],
)
def test_what_is_no_table_or_no_choice_is_refused(
    build: Callable[..., DataFrame], why: str, spark: SparkSession
) -> None:
    by_name = frames(spark, [])
    with pytest.raises(Misconfigured, match=why):
        build(by_name["a"], by_name["b"], by_name["a"].drop("_key", "_deleted"))


def test_rows_come_through_python_as_they_are(spark: SparkSession) -> None:
    ddl = "at TIMESTAMP_NTZ, counts MAP<STRING, INT>"
    value = b'{"at": "2026-01-02T03:04:05.678901", "counts": {"x": null}}'
    record: tuple[Any, ...] = (b"1", value, "a", 0, 0, NOW, 0, [])
    a = typed(spark.createDataFrame([record], RAW), Shape("a", ddl, table=True))
    [row] = tables.lookup(a.drop("_key", "_deleted").withColumn("to", F.lit("1")), a, key="to").collect()
    expected = datetime(2026, 1, 2, 3, 4, 5, 678901), {"x": None}
    assert (row["at"], row["counts"]) == tuple(row["found"]) == expected


def test_the_result_is_a_table_again_whose_records_are_counted(spark: SparkSession, tmp_path: Path) -> None:
    known = {name: shape(name) for name in ALL}
    first = Query("first", ALL, "all", ("key",), lambda a, b, c: tables.join(a=a, b=b, c=c))
    second = Query("second", ("b", "all"), "more", ("key",), lambda b, all: tables.foreign_key_join(b, all, key="to"))
    third = Query("third", ("more", "all"), "most", ("key",), lambda more, all: tables.join(more=more, all=all))
    shapes = {**known, "all": Shape("all"), "more": Shape("more")}
    engine = Engine(spark, SparkSettings(), KafkaConnector("127.0.0.1:1"), str(tmp_path), shapes)
    engine = engine.knowing([third, second, first])
    assert (engine.shapes["all"].table, engine.shapes["more"].table) == (True, True)
    assert engine.result(third).table
    assert engine.result(third).ddl == (
        f"key STRING,more STRUCT<left: {STRUCT}, right: STRUCT<a: {STRUCT}, b: {STRUCT}, c: {STRUCT}>>,"
        f"all STRUCT<a: {STRUCT}, b: {STRUCT}, c: {STRUCT}>,"
        "seen STRUCT<count: BIGINT NOT NULL, newest: BIGINT> NOT NULL"
    )
    assert [engine.uncounted(one) for one in (first, second, third)] == [
        None,
        "it keeps state in Python",
        None,
    ]
    assert engine.objection(first) is None
    twice = Query("twice", ("a",), "all", ("key",), lambda a: tables.join(a=a, again=a))
    assert engine.uncounted(twice) == "it does not read each of its channels once"
    hiding = Query("hiding", ("a",), "all", ("key",), tables.latest, where="n > 3")
    with pytest.raises(Misconfigured, match="its where= would hide changes and deletions of rows of the table a"):
        engine.columns(hiding)


STRUCT = "STRUCT<n: BIGINT, text: STRING, to: BIGINT>"

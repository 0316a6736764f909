"""Queries as batches over the log, and rows of copies judged by them."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from penstock.analysis.connectors import KafkaConnector
from penstock.analysis.engine import Engine
from penstock.analysis.query import Emit, Query, Shape
from penstock.analysis.replay import (
    Comparison,
    Expected,
    Found,
    How,
    Row,
    Table,
    Verdict,
    comes_when_final,
    compare,
    equal,
    kept,
    key_of,
    named,
    put,
    recomputed,
)
from penstock.analysis.settings import SparkSettings
from penstock.channels.kafka import Kafka
from penstock.core.contracts import Topic
from penstock.core.errors import Unavailable
from penstock.core.record import GENERATIONS, Origin, Record


def row(n: object, version: int | None = None, mark: int | None = None) -> Row:
    return Row(orjson.dumps({"name": "a", "n": n}), version, mark)


def judged(held: Table, least: Table, most: Table | None = None, truncated: bool = False) -> Comparison:
    return compare(held, Expected(least, least if most is None else most, truncated))


def verdict(held: Row | None, least: Row | None, most: Row | None, truncated: bool = False) -> Verdict:
    tables = [{b"k": one} if one else {} for one in (held, least, most)]
    [(found, times)] = judged(tables[0], tables[1], tables[2], truncated).counts.items()
    assert times == 1
    return found


def test_a_row_that_is_equal_to_the_batch_is_exact() -> None:
    assert verdict(row(7, 3), row(7, 3), row(7, 3)) is Verdict.EXACT
    assert verdict(row(9, 4), row(7, 3), row(9, 4)) is Verdict.EXACT
    assert verdict(row(9, 1), None, row(9, 1)) is Verdict.EXACT


def test_a_row_between_the_two_batches_is_bounded() -> None:
    assert verdict(row(8, 4), row(7, 3), row(9, 5)) is Verdict.BOUNDED
    assert verdict(row(8, 4), None, row(9, 5)) is Verdict.BOUNDED


def test_a_row_outside_the_two_batches_differs() -> None:
    assert verdict(row(6, 2), row(7, 3), row(9, 5)) is Verdict.DIFFERENT
    assert verdict(row(10, 6), row(7, 3), row(9, 5)) is Verdict.DIFFERENT
    assert verdict(row(10, 1), None, None) is Verdict.DIFFERENT
    assert verdict(None, row(7, 3), row(7, 3)) is Verdict.DIFFERENT


def test_a_row_of_a_batchs_version_has_to_have_its_values() -> None:
    assert verdict(row(8, 3), row(7, 3), row(9, 5)) is Verdict.DIFFERENT
    assert verdict(row(8, 5), row(7, 3), row(9, 5)) is Verdict.DIFFERENT


def test_as_many_records_but_others_are_a_difference() -> None:
    [found] = judged({b"k": row(7, 3, 1)}, {b"k": row(7, 3, 2)}).differences
    assert (found.how, found.short, found.mark) == (How.OTHERS, 1, None)


def test_a_row_of_an_earlier_life_holds_nothing_of_what_is_due() -> None:
    [found] = judged({b"k": row(7, 300)}, {b"k": row(2, GENERATIONS + 2)}).differences
    assert (found.how, found.short) == (How.FEWER, 2)
    [found] = judged({b"k": row(7, GENERATIONS + 1)}, {b"k": row(9, GENERATIONS + 3)}).differences
    assert found.short == 2
    [found] = judged({}, {b"k": row(1, GENERATIONS + 1, mark=5)}).differences
    assert (found.short, found.mark) == (1, 5)


def test_without_versions_only_a_row_that_moves_is_bounded() -> None:
    assert verdict(row(8), row(7), row(9)) is Verdict.BOUNDED
    assert verdict(row(8), row(7), row(7)) is Verdict.DIFFERENT


def test_where_nothing_tells_the_last_row_any_of_them_will_do() -> None:
    table: dict[bytes, Row] = {}
    for n in (1, 2, 2):
        put(table, b"k", row(n))
    assert [verdict(row(n), table[b"k"], table[b"k"]) for n in (1, 2, 3)] == [
        Verdict.BOUNDED,
        Verdict.BOUNDED,
        Verdict.DIFFERENT,
    ]


def test_of_two_versions_the_higher_one_stays() -> None:
    table: dict[bytes, Row] = {}
    for version in (2, 3, 1):
        put(table, b"k", row(version, version))
    assert table[b"k"].version == 3


def test_a_row_may_hold_more_than_a_log_that_lost_its_beginning() -> None:
    assert verdict(row(9, 5), row(7, 3), row(7, 3), truncated=True) is Verdict.UNKNOWN
    assert verdict(row(9, 5), None, None, truncated=True) is Verdict.UNKNOWN
    assert verdict(row(7, 3), row(7, 3), row(7, 3), truncated=True) is Verdict.EXACT


def test_a_row_that_holds_less_than_what_is_left_of_the_log_differs() -> None:
    assert verdict(row(6, 2), row(7, 3), row(7, 3), truncated=True) is Verdict.DIFFERENT
    assert verdict(None, row(7, 3), row(7, 3), truncated=True) is Verdict.DIFFERENT


def test_a_difference_names_the_columns() -> None:
    [found] = judged({b"k": row(8, 3)}, {b"k": row(7, 3)}).differences
    assert found.how is How.VALUES
    assert found.columns == {"n": (8, 7)}


def test_a_difference_of_one_record_has_its_mark() -> None:
    all_of_them, without = 0x5EED ^ -77, 0x5EED
    [lacks] = judged({b"k": row(6, 2, without)}, {b"k": row(7, 3, all_of_them)}).differences
    [exceeds] = judged({b"k": row(8, 4, without)}, {b"k": row(7, 3, all_of_them)}).differences
    [missing] = judged({}, {b"k": row(7, 1, -77)}).differences
    assert [(one.how, one.mark) for one in (lacks, exceeds, missing)] == [
        (How.FEWER, -77),
        (How.EXCEEDS, -77),
        (How.MISSING, -77),
    ]
    assert [one.short for one in (lacks, exceeds, missing)] == [1, 0, 1]


def test_a_difference_of_two_records_has_no_mark() -> None:
    [found] = judged({b"k": row(5, 1, 3)}, {b"k": row(7, 3, 4)}).differences
    assert (found.mark, found.short) == (None, 2)


def test_an_excuse_is_heard_only_where_rows_differ() -> None:
    found = compare(
        {b"a": row(7, 3)},
        Expected({b"a": row(7, 3), b"b": row(7, 3)}, {}),
        lambda key, held, due: Verdict.PERISHED,
    )
    assert found.counts == {Verdict.EXACT: 1, Verdict.PERISHED: 1}
    assert not found.differences


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (0.1 + 0.2, 0.3, True),
        (0.3, 0.30001, False),
        (3, 3.0, False),
        (1, True, False),
        (10**15, 10**15 + 1, False),
        ({"a": [0.1 + 0.2, None]}, {"a": [0.3, None]}, True),
        ({"a": 1}, {"a": 1, "b": None}, False),
        ([1], [1, 2], False),
    ],
)
def test_fractions_are_compared_nearly_and_all_else_exactly(one: object, other: object, same: bool) -> None:
    assert equal(one, other) is same


def test_what_is_not_json_is_compared_as_text() -> None:
    assert verdict(Row(b"\xff"), Row(b"\xff"), Row(b"\xff")) is Verdict.EXACT
    [found] = judged({b"k": Row(b"x")}, {b"k": Row(b"{}")}).differences
    assert found.columns == {"value": ("x", None)}


def test_one_key_has_one_spelling() -> None:
    assert key_of(b'[ "a", 1.0 ]') == key_of(b'["a",1.0]')
    assert key_of(b"\xff") == b"\xff"


def test_headers_that_are_no_numbers_tell_nothing() -> None:
    assert Row.of(b"{}", [("version", b"x"), ("mark", None), ("time", b"5")]) == Row(b"{}", time=5)


Made = tuple[Engine, Query]


@pytest.fixture
def made(spark: SparkSession, kafka: Kafka, fresh: Callable[[str], str], tmp_path: Path) -> Made:
    """An engine, and a query over a log of four records, of which one is there twice and one does not fit."""
    things = fresh("things").replace("-", "_")
    kafka.ensure([Topic(things)])
    values = [(1, b'{"name":"a"}'), (2, b'{"name":"b"}'), (2, b'{"name":"b"}'), (3, b"{")]

    async def go() -> None:
        async with kafka.sender() as sender:
            await sender.send(things, [Record(value, Origin("kiosk 7", 1, seq, seq)) for seq, value in values])

    asyncio.run(go())
    engine = Engine(
        spark, SparkSettings(), KafkaConnector(kafka.servers), str(tmp_path), {things: Shape(things, "name STRING")}
    )
    text = f"SELECT name, seen() FROM {things} GROUP BY name"
    return engine, Query("counts", (things,), "counts", ("name",), text)


def test_a_batch_gives_rows_as_live_ones_are_written(made: Made) -> None:
    engine, query = made
    table = recomputed(engine, query, {query.inputs[0]: {0: 2}})
    assert {key: row.version for key, row in table.items()} == {b'["a"]': 1, b'["b"]': 1}
    assert table[b'["b"]'].value == b'{"name":"b","seen":{"count":1,"newest":2}}'
    assert table[b'["a"]'].mark != table[b'["b"]'].mark
    assert kept(engine, query.inputs[0], {0: 2}) == 2
    assert kept(engine, query.inputs[0], {0: 2}, {0: 1}) == 1
    assert recomputed(engine, query, {query.inputs[0]: {0: 2}}, {query.inputs[0]: {0: 1}}).keys() == {b'["b"]'}


def test_a_mark_is_traced_to_its_record(made: Made, spark: SparkSession) -> None:
    engine, query = made
    hashed = F.xxhash64(F.lit("kiosk 7"), F.lit(1).cast("bigint"), F.lit(2).cast("bigint"))
    [[mark]] = spark.range(1).select(hashed).collect()
    assert named(engine, query, [mark, 5], {query.inputs[0]: {0: 4}}) == {mark: Found("kiosk 7", 1, 2, copies=2)}
    assert named(engine, query, [], {}) == {}


def test_rows_that_may_be_updated_do_not_wait_until_they_are_final(made: Made) -> None:
    engine, query = made
    assert not comes_when_final(engine, query)
    assert comes_when_final(engine, replace(query, emit=Emit.FINAL))


def test_a_batch_that_fails_says_why(made: Made) -> None:
    engine, query = made
    with pytest.raises(Unavailable, match="the batch over the log is unavailable"):
        recomputed(engine, query, {query.inputs[0]: {0: 2, 1: 2}})

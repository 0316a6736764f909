"""A query as a batch over a real log."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from penstock.analysis.engine import Engine
from penstock.analysis.kafka import KafkaWire
from penstock.analysis.query import Emit, Query, Shape
from penstock.analysis.replay import Found, comes_when_final, kept, named, recomputed
from penstock.analysis.settings import SparkSettings
from penstock.channels.kafka import Kafka
from penstock.core.contracts import Topic
from penstock.core.errors import Unavailable
from penstock.core.record import Origin, Record

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
        spark, SparkSettings(), KafkaWire(kafka.servers), str(tmp_path), {things: Shape(things, "name STRING")}
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

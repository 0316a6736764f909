"""Queries that run: a real broker, a real Spark."""

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from tests.running import exposed

from penstock.analysis.connectors import KafkaConnector
from penstock.analysis.engine import Engine, in_order
from penstock.analysis.frames import seen
from penstock.analysis.launch import failed, launch, validate
from penstock.analysis.query import Emit, Mode, Query, Shape
from penstock.analysis.settings import SparkSettings
from penstock.analysis.supervision import Progress
from penstock.channels.kafka import Kafka
from penstock.core.contracts import Topic
from penstock.core.errors import Misconfigured
from penstock.core.record import Origin, Record

Fresh = Callable[[str], str]
Eventually = Callable[..., None]


def totals(things: DataFrame) -> DataFrame:
    return things.groupBy("name").agg(F.sum("n").alias("total"), seen())


def send(kafka: Kafka, channel: str, first: int, last: int) -> None:
    """Numbers first–last, under three names; every hundredth does not fit."""

    def value(n: int) -> bytes:
        return json.dumps({"name": f"n{n % 3}", "n": n if n % 100 else "none"}).encode()

    records = [Record(value(n), Origin("s", 1, n, n), b"%d" % n) for n in range(first, last + 1)]

    async def go() -> None:
        async with kafka.sender() as sender:
            await sender.send(channel, records)

    asyncio.run(go())


def expected(last: int) -> dict[str, int]:
    numbers = [n for n in range(1, last + 1) if n % 100]
    return {f"n{rest}": sum(n for n in numbers if n % 3 == rest) for rest in range(3)}


def newest(kafka: Kafka, channel: str) -> dict[str, int]:
    """The table that a client would have: the newest version of each row."""
    ends = {partition: end for partition, (_, end) in kafka.bounds(channel).items()}
    table: dict[str, tuple[int, int]] = {}
    with kafka.reader({channel: {}}) as reader:
        while any(reader.positions(channel)[partition] < end for partition, end in ends.items()):
            for entry in reader.read(1_000, 1):
                row = json.loads(entry.value or b"")
                version = int(dict(entry.headers)["version"])
                if version > table.get(row["name"], (0, 0))[0]:
                    table[row["name"]] = (version, row["total"])
    return {name: total for name, (_, total) in table.items()}


@pytest.mark.parametrize("mode", [Mode.REAL_TIME, Mode.MICRO_BATCH])
def test_a_query_goes_on_where_its_checkpoint_stands(
    mode: Mode, spark: SparkSession, kafka: Kafka, fresh: Fresh, eventually: Eventually, tmp_path: Path
) -> None:
    things, into = fresh("things"), fresh("totals")
    kafka.ensure([Topic(things, 2), Topic(into, compacted=True), Topic(f"{things}.dead")])
    shape = Shape(things, "name STRING NOT NULL, n BIGINT")
    settings = SparkSettings(real_time_batch="5 seconds", every="200 ms")
    engine = Engine(spark, settings, KafkaConnector(kafka.servers), str(tmp_path), {things: shape})
    query = Query("totals", (things,), into, ("name",), totals, mode)
    ids = {things: kafka.topic_id(things)}

    send(kafka, things, 1, 500)
    for last in (500, 1_000):
        running, verdict = launch(engine, query, 1, ids)
        sifting = validate(engine, shape, f"{things}.dead", ids)
        assert verdict.mode is mode
        send(kafka, things, last + 1, last + 500)
        eventually(lambda last=last: newest(kafka, into) == expected(last + 500))
        eventually(lambda last=last: kafka.bounds(f"{things}.dead")[0][1] >= (last + 500) // 100)
        assert failed([running, sifting]) is None
        assert Progress().look(running)["state"] in {"starting", "running"}
        # In real time, each task that writes a shuffle listens.
        assert exposed(os.getpid()) == []
        for one in (running, sifting):
            one.stop()

    recomputed = {row["name"]: row["total"] for row in engine.recompute(query).collect()}
    assert recomputed == expected(1_500) == newest(kafka, into)


def test_a_query_that_spark_refuses_in_real_time_runs_in_batches(
    spark: SparkSession, kafka: Kafka, fresh: Fresh, eventually: Eventually, tmp_path: Path
) -> None:
    # A function of the library: workers cannot import the module of a test.
    shout = F.udf(str.upper, "string")
    things, into = fresh("things"), fresh("loud")
    kafka.ensure([Topic(things), Topic(into)])
    settings = SparkSettings(every="200 ms")
    shapes = {things: Shape(things, "name STRING NOT NULL, n BIGINT")}
    engine = Engine(spark, settings, KafkaConnector(kafka.servers), str(tmp_path), shapes)
    query = Query(
        "loud", (things,), into, ("n",), lambda frame: frame.select("n", shout("name").alias("name"), "origin")
    )
    send(kafka, things, 1, 10)
    running, verdict = launch(engine, query, 1, {})
    assert verdict.mode is Mode.MICRO_BATCH
    assert "Python" in verdict.why
    eventually(lambda: kafka.bounds(into)[0][1] == 10)
    running.stop()
    forced = Query("forced", (things,), into, ("n",), query.build, Mode.REAL_TIME)
    with pytest.raises(Misconfigured, match="query forced: it cannot run in real time"):
        launch(engine, forced, 1, {})
    # Spark would take these two, and not do what they say.
    for unlike in (
        replace(forced, build=f"SELECT n, origin FROM `{things}`", emit=Emit.FINAL),
        replace(forced, build=f"SELECT n FROM `{things}`", once=True),
    ):
        with pytest.raises(Misconfigured, match=r"query forced: it cannot run in real time: (its rows|a batch)"):
            launch(engine, unlike, 1, {})


def test_a_checkpoint_of_another_topic_is_refused(
    spark: SparkSession, kafka: Kafka, fresh: Fresh, tmp_path: Path
) -> None:
    things, into = fresh("things"), fresh("totals")
    kafka.ensure([Topic(things), Topic(into)])
    shapes = {things: Shape(things, "name STRING, n BIGINT")}
    engine = Engine(spark, SparkSettings(), KafkaConnector(kafka.servers), str(tmp_path), shapes)
    query = Query("totals", (things,), into, ("name",), totals, Mode.MICRO_BATCH)
    launch(engine, query, 0, {things: "one"})[0].stop()
    with pytest.raises(Misconfigured, match=f"the topic {things} was recreated .*; begin anew: .*"):
        launch(engine, query, 0, {things: "another"})


def test_a_query_can_read_the_result_of_another(spark: SparkSession, tmp_path: Path) -> None:
    shapes = {"things": Shape("things", "name STRING, n BIGINT"), "totals": Shape("totals")}
    first = Query("first", ("things",), "totals", ("name",), totals)
    second = Query("second", ("totals",), "large", ("name",), "SELECT name, total, seen FROM totals WHERE total > 10")
    engine = Engine(spark, SparkSettings(), KafkaConnector("127.0.0.1:1"), str(tmp_path), shapes).knowing(
        [second, first]
    )
    assert engine.columns(second) == ["name", "total", "seen"]


def test_queries_come_after_those_whose_results_they_read() -> None:
    queries = [
        Query("c", ("b",), "c", ("k",), ""),
        Query("a", ("x",), "a", ("k",), ""),
        Query("b", ("a",), "b", ("k",), ""),
    ]
    assert [query.name for query in in_order(queries)] == ["a", "b", "c"]

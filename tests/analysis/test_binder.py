"""Channels of any binder as a source and a sink of Spark."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from tests.channels.traffic import send

from penstock.analysis.binder import BinderWire
from penstock.analysis.checkpoints.batches import covered
from penstock.analysis.engine import Engine
from penstock.analysis.frames import seen
from penstock.analysis.launching import failed, launch, sift
from penstock.analysis.query import Mode, Query, Shape
from penstock.analysis.settings import SparkSettings
from penstock.channels.binders import bind
from penstock.contracts import Channels, Entry, Topic
from penstock.record import Origin, Record

Eventually = Callable[..., None]

SETTINGS = SparkSettings(every="200 ms")


@pytest.fixture
def channels(tmp_path: Path) -> Channels:
    return bind(f"file://{tmp_path / 'channels'}")


def things(first: int, last: int) -> list[Record]:
    return [
        Record(
            json.dumps({"name": f"n{n % 5}", "n": n}).encode(), Origin("s", 1, n, 1_700_000_000_000_000 + n), b"%d" % n
        )
        for n in range(first, last + 1)
    ]


def test_raw_records_are_those_of_the_channel(channels: Channels, spark: SparkSession) -> None:
    channels.ensure([Topic("raw", 2)])
    odd = Record(None, None, None), Record(b"", Origin("é", 2, 3, 4), b"", extra=(("x", b"\xff"), ("x", b"")))
    send(channels, "raw", [*things(1, 100), *odd])
    rows = BinderWire(channels).batch(spark, "raw").collect()
    with channels.reader({"raw": {}}) as reader:
        entries: list[Entry] = []
        while len(entries) < 102:
            entries += reader.read(1_000, 1)
    told = {(row["partition"], row["offset"]): row for row in rows}
    assert len(rows) == 102
    for entry in entries:
        row = told[entry.partition, entry.offset]
        assert (row["topic"], row["key"], row["value"]) == (entry.channel, entry.key, entry.value)
        assert [(header["key"], bytes(header["value"])) for header in row["headers"] or ()] == list(entry.headers)
        assert round(row["timestamp"].timestamp() * 1e6) == entry.appended


def test_a_batch_has_the_bounds_that_were_asked_for(channels: Channels, spark: SparkSession) -> None:
    channels.ensure([Topic("bounded")])
    send(channels, "bounded", things(1, 50))
    rows = BinderWire(channels).batch(spark, "bounded", {0: 10}, {0: 20}).collect()
    assert sorted(row["offset"] for row in rows) == list(range(10, 20))


def totals(things: DataFrame) -> DataFrame:
    return things.groupBy("name").agg(F.sum("n").alias("total"), seen())


def newest(channels: Channels, channel: str) -> dict[str, int]:
    table: dict[str, tuple[int, int]] = {}
    ends = {partition: end for partition, (_, end) in channels.bounds(channel).items()}
    with channels.reader({channel: {}}) as reader:
        while any(reader.positions(channel)[partition] < end for partition, end in ends.items()):
            for entry in reader.read(1_000, 1):
                row, version = json.loads(entry.value or b""), int(dict(entry.headers)["version"])
                if version > table.get(row["name"], (0, 0))[0]:
                    table[row["name"]] = (version, row["total"])
    return {name: total for name, (_, total) in table.items()}


def ends(channels: Channels) -> dict[int, int]:
    return {partition: end for partition, (_, end) in channels.bounds("things").items()}


def expected(last: int) -> dict[str, int]:
    return {f"n{rest}": sum(n for n in range(1, last + 1) if n % 5 == rest) for rest in range(5)}


def test_a_query_runs_over_history_goes_on_live_and_from_its_checkpoint(
    channels: Channels, spark: SparkSession, eventually: Eventually, tmp_path: Path
) -> None:
    channels.ensure([Topic("things", 2), Topic("totals", compacted=True), Topic("things.dead")])
    shape = Shape("things", "name STRING NOT NULL, n BIGINT")
    engine = Engine(spark, SETTINGS, BinderWire(channels), str(tmp_path / "checkpoints"), {"things": shape})
    query = Query("totals", ("things",), "totals", ("name",), totals)
    ids = {"things": channels.topic_id("things")}
    send(channels, "things", things(1, 500))
    for last in (500, 1_000):
        running, verdict = launch(engine, query, 1, ids)
        sifting = sift(engine, shape, "things.dead", ids)
        assert verdict.mode is Mode.MICRO_BATCH
        assert "reads only Kafka in real time" in verdict.why
        send(channels, "things", [*things(last + 1, last + 500), Record(b"no JSON", Origin("t", 1, last, 0), b"x")])
        eventually(lambda last=last: newest(channels, "totals") == expected(last + 500))
        eventually(lambda last=last: channels.bounds("things.dead")[0][1] >= last // 500)
        eventually(lambda: covered(engine.checkpoint("totals")) == {"things": ends(channels)})
        assert failed([running, sifting]) is None
        for one in (running, sifting):
            one.stop()
    recomputed = {row["name"]: row["total"] for row in engine.recompute(query).collect()}
    assert recomputed == expected(1_500)

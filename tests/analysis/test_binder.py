"""Channels of any binder as a source and a sink of Spark."""

import json
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.datasource import ReadAllAvailable
from tests.channels.traffic import send

from penstock.analysis.binder import BinderConnector, ChannelStream, up_to
from penstock.analysis.checkpoints.batches import batches, covered
from penstock.analysis.engine import Engine
from penstock.analysis.frames import seen
from penstock.analysis.launch import failed, launch, validate
from penstock.analysis.query import Mode, Query, Shape
from penstock.analysis.settings import SparkSettings
from penstock.analysis.supervision import Supervised
from penstock.channels.binders import bind
from penstock.core.contracts import Channels, Entry, Topic
from penstock.core.record import Origin, Record

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
    rows = BinderConnector(channels).batch(spark, "raw").collect()
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
    rows = BinderConnector(channels).batch(spark, "bounded", {0: 10}, {0: 20}).collect()
    assert sorted(row["offset"] for row in rows) == list(range(10, 20))


def test_a_limited_stream_takes_from_each_partition_by_what_it_has(channels: Channels) -> None:
    channels.ensure([Topic("limited", 3)])
    stream = ChannelStream(channels, "limited", False, most=10)
    start, limit = stream.initialOffset(), stream.getDefaultReadLimit()
    assert stream.latestOffset(start, limit) == start
    send(channels, "limited", things(1, 100))
    whole = stream.reportLatestOffset()
    assert stream.latestOffset(start, ReadAllAvailable()) == whole
    steps = [start]
    while steps[-1] != whole:
        assert len(steps) <= 100, "it does not get on"
        steps.append(stream.latestOffset(steps[-1], limit))
    took = [sum(b["limited"].values()) - sum(a["limited"].values()) for a, b in pairwise(steps)]
    assert sum(took) == 100
    assert max(took) <= 10
    assert up_to({0: 0, 1: 5, 2: 0}, {0: 1_000, 1: 5, 2: 1}, 10) == {0: 9, 1: 5, 2: 1}


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


def _refused(channels: Channels, sifting: Supervised, number: int) -> bool:
    sifting.look()
    return channels.bounds("things.dead")[0][1] >= number


def test_a_query_runs_over_history_goes_on_live_and_from_its_checkpoint(
    channels: Channels, spark: SparkSession, eventually: Eventually, tmp_path: Path
) -> None:
    channels.ensure([Topic("things", 2), Topic("totals", compacted=True), Topic("things.dead")])
    shape = Shape("things", "name STRING NOT NULL, n BIGINT")
    connector = BinderConnector(channels).limited(300)
    engine = Engine(spark, SETTINGS, connector, str(tmp_path / "checkpoints"), {"things": shape})
    query = Query("totals", ("things",), "totals", ("name",), totals)
    ids = {"things": channels.topic_id("things")}
    send(channels, "things", things(1, 500))
    for last in (500, 1_000):
        running, verdict = launch(engine, query, 1, ids)
        # Supervised, as it always is: on a busy machine, the Python worker of a stream may not start in time.
        start = partial(validate, engine, shape, "things.dead", ids)
        sifting = Supervised("things.dead", start, engine.checkpoint("things.dead"))
        sifting.again()
        assert verdict.mode is Mode.MICRO_BATCH
        assert "reads only Kafka in real time" in verdict.why
        send(channels, "things", [*things(last + 1, last + 500), Record(b"no JSON", Origin("t", 1, last, 0), b"x")])
        eventually(lambda last=last: newest(channels, "totals") == expected(last + 500))
        eventually(partial(_refused, channels, sifting, last // 500))
        eventually(lambda: covered(engine.checkpoint("totals")) == {"things": ends(channels)})
        assert failed([running]) is None
        for one in (running, sifting):
            one.stop()
    reached = [sum(batch.ends["things"].values()) for batch in batches(engine.checkpoint("totals"))]
    assert max(after - before for before, after in pairwise([0, *reached])) <= 300
    recomputed = {row["name"]: row["total"] for row in engine.recompute(query).collect()}
    assert recomputed == expected(1_500)

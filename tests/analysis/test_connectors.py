"""Spark's own way to Kafka; and channels of any binder as a source and a sink of Spark."""

import asyncio
import json
import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.datasource import ReadAllAvailable
from tests.channels.servers import KafkaServer
from tests.channels.traffic import numbered, send
from tests.damaging import change

from penstock.analysis.checkpoints.batches import batches as committed
from penstock.analysis.checkpoints.batches import covered
from penstock.analysis.connectors import BinderConnector, ChannelStream, KafkaConnector, up_to
from penstock.analysis.engine import Engine
from penstock.analysis.frames import seen
from penstock.analysis.launch import failed, launch, validate
from penstock.analysis.query import Mode, Query, Shape
from penstock.analysis.settings import SparkSettings
from penstock.analysis.supervision import Supervised, is_transient, telling
from penstock.channels.binders import bind
from penstock.channels.kafka import Kafka
from penstock.core.contracts import Channels, Entry, Topic
from penstock.core.record import Origin, Record
from penstock.supervise.kafka import batches


def kept(things: DataFrame) -> DataFrame:
    return things.select("value", "origin")


def test_a_query_ends_at_what_retention_took_or_goes_on_behind_it(
    spark: SparkSession, kafka: Kafka, fresh: Callable[[str], str], eventually: Callable[..., None], tmp_path: Path
) -> None:
    things, into = fresh("things"), fresh("kept")
    kafka.ensure([Topic(things), Topic(into)])
    query = Query("kept", (things,), into, ("value",), kept, Mode.MICRO_BATCH)
    settings = SparkSettings(every="200 ms")

    def engine(skip_lost: bool) -> Engine:
        return Engine(
            spark, settings, KafkaConnector(kafka.servers, {}, skip_lost), str(tmp_path), {things: Shape(things)}
        )

    def send(first: int, count: int) -> None:
        async def go() -> None:
            async with kafka.sender() as sender:
                await sender.send(
                    things, [Record(b"%d" % n, Origin("s", 1, n, n)) for n in range(first, first + count)]
                )

        asyncio.run(go())

    def reaches(end: int) -> bool:
        return covered(f"{tmp_path}/kept") == {things: {0: end}}

    send(0, 10)
    running, _ = launch(engine(False), query, 0, {})
    eventually(lambda: reaches(10))
    running.stop()
    send(10, 10)
    admin = AdminClient({"bootstrap.servers": kafka.servers})
    admin.delete_records([TopicPartition(things, 0, 15)])[TopicPartition(things, 0)].result(10)
    strict, _ = launch(engine(False), query, 0, {})
    eventually(lambda: failed([strict]))
    lenient, _ = launch(engine(True), query, 0, {})
    eventually(lambda: reaches(20))
    assert failed([lenient]) is None
    lenient.stop()
    with kafka.reader({into: {}}) as reader:
        seen: set[bytes | None] = set()
        while len(seen) < 15:
            seen |= {entry.value for entry in reader.read(100, 10)}
    numbers = sorted(int((value or b"").split(b'"value":"')[1].split(b'"')[0]) for value in seen)
    assert numbers == [*range(10), *range(15, 20)]


def test_a_record_may_be_as_large_as_its_topic_takes(
    spark: SparkSession, kafka: Kafka, fresh: Callable[[str], str], eventually: Callable[..., None], tmp_path: Path
) -> None:
    things, into = fresh("things"), fresh("kept")
    large = {"max.message.bytes": "5000000"}
    kafka.ensure([Topic(things, config=large), Topic(into, config=large)])
    # Twice in its row, as its key and as its value; by chance, so that it cannot be packed.
    value = random.Random(3).randbytes(1_000_000).hex().encode()

    async def send() -> None:
        async with kafka.sender() as sender:
            await sender.send(things, [Record(value, Origin("s", 1, 1, 1))])

    asyncio.run(send())
    query = Query("kept", (things,), into, ("value",), kept, Mode.MICRO_BATCH)
    connector, settings = KafkaConnector(kafka.servers), SparkSettings(every="200 ms")
    running, _ = launch(Engine(spark, settings, connector, str(tmp_path), {things: Shape(things)}), query, 0, {})
    eventually(lambda: failed([running]) or kafka.bounds(into)[0][1] > 0)
    assert failed([running]) is None
    running.stop()
    with kafka.reader({into: {}}) as reader:
        (entry,) = reader.read(1, 20)
    assert value in (entry.value or b"")


def test_a_damaged_batch_is_named_with_its_partition_and_the_fix(
    spark: SparkSession, kafka_server: KafkaServer, fresh: Callable[[str], str]
) -> None:
    kafka, things = Kafka(kafka_server.servers), fresh("things")
    kafka.ensure([Topic(things)])
    for record in numbered(5):
        send(kafka, things, [record])
    (file,) = kafka_server.folder.glob(f"*/data/{things}-0/*.log")
    (batch,) = [one for one in batches(file.read_bytes()) if one.first == 2]
    change(file, batch.stop - 1)
    read = spark.read.format("kafka").option("kafka.bootstrap.servers", kafka.servers).option("subscribe", things)
    with pytest.raises((PySparkException, Py4JJavaError)) as failure:
        read.load().collect()
    change(file, batch.stop - 1)
    told = telling(failure.value)
    assert f"{things}-0" in told
    assert "penstock repair" in told
    # It is no matter of a record: nothing is searched for, and it is tried again.
    assert is_transient(failure.value)


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
    reached = [sum(batch.ends["things"].values()) for batch in committed(engine.checkpoint("totals"))]
    assert max(after - before for before, after in pairwise([0, *reached])) <= 300
    recomputed = {row["name"]: row["total"] for row in engine.recompute(query).collect()}
    assert recomputed == expected(1_500)

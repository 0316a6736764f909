"""Spark's own way to Kafka."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from tests.channels.servers import KafkaServer
from tests.channels.traffic import numbered, send
from tests.damaging import change

from penstock.analysis.checkpoints.batches import covered
from penstock.analysis.connectors import KafkaConnector
from penstock.analysis.engine import Engine
from penstock.analysis.launch import failed, launch
from penstock.analysis.query import Mode, Query, Shape
from penstock.analysis.settings import SparkSettings
from penstock.analysis.supervision import is_transient, telling
from penstock.channels.kafka import Kafka
from penstock.core.contracts import Topic
from penstock.core.record import Origin, Record
from penstock.supervise.segments import batches


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

"""The warm-up: a small pipeline, once per machine, whose class archives make later starts three times as fast."""

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.analysis.query import Mode, Query, Shape
from penstock.analysis.settings import SparkSettings
from penstock.channels.kafka import Kafka
from penstock.core.contracts import Topic
from penstock.core.record import Origin, Record
from penstock.supervise.folder import LocalSettings, StateFolder
from penstock.supervise.java import ClassArchive, Jars, Java
from penstock.supervise.kafka import kafka_services
from penstock.supervise.supervisor import Supervisor

if TYPE_CHECKING:
    from penstock.analysis.engine import Engine

TIMEOUT = 120.0


def kafka_archive(java: Java, jars: Jars) -> ClassArchive:
    return ClassArchive.of("kafka", java, jars.kafka)


def spark_archive(java: Java, jars: Jars) -> ClassArchive:
    # Imported here, as below: commands that start no Spark do not load it.
    from penstock.analysis.session import classpath

    return ClassArchive.of("spark", java, classpath(jars.spark))


def is_warmed_up(java: Java, jars: Jars) -> bool:
    return kafka_archive(java, jars).attempted and spark_archive(java, jars).attempted


def warm_up(java: Java, jars: Jars) -> None:
    """Run a small pipeline on its own broker, and save the class archives of both JVMs."""
    from penstock.analysis.connectors import KafkaConnector
    from penstock.analysis.engine import Engine
    from penstock.analysis.session import session

    kafka, spark = kafka_archive(java, jars), spark_archive(java, jars)
    with tempfile.TemporaryDirectory(prefix="penstock-warm-") as path, StateFolder(Path(path)).locked() as folder:
        services, servers = kafka_services(java, jars, folder, LocalSettings(), kafka.create_flags())
        supervisor = Supervisor(services, folder)
        supervisor.start()
        try:
            settings = SparkSettings()
            log = sys.stderr.buffer
            with session(
                "warm", settings, java.path, jars.spark, 8, log, spark.create_flags(), timeout=TIMEOUT
            ) as running:
                engine = Engine(running, settings, KafkaConnector(servers), str(folder.sub("checkpoints")), _SHAPES)
                _run_queries(engine, Kafka(servers))
        finally:
            # The JVM writes the archive when it ends.
            supervisor.stop(within=TIMEOUT)
    kafka.save()
    spark.save()


_SHAPES = {"in": Shape("in", "k STRING NOT NULL, n BIGINT, t BIGINT", "timestamp_millis(t)")}
_SQL = "SELECT window(event_time, '10 seconds') AS window, k, sum(n) AS n, seen() FROM in GROUP BY 1, 2"
_QUERIES = [
    Query("live", ("in",), "live", ("window", "k"), _SQL, Mode.REAL_TIME),
    Query("slow", ("in",), "slow", ("window", "k"), _SQL, Mode.MICRO_BATCH),
]


def _run_queries(engine: "Engine", kafka: Kafka) -> None:
    from penstock.analysis.launch import launch, validate

    kafka.ensure([Topic(name) for name in ("in", "in.dead", "live", "slow")])
    now = time.time_ns() // 1_000
    values = [b'{"k": "a", "n": %d, "t": %d}' % (n, now // 1_000) for n in range(100)] + [b"not JSON"]
    records = [Record(value, Origin("warm", 1, seq, now), b"a") for seq, value in enumerate(values)]

    async def send() -> None:
        async with kafka.sender() as sender:
            await sender.send("in", records)

    for query in _QUERIES:
        launch(engine, query, 1, {})
    validate(engine, _SHAPES["in"], "in.dead", {})
    asyncio.run(send())
    for name in ("live", "slow", "in.dead"):
        until = time.monotonic() + TIMEOUT
        while kafka.bounds(name)[0][1] == 0 and time.monotonic() < until:
            time.sleep(0.1)

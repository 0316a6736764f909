"""The analysis tier: all queries of a pipeline in one Spark session."""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import IO

from penstock.analysis.audit_reader import SparkAuditReader
from penstock.analysis.checkpoints.note import Note
from penstock.analysis.checkpoints.rescale import recover
from penstock.analysis.connectors import BinderConnector, KafkaConnector, SparkConnector
from penstock.analysis.engine import Engine
from penstock.analysis.operators.statics import Watch, table
from penstock.analysis.query import Late, Query
from penstock.analysis.session import SparkSession, session, wait_for_slots
from penstock.analysis.settings import SparkSettings
from penstock.channels.kafka import Kafka
from penstock.core.clock import SystemClock
from penstock.core.contracts import Channels
from penstock.core.errors import Misconfigured, Unavailable
from penstock.pipeline.config import LOCAL, Config, topics
from penstock.pipeline.description import Description
from penstock.plan.plan import real_time_queries, slots_needed
from penstock.run.accounts import accounting, announce
from penstock.run.lakes import Lakes
from penstock.run.queries import Queries, Refreshing, result_writers
from penstock.run.state_server import SLOTS, SparkStateReader, serve_state
from penstock.run.status import Figures, report_status, run_in_background
from penstock.run.tier import Ready, Tier, ensure_channels
from penstock.run.warm import spark_archive
from penstock.supervise.java import ensure_jars, find_java

log = logging.getLogger(__name__)

_LOOK_EVERY = 0.5
_BOUNDARY = 0.05
_TIMEOUT = 120.0
_ALL_OF_THEM = 20.0
_AUDIT_SLOTS = 2


def run(description: Description, config: Config, stop: threading.Event, ready: Ready) -> None:
    """Run the queries until `stop`. A failed query is restarted alone; Unavailable when Spark has ended."""
    for query in description.queries:
        if recover(f"{config.checkpoints}/{query.name}"):
            log.warning("query %s: its rescaling was interrupted; the old state was restored", query.name)
    try:
        _run(description, config, stop, ready, None)
    except _Short as short:
        log.info("channels have more partitions than declared: Spark starts again, with %d slots", short.needed)
        _run(description, config, stop, ready, short.needed)


def _run(description: Description, config: Config, stop: threading.Event, ready: Ready, slots: int | None) -> None:
    _require_dead_channels(description)
    channels = config.bind()
    started = threading.Event()
    threading.Thread(target=_leave_at_once, args=(stop, started), daemon=True).start()
    with engine(description, config, sys.stderr.buffer, slots) as spark:
        # Spark and the broker start at the same time.
        log.info("Spark is up")
        there = wait_for_slots(spark.spark, slots_needed(description, config, {}).least)
        _arrived(channels)
        ensure_channels(channels, description, log.info)
        ids = {topic.name: channels.topic_id(topic.name) for topic in topics(description)}
        started.set()

        def announced(query: Query, note: Note) -> None:
            announce(channels, description.bookmarks, query.name, query.into, note.writer, note.generation)

        spark = replace(spark, announce=announced, writers=result_writers(channels, description, spark))
        partitions = {name: len(channels.bounds(name)) for name in description.channels}
        _require_slots(description, config, partitions, spark, there)
        # Fails before a query starts if the address is in use.
        with serve_state(SparkStateReader(spark, description), config.spark.answers) as address:
            queries = Queries(spark, description, channels, ids)
            lakes = Lakes(spark, description, config, channels, ids)
            watch = Watch(description.statics, spark.tables, partial(table, spark.spark), SystemClock())
            refreshing = Refreshing(watch, spark, description.queries, queries, SystemClock())
            with (
                report_status(channels, description.status, Tier.ANALYSE, lambda: _figures(queries, lakes, address)),
                # Started before the queries: an account is published as soon as it is complete.
                accounting(channels, description.bookmarks, lambda: [*queries.accounts(), *lakes.accounts()]),
            ):
                lakes.require()
                queries.start()
                lakes.start(queries)
                ready()
                _look_after(queries, refreshing, watch, stop)
                # Before the last accounts are published.
                queries.stop()


def _figures(queries: Queries, lakes: Lakes, address: str | None) -> Figures:
    figures = queries.figures()
    return {**figures, "nodes": {**figures["nodes"], **lakes.figures()}, "answers": address}


def _look_after(queries: Queries, refreshing: Refreshing, watch: Watch, stop: threading.Event) -> None:
    with (
        run_in_background("the reading of static tables", watch.run),
        run_in_background("the warm-up of planning", queries.warm_up),
    ):
        while not stop.wait(_BOUNDARY if refreshing.waits else _LOOK_EVERY):
            refreshing.look()
            if error := queries.failed():
                raise error


@contextmanager
def engine(
    description: Description, config: Config, log: IO[bytes] | None, slots: int | None = None
) -> Iterator[Engine]:
    """Start Spark for the queries of a pipeline; the output of its JVM goes to `log`, if given.

    In local mode it has `slots` slots, by default as many as the declared queries need.
    """
    needed = slots or slots_needed(description, config, {}).most
    # State requests have slots of their own.
    with spark_session(description.name, config.spark, needed + SLOTS, log) as spark:
        shapes = {name: channel.shape for name, channel in description.channels.items()}
        own = Engine(spark, config.spark, connector(config), config.checkpoints, shapes)
        tables = {static.name: table(spark, static) for static in description.statics}
        yield replace(own, tables=tables).knowing(description.queries)


def spark_session(
    name: str, settings: SparkSettings, slots: int, log: IO[bytes] | None, flags: Sequence[str] = ()
) -> AbstractContextManager[SparkSession]:
    """A Spark session with the Java, the jars and the class archive of this machine; `flags`: more flags of its JVM."""
    java = find_java()
    jars = ensure_jars(java)
    archive = spark_archive(java, jars).use_flags()
    return session(name, settings, java.path, jars.spark, slots, log, (*archive, *flags))


@contextmanager
def spark_reader(description: Description, config: Config, log: IO[bytes] | None) -> Iterator[SparkAuditReader]:
    """Start a small Spark session for the audit, on the master of the queries, that reads long ranges of channels."""
    channels = config.bind()
    if not isinstance(channels, Kafka):
        problem = f"Spark audits Kafka, and the channels are at {channels.where}"
        raise Misconfigured("[audit] engine", problem, "use auto")
    with spark_session(f"{description.name} audit", config.spark, _AUDIT_SLOTS, log) as spark:
        yield SparkAuditReader(spark, channels.servers, spark_options(config.kafka.conf))


def _require_dead_channels(description: Description) -> None:
    """Raise Misconfigured for dead letters of a result, which has none."""
    for query in description.queries:
        if query.late is Late.DEAD and any(description.channels[name].result_of for name in query.inputs):
            problem = "its late records need dead letters, and it reads a result, which has none"
            raise Misconfigured(f"query {query.name}", problem, "leave late= out, or read another channel")


class _Short(Exception):
    """The local Spark has too few slots, because channels have more partitions than declared."""

    def __init__(self, needed: int) -> None:
        super().__init__(needed)
        self.needed = needed


def _require_slots(
    description: Description, config: Config, partitions: Mapping[str, int], spark: Engine, there: int
) -> None:
    """Check the slots: without one, a task of a real-time query would wait forever."""
    if slots_needed(description, config, partitions).most <= there:
        return
    # The estimate may be too high: Spark decides which queries run in real time.
    needed = slots_needed(description, config, partitions, real_time_queries(description, spark))
    if needed.least > there and config.spark.master == LOCAL:
        raise _Short(needed.most)
    if remark := needed.check(there, config.spark.master):
        log.warning(remark)


def connector(config: Config) -> SparkConnector:
    """Spark's Kafka connector for Kafka, otherwise the binder's."""
    channels, skip_lost = config.bind(), config.channels.lost == "skip"
    if isinstance(channels, Kafka):
        return KafkaConnector(
            channels.servers, spark_options(config.kafka.conf), skip_lost, ahead=config.spark.reads_ahead
        )
    return BinderConnector(channels, skip_lost)


def spark_options(conf: Mapping[str, str]) -> dict[str, str]:
    """The settings with the same name in both Kafka clients; others are for librdkafka only."""
    return {name: value for name, value in conf.items() if name.startswith(("security.", "sasl.", "ssl."))}


def _leave_at_once(stop: threading.Event, started: threading.Event) -> None:
    """Exit at once on `stop` while Spark starts: this process waits for its JVM, and has nothing to clean up."""
    stop.wait()
    if not started.is_set():
        os._exit(0)


def _arrived(channels: Channels) -> None:
    """Wait until the middleware answers, and for a while for all brokers, which get replicas of new topics."""
    began = time.monotonic()
    while True:
        waited = time.monotonic() - began
        try:
            if _all_there(channels) or waited > _ALL_OF_THEM:
                return
        except Unavailable:
            if waited > _TIMEOUT:
                raise
        time.sleep(0.1)


def _all_there(channels: Channels) -> bool:
    if isinstance(channels, Kafka):
        return channels.brokers(timeout=2) >= len(channels.servers.split(","))
    channels.names()
    return True

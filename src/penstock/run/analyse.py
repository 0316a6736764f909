"""The analysis tier: all queries of a pipeline in one Spark session."""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import IO

from penstock.analysis.binder import BinderConnector
from penstock.analysis.checkpoints.note import Note
from penstock.analysis.checkpoints.rescale import recover
from penstock.analysis.connectors import KafkaConnector, SparkConnector
from penstock.analysis.engine import Engine
from penstock.analysis.operators.statics import Watch, table
from penstock.analysis.query import Late, Query
from penstock.analysis.session import session, wait_for_slots
from penstock.channels.kafka import Kafka
from penstock.core.clock import SystemClock
from penstock.core.contracts import Channels
from penstock.core.errors import Misconfigured, Unavailable
from penstock.pipeline.config import LOCAL, Config, topics
from penstock.pipeline.description import Description
from penstock.plan.plan import real_time_queries, slots_needed
from penstock.run.accounts import accounting, announce
from penstock.run.background import run_in_background
from penstock.run.lakes import Lakes
from penstock.run.queries import Queries, result_writers
from penstock.run.state_server import SLOTS, SparkStateReader, serve_state
from penstock.run.static_tables import Refreshing
from penstock.run.status import Figures, report_status
from penstock.run.tier import Ready, Tier, ensure_channels
from penstock.run.warm import spark_archive
from penstock.supervise.java import ensure_jars, find_java

log = logging.getLogger(__name__)

_LOOK_EVERY = 0.5
_BOUNDARY = 0.05
_PATIENCE = 120.0
_ALL_OF_THEM = 20.0


def run(description: Description, config: Config, stop: threading.Event, ready: Ready) -> None:
    """Run the queries until `stop`, each restarted alone when it fails; Unavailable when Spark itself has ended."""
    for query in description.queries:
        if recover(f"{config.checkpoints}/{query.name}"):
            log.warning("query %s: its rescaling was cut short; its state is as it was before", query.name)
    try:
        _run(description, config, stop, ready, None)
    except _Short as short:
        log.info("channels have more partitions than declared: Spark starts again, with %d slots", short.needed)
        _run(description, config, stop, ready, short.needed)


def _run(description: Description, config: Config, stop: threading.Event, ready: Ready, slots: int | None) -> None:
    _require_letters(description)
    channels = config.bind()
    started = threading.Event()
    threading.Thread(target=_leave_at_once, args=(stop, started), daemon=True).start()
    with engine(description, config, sys.stderr.buffer, slots) as spark:
        # Spark comes up while the broker does.
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
        # An address that is taken ends all this before a query has begun.
        with serve_state(SparkStateReader(spark, description), config.spark.answers) as address:
            queries = Queries(spark, description, channels, ids)
            lakes = Lakes(spark, description, config, channels, ids)
            watch = Watch(description.statics, spark.tables, partial(table, spark.spark), SystemClock())
            refreshing = Refreshing(watch, spark, description.queries, queries, SystemClock())
            with (
                report_status(channels, description.status, Tier.ANALYSE, lambda: _figures(queries, lakes, address)),
                # From before the first query starts: an account is published as soon as it is complete.
                accounting(channels, description.bookmarks, lambda: [*queries.accounts(), *lakes.accounts()]),
            ):
                lakes.require()
                queries.start()
                lakes.start(queries)
                ready()
                _look_after(queries, refreshing, watch, stop)
                # Before the accounts are published for the last time.
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
    """Spark, ready for the queries of a pipeline; what its JVM says goes to the log, or nowhere.

    On this machine it has as many slots as the queries need by what is declared, or as many as are told.
    """
    java = find_java()
    jars = ensure_jars(java)
    flags = spark_archive(java, jars).use_flags()
    needed = slots or slots_needed(description, config, {}).most
    # Who asks for the state of a query takes none of the slots that the queries need.
    with session(description.name, config.spark, java.path, jars.spark, needed + SLOTS, log, flags) as spark:
        shapes = {name: channel.shape for name, channel in description.channels.items()}
        own = Engine(spark, config.spark, connector(config), config.checkpoints, shapes)
        tables = {static.name: table(spark, static) for static in description.statics}
        yield replace(own, tables=tables).knowing(description.queries)


def _require_letters(description: Description) -> None:
    """Refuse a query whose late records would have nowhere to lie."""
    for query in description.queries:
        if query.late is Late.DEAD and any(description.channels[name].result_of for name in query.inputs):
            problem = "its late records are to lie in dead letters, and it reads a result, which has none"
            raise Misconfigured(f"query {query.name}", problem, "leave late= out, or read what the result is made of")


class _Short(Exception):
    """Our own Spark has fewer slots than are needed: channels have more partitions than anybody declared."""

    def __init__(self, needed: int) -> None:
        super().__init__(needed)
        self.needed = needed


def _require_slots(
    description: Description, config: Config, partitions: Mapping[str, int], spark: Engine, there: int
) -> None:
    """Refuse to start queries of which some tasks would never get a slot, and nobody would notice."""
    if slots_needed(description, config, partitions).most <= there:
        return
    # What was guessed does not fit; Spark knows which of them really run in real time.
    needed = slots_needed(description, config, partitions, real_time_queries(description, spark))
    if needed.least > there and config.spark.master == LOCAL:
        raise _Short(needed.most)
    if remark := needed.check(there, config.spark.master):
        log.warning(remark)


def connector(config: Config) -> SparkConnector:
    """Spark's own way where it has one, the binder's otherwise."""
    channels, skip_lost = config.bind(), config.channels.lost == "skip"
    if isinstance(channels, Kafka):
        return KafkaConnector(
            channels.servers, spark_words(config.kafka.conf), skip_lost, ahead=config.spark.reads_ahead
        )
    return BinderConnector(channels, skip_lost)


def spark_words(conf: Mapping[str, str]) -> dict[str, str]:
    """What the two Kafka clients call by the same name; the rest is for librdkafka alone."""
    return {name: value for name, value in conf.items() if name.startswith(("security.", "sasl.", "ssl."))}


def _leave_at_once(stop: threading.Event, started: threading.Event) -> None:
    """While Spark comes up, this process waits for its JVM and hears nothing; there is nothing to end in order yet."""
    stop.wait()
    if not started.is_set():
        os._exit(0)


def _arrived(channels: Channels) -> None:
    """Wait until the middleware answers; for a while until all brokers do, because topics get their replicas there."""
    began = time.monotonic()
    while True:
        waited = time.monotonic() - began
        try:
            if _all_there(channels) or waited > _ALL_OF_THEM:
                return
        except Unavailable:
            if waited > _PATIENCE:
                raise
        time.sleep(0.1)


def _all_there(channels: Channels) -> bool:
    if isinstance(channels, Kafka):
        return channels.brokers(timeout=2) >= len(channels.servers.split(","))
    channels.names()
    return True

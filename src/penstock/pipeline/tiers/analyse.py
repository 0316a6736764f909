"""The analysis tier: all queries of a pipeline in one Spark session."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import IO

from penstock.analysis.binder import BinderWire
from penstock.analysis.books import Books, standing
from penstock.analysis.engine import Engine, failed, slots
from penstock.analysis.kafka import KafkaWire
from penstock.analysis.progress import StreamingQuery, progress
from penstock.analysis.query import Mode
from penstock.analysis.session import session, wait_for_slots
from penstock.analysis.wire import Wire
from penstock.audit.account import Account
from penstock.audit.rate import Rate
from penstock.channels.kafka import Kafka
from penstock.clock import SystemClock
from penstock.contracts import Channels
from penstock.errors import Unavailable
from penstock.pipeline.accounts import accounting, last_accounts
from penstock.pipeline.description import Description
from penstock.pipeline.pulse import Figures, pulse
from penstock.pipeline.tiers import Ready, Tier
from penstock.pipeline.tiers.topics import bring_about
from penstock.pipeline.warm import spark_archive
from penstock.pipeline.wiring import Wiring, topics
from penstock.supervise.jars import ensure_jars
from penstock.supervise.java import find_java

log = logging.getLogger(__name__)

_LOOK_EVERY = 0.5
_PATIENCE = 120.0
_FIRST = 20.0
_SOURCES = 60.0
_ALL_OF_THEM = 20.0


def run(description: Description, wiring: Wiring, stop: threading.Event, ready: Ready) -> None:
    """Run the queries until `stop`; raises Unavailable when one of them ends, so that all begin again together."""
    channels = wiring.bind()
    started = threading.Event()
    threading.Thread(target=_leave_at_once, args=(stop, started), daemon=True).start()
    with engine(description, wiring, sys.stderr.buffer) as spark:
        # Spark comes up while the broker does.
        log.info("Spark is up")
        needed = _slots(description, wiring, {})
        if (there := wait_for_slots(spark.spark, needed)) < needed:
            log.warning("the queries may need %d slots at once, and %s has %d", needed, wiring.spark.master, there)
        _arrived(channels)
        bring_about(channels, description, log.info)
        ids = {topic.name: channels.topic_id(topic.name) for topic in topics(description)}
        started.set()
        running: dict[str, StreamingQuery] = {}
        notes: dict[str, str] = {}
        places = wiring.spark.real_time_queries
        partitions = {name: len(channels.bounds(name)) for name in description.channels}
        if places and (needed := _slots(description, wiring, partitions)) > there:
            # Some of their tasks would never get one, and nobody would notice.
            log.warning("channels have more partitions than declared: %d slots are needed, not %d", needed, there)
            places = 0
        sizes = {query.into: _size(channels, query.into) for query in description.queries}
        until = time.monotonic() + _FIRST
        stood = {query.name: standing(spark, query, channels.bounds) for query in description.queries}
        for turn, query in enumerate(description.queries):
            touched = {name: ids[name] for name in (*query.inputs, query.into)}
            running[f"query:{query.name}"], verdict = spark.launch(query, places, touched, turn)
            notes[f"query:{query.name}"] = f"{verdict.mode}: {verdict.why}"
            places -= verdict.mode is Mode.REAL_TIME
            log.info("query %s runs, %s: %s", query.name, verdict.mode, verdict.why)
            # One after the other: all at once would keep the one that people watch from its first rows.
            _first_rows(running[f"query:{query.name}"], partial(_grown, channels, query.into, sizes[query.into]), until)
        sifting = [
            spark.sift(channel.shape, channel.dead, {channel.name: ids[channel.name]}, len(running) + turn)
            for turn, channel in enumerate(description.sifted)
        ]
        queries = [*running.values(), *sifting]

        before = last_accounts(channels, description.bookmarks)
        books = [
            Books(spark, query, running[node], before.get(node), stood[query.name], channels, SystemClock())
            for query in description.queries
            if (node := f"query:{query.name}")
        ]

        def accounts() -> list[Account]:
            for one in books:
                try:
                    one.look()
                except Exception:
                    # One that cannot be kept must not hold up the others; its hop stands still, which is an alarm.
                    log.exception("the account of a query cannot be kept")
            return [one.account for one in books]

        rates = {f"query:{query.name}": (query.into, Rate(SystemClock())) for query in description.queries}

        def figures() -> Figures:
            told = {node: {**progress(query), "note": notes[node]} for node, query in running.items()}
            for node, (into, rate) in rates.items():
                # Spark tells the rate of a batch when it has ended, which in real time is a minute later.
                rate.reach(_size(channels, into))
                told[node]["rate"] = rate.per_second()
            return {"nodes": told}

        with (
            pulse(channels, description.status, Tier.ANALYSE, figures),
            accounting(channels, description.bookmarks, accounts),
        ):
            ready()
            while not stop.wait(_LOOK_EVERY):
                if error := failed(queries):
                    raise error
            # Before the accounts are told for the last time.
            for query_ in queries:
                query_.stop()


@contextmanager
def engine(description: Description, wiring: Wiring, log: IO[bytes] | None) -> Iterator[Engine]:
    """Spark, ready for the queries of a pipeline; what its JVM says goes to the log, or nowhere."""
    java = find_java()
    jars = ensure_jars(java)
    flags = spark_archive(java, jars).used()
    needed = _slots(description, wiring, {})
    with session(description.name, wiring.spark, java.path, jars.spark, needed, log, flags) as spark:
        shapes = {name: channel.shape for name, channel in description.channels.items()}
        own = Engine(spark, wiring.spark, wire(wiring), wiring.checkpoints, shapes)
        yield own.knowing(description.queries)


def _slots(description: Description, wiring: Wiring, there: Mapping[str, int]) -> int:
    """How many the queries need, by the partitions that channels have, or should have as long as nobody knows."""
    partitions = {name: there.get(name, channel.partitions) for name, channel in description.channels.items()}
    sifted = [channel.name for channel in description.sifted]
    unique = {channel.name for channel in description.channels.values() if channel.unique}
    return slots(description.queries, partitions, sifted, wiring.spark.shuffle_partitions, unique)


def wire(wiring: Wiring) -> Wire:
    """Spark's own way where it has one, the binder's otherwise."""
    channels, skip_lost = wiring.bind(), wiring.channels.lost == "skip"
    if isinstance(channels, Kafka):
        return KafkaWire(channels.servers, spark_words(wiring.kafka.conf), skip_lost)
    return BinderWire(channels, skip_lost)


def spark_words(conf: Mapping[str, str]) -> dict[str, str]:
    """What the two Kafka clients call by the same name; the rest is for librdkafka alone."""
    return {name: value for name, value in conf.items() if name.startswith(("security.", "sasl.", "ssl."))}


def _leave_at_once(stop: threading.Event, started: threading.Event) -> None:
    """While Spark comes up, this process waits for its JVM and hears nothing; there is nothing to end in order yet."""
    stop.wait()
    if not started.is_set():
        os._exit(0)


def _first_rows(query: StreamingQuery, written: Callable[[], bool], until: float) -> None:
    """Wait until a query has its sources, and for a while until it has written its first rows: there may be none."""
    # A source in Python is a process; a machine that starts many at once may keep each of them from being in time.
    latest = time.monotonic() + _SOURCES
    while query.isActive and query.status["message"] == "Initializing sources" and time.monotonic() < latest:
        time.sleep(0.1)
    while query.isActive and not query.lastProgress and not written() and time.monotonic() < until:
        time.sleep(0.1)


def _grown(channels: Channels, channel: str, size: int) -> bool:
    return _size(channels, channel) > size


def _size(channels: Channels, channel: str) -> int:
    return sum(end for _, end in channels.bounds(channel).values())


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

"""The analysis tier: all queries of a pipeline in one Spark session."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import IO

from penstock.analysis.belated import Belated
from penstock.analysis.binder import BinderWire
from penstock.analysis.books import Books, standing
from penstock.analysis.doctor import Known
from penstock.analysis.engine import Engine, failed
from penstock.analysis.kafka import KafkaWire
from penstock.analysis.progress import Progress, StreamingQuery
from penstock.analysis.query import Late, Mode, Query
from penstock.analysis.rescale import recover
from penstock.analysis.session import session, wait_for_slots
from penstock.analysis.statics import Watch, table
from penstock.analysis.wire import Wire
from penstock.audit.account import Account, Outcome
from penstock.audit.rate import Rate
from penstock.channels.kafka import Kafka
from penstock.clock import SystemClock
from penstock.contracts import Channels
from penstock.errors import Misconfigured, Unavailable
from penstock.pipeline.accounts import accounting, last_accounts
from penstock.pipeline.beside import beside
from penstock.pipeline.description import Description
from penstock.pipeline.plan import slots_needed, standing_in
from penstock.pipeline.pulse import Figures, pulse
from penstock.pipeline.tiers import Ready, Tier
from penstock.pipeline.tiers.answering import SLOTS, StateAnswers, answering
from penstock.pipeline.tiers.refreshing import Refreshing
from penstock.pipeline.tiers.topics import bring_about
from penstock.pipeline.warm import spark_archive
from penstock.pipeline.wiring import LOCAL, Wiring, topics
from penstock.supervise.jars import ensure_jars
from penstock.supervise.java import find_java

log = logging.getLogger(__name__)

_LOOK_EVERY = 0.5
_BOUNDARY = 0.05
_PATIENCE = 120.0
_FIRST = 20.0
_SOURCES = 60.0
_ALL_OF_THEM = 20.0


def run(description: Description, wiring: Wiring, stop: threading.Event, ready: Ready) -> None:
    """Run the queries until `stop`; raises Unavailable when one of them ends, so that all begin again together."""
    for query in description.queries:
        if recover(f"{wiring.checkpoints}/{query.name}"):
            log.warning("query %s: its rescaling was cut short; its state is as it was before", query.name)
    try:
        _run(description, wiring, stop, ready, None)
    except _Short as short:
        log.info("channels have more partitions than declared: Spark starts again, with %d slots", short.needed)
        _run(description, wiring, stop, ready, short.needed)


def _run(description: Description, wiring: Wiring, stop: threading.Event, ready: Ready, slots: int | None) -> None:
    _require_letters(description)
    channels = wiring.bind()
    started = threading.Event()
    threading.Thread(target=_leave_at_once, args=(stop, started), daemon=True).start()
    with engine(description, wiring, sys.stderr.buffer, slots) as spark:
        # Spark comes up while the broker does.
        log.info("Spark is up")
        there = wait_for_slots(spark.spark, slots_needed(description, wiring, {}).least)
        _arrived(channels)
        bring_about(channels, description, log.info)
        ids = {topic.name: channels.topic_id(topic.name) for topic in topics(description)}
        started.set()
        running: dict[str, StreamingQuery] = {}
        notes: dict[str, str] = {}
        places = wiring.spark.real_time_queries
        partitions = {name: len(channels.bounds(name)) for name in description.channels}
        _require_slots(description, wiring, partitions, spark, there)
        sizes = {query.into: _size(channels, query.into) for query in description.queries}
        until = time.monotonic() + _FIRST
        stood = {query.name: standing(spark, query, channels.bounds) for query in description.queries}
        before = last_accounts(channels, description.bookmarks)

        def known(query: Query) -> Known:
            bounds = {name: channels.bounds(name) for name in query.inputs}
            return Known(bounds=bounds, account=before.get(f"query:{query.name}"))

        for turn, query in enumerate(description.queries):
            touched = {name: ids[name] for name in (*query.inputs, query.into)}
            running[f"query:{query.name}"], verdict = spark.launch(query, places, touched, turn, known(query))
            notes[f"query:{query.name}"] = f"{verdict.mode}: {verdict.why}"
            places -= verdict.mode is Mode.REAL_TIME
            log.info("query %s runs, %s: %s", query.name, verdict.mode, verdict.why)
            # One after the other: all at once would keep the one that people watch from its first rows.
            _first_rows(running[f"query:{query.name}"], partial(_grown, channels, query.into, sizes[query.into]), until)
        sifting = [
            spark.sift(channel.shape, channel.dead, {channel.name: ids[channel.name]}, len(running) + turn)
            for turn, channel in enumerate(description.sifted)
        ]
        books = [
            Books(
                spark,
                query,
                running[node],
                before.get(node),
                stood[query.name],
                channels,
                SystemClock(),
                _belated(query, channels, before.get(node), running[node]),
            )
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

        progress = {node: Progress() for node in running}

        def figures() -> Figures:
            told = {node: {**progress[node].look(query), "note": notes[node]} for node, query in running.items()}
            for node, one in zip(running, books, strict=True):
                told[node] |= {"mode": notes[node].partition(":")[0], **_counted(one.account)}
            for node, (into, rate) in rates.items():
                # Spark tells the rate of a batch when it has ended, which in real time is a minute later.
                rate.reach(_size(channels, into))
                told[node]["rate"] = rate.per_second()
            return {"nodes": told}

        def launched_again(renewed: Engine, query: Query) -> None:
            node, turn = f"query:{query.name}", description.queries.index(query)
            touched = {name: ids[name] for name in (*query.inputs, query.into)}
            place = notes[node].startswith(Mode.REAL_TIME)
            running[node], _ = renewed.launch(query, int(place), touched, turn)
            books[turn].follow(renewed, running[node])

        watch = Watch(description.statics, spark.tables, partial(table, spark.spark), SystemClock())
        refreshing = Refreshing(
            watch, spark, description.queries, lambda name: running[f"query:{name}"], launched_again
        )
        with (
            answering(StateAnswers(spark, description), wiring.spark.answers) as address,
            pulse(channels, description.status, Tier.ANALYSE, lambda: {**figures(), "answers": address}),
            accounting(channels, description.bookmarks, accounts),
            beside("the reading of static tables", watch.run),
        ):
            ready()
            while not stop.wait(_BOUNDARY if refreshing.waits else _LOOK_EVERY):
                refreshing.look()
                if error := failed([*running.values(), *sifting]):
                    raise error
            # Before the accounts are told for the last time.
            for query_ in (*running.values(), *sifting):
                query_.stop()


@contextmanager
def engine(
    description: Description, wiring: Wiring, log: IO[bytes] | None, slots: int | None = None
) -> Iterator[Engine]:
    """Spark, ready for the queries of a pipeline; what its JVM says goes to the log, or nowhere.

    On this machine it has as many slots as the queries need by what is declared, or as many as are told.
    """
    java = find_java()
    jars = ensure_jars(java)
    flags = spark_archive(java, jars).used()
    needed = slots or slots_needed(description, wiring, {}).most
    # Who asks for the state of a query takes none of the slots that the queries need.
    with session(description.name, wiring.spark, java.path, jars.spark, needed + SLOTS, log, flags) as spark:
        shapes = {name: channel.shape for name, channel in description.channels.items()}
        own = Engine(spark, wiring.spark, wire(wiring), wiring.checkpoints, shapes)
        tables = {static.name: table(spark, static) for static in description.statics}
        yield replace(own, tables=tables).knowing(description.queries)


def _require_letters(description: Description) -> None:
    """Refuse a query whose late records would have nowhere to lie."""
    for query in description.queries:
        if query.late is Late.DEAD and any(description.channels[name].result_of for name in query.inputs):
            problem = "its late records are to lie in dead letters, and it reads a result, which has none"
            raise Misconfigured(f"query {query.name}", problem, "leave late= out, or read what the result is made of")


def _counted(account: Account) -> dict[str, int]:
    """The records that a query has taken since its account began, and how many of them came too late."""
    shares = account.shares.values()
    late = sum(share.outcomes.get(Outcome.LATE, 0) for share in shares)
    return {"count": sum(share.taken for share in shares), "late": late}


def _belated(query: Query, channels: Channels, before: Account | None, running: StreamingQuery) -> Belated | None:
    """What brings the late records of a query to the dead letters; None when they are to be dropped."""
    if query.late is not Late.DEAD:
        return None
    # A query that begins anew finds the same records late: what an earlier life has written is looked through whole.
    at = before.at if before is not None and before.life == str(running.id) else 0
    return Belated(query.name, channels, at)


class _Short(Exception):
    """Our own Spark has fewer slots than are needed: channels have more partitions than anybody declared."""

    def __init__(self, needed: int) -> None:
        super().__init__(needed)
        self.needed = needed


def _require_slots(
    description: Description, wiring: Wiring, partitions: Mapping[str, int], spark: Engine, there: int
) -> None:
    """Refuse to start queries of which some tasks would never get a slot, and nobody would notice."""
    if slots_needed(description, wiring, partitions).most <= there:
        return
    # What was guessed does not fit; Spark knows which of them really run in real time.
    needed = slots_needed(description, wiring, partitions, standing_in(description, spark))
    if needed.least > there and wiring.spark.master == LOCAL:
        raise _Short(needed.most)
    if remark := needed.check(there, wiring.spark.master):
        log.warning(remark)


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

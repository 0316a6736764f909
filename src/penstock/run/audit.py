"""The audit: the ledger of all channels of a pipeline, its balance told every two seconds, and the alarms."""

import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from penstock.analysis.query import Query
from penstock.audit.account import Account
from penstock.audit.alarms import Alarms, Doubts
from penstock.audit.auditor import Auditor, Reduction
from penstock.audit.balance import balance
from penstock.audit.content import Content
from penstock.audit.dead_letters import DeadLetterCheck
from penstock.audit.findings import Kind, Watched
from penstock.audit.hops import begun_late
from penstock.audit.judge import Doubt, Report
from penstock.audit.ledger import Ledger, Unreadable, set_aside
from penstock.audit.reconcile import Reconciler
from penstock.audit.retention import Endangered, Readers, Retention, committed
from penstock.audit.rules.base import Alarm, Elapsed, Snapshot
from penstock.audit.rules.stages import RETENTION
from penstock.audit.tampering import Losses
from penstock.channels.kafka import Kafka
from penstock.core.clock import Clock, SystemClock
from penstock.core.contracts import Channels, Offsets
from penstock.core.errors import PenstockError, Unaccounted, Unavailable
from penstock.core.metrics import Rate, Sketch, SketchWindow
from penstock.pipeline.config import Config
from penstock.pipeline.description import Description
from penstock.pipeline.graph import stage_inputs, store_node
from penstock.pipeline.sources import worker_name
from penstock.pipeline.stores import make_check
from penstock.run.alarm_sender import sending_alarms
from penstock.run.background import run_in_background
from penstock.run.status import Figures, follow_status, report_status
from penstock.run.tier import Ready, Tier

MIRROR_EVERY = 5.0
LOSSES_EVERY = 5.0
RECONCILE_EVERY = 2.0
LOOK_EVERY = 2.0
"""Seconds between two balances: what is nearer to now is in flight anyway."""
VERIFY_EVERY = 10.0
"""Seconds between two checks that the ledger holds what was written."""
_REST = 20
"""So many times as long as a check has taken, there is no other: a large ledger takes up to 5 % of a core."""
REMADE_FOR = 60.0
"""Seconds for which it is told that the ledger was damaged and is made anew; damaged again by then, it is given up."""

log = logging.getLogger(__name__)


def run(description: Description, config: Config, stop: threading.Event, ready: Ready) -> None:
    """The ledger of all channels of the pipeline, its balance told every two seconds, and the alarms.

    A ledger that cannot be read is kept as a copy, and a new one is made from what the channels hold.
    """
    clock, last, remade = SystemClock(), -math.inf, ""
    while not stop.is_set():
        try:
            _audit(description, config, stop, ready, remade)
        except Unreadable as error:
            if clock.elapsed() - last < REMADE_FOR:
                # It is not the file: a new one would not last either.
                raise
            last, copy = clock.elapsed(), set_aside(config.ledger)
            kept = f"; it is kept as {copy}" if copy else ""
            remade = f"{error.problem}{kept}; a new one is made from what the channels hold"
            log.error("%s: %s", error.place, remade)


def _audit(description: Description, config: Config, stop: threading.Event, ready: Ready, remade: str) -> None:
    channels, clock, watching = config.bind(), SystemClock(), watched(description, config.collect.workers)
    with ExitStack() as stack:
        ledger = stack.enter_context(closing(Ledger(config.ledger)))
        ledger.verify()
        ledger.tie({one.channel: channels.topic_id(one.channel) for one in watching})
        sight = _Sight(config, description, clock, watching, channels, ledger, remade)
        stack.callback(sight.close)
        said = stack.enter_context(follow_status(channels, description.status))
        send_alarms = stack.enter_context(sending_alarms(config.audit, description.name))

        leave = stack.enter_context(_either(stop))
        unreadable: list[Unreadable] = []

        def figures() -> Figures:
            try:
                told = sight.look(said)
            except Unreadable as error:
                unreadable.append(error)
                leave.set()
                return {}
            send_alarms(sight.standing)
            return told

        stack.enter_context(report_status(channels, description.status, Tier.AUDIT, figures, LOOK_EVERY))
        stack.enter_context(_mirroring(channels, description.name, sight))
        stack.enter_context(_watching_losses(sight))
        stack.enter_context(_reconciling(sight.stores))
        reduction = stack.enter_context(_reduction(description, config))
        spark_only = config.audit.engine == "spark"
        by_spark = spark_only or (config.audit.engine == "auto" and isinstance(channels, Kafka))
        auditor = Auditor(
            channels,
            ledger,
            watching,
            description.heartbeats,
            bookmarks=description.bookmarks,
            stages={
                **{stage: () for one in watching if one.kind is Kind.SOURCE for stage in one.fed_by},
                **stage_inputs(description),
            },
            catch_up_only=spark_only,
            skip_lost=config.channels.lost == "skip",
        )
        sight.trouble = auditor.trouble
        ready()
        auditor.run(
            leave,
            reduction=reduction if by_spark else None,
            behind=0 if spark_only else config.audit.behind,
        )
        if unreadable:
            raise unreadable[0]


@contextmanager
def _either(stop: threading.Event) -> Iterator[threading.Event]:
    """An event of our own that is set when `stop` is, too."""
    either = threading.Event()

    def follow(ended: threading.Event) -> None:
        while not ended.wait(0.1):
            if stop.is_set():
                either.set()

    with run_in_background("the stop", follow):
        yield either


def watched(description: Description, workers: int = 1) -> list[Watched]:
    """Every channel of the pipeline, and who writes it; `workers` hear a source."""
    found = []
    for channel in description.channels.values():
        if channel.result_of:
            query = next(one for one in description.queries if one.into == channel.name)
            windowed = not {"window", "session_window"}.isdisjoint(query.key)
            found.append(Watched(channel.name, Kind.RESULT, (f"query:{query.name}",), windowed))
        else:
            sources = [one.name for one in description.sources if one.into == channel.name]
            fed_by = tuple(f"source:{worker_name(name, worker)}" for name in sources for worker in range(workers))
            own = Watched(channel.name, Kind.SOURCE, fed_by, compacted=channel.compacted)
            found += [own, Watched(channel.dead, Kind.DEAD)]
    return found


@dataclass
class _Sight:
    """What the audit sees every two seconds: the balance, the figures of each channel, and the alarms that stand."""

    config: Config
    description: Description
    clock: Clock
    watching: list[Watched]
    channels: Channels
    ledger: Ledger
    remade: str = ""
    """Why the ledger was made anew just now."""
    standing: list[Alarm] = field(default_factory=list)
    trouble: Callable[[], Unavailable | None] = lambda: None
    """What stood in the way of the auditor lately."""
    positions: Mapping[str, Mapping[str, Offsets]] = field(default_factory=dict)
    """How far each stage has read its channels."""
    accounts: Mapping[str, Account] = field(default_factory=dict)
    """The last account of each stage."""

    def __post_init__(self) -> None:
        self._alarms = Alarms(self.config.audit, self.config.spark.real_time_batch, stage_inputs(self.description))
        self._doubts = Doubts(
            {f"query:{query.name}": _interval(query, self.config) for query in self.description.queries},
            self.config.spark.real_time_batch.total_seconds(),
        )
        self._elapsed = Elapsed()
        specs = self.description.stores
        refusing = [one for one in self.description.channels.values() if one.result_of is None]
        stores = [partial(make_check, one, self.description, self.config, self.channels, self.clock) for one in specs]
        dead = [
            partial(DeadLetterCheck, one.name, one.dead, self.channels, lambda: self.accounts, self.clock)
            for one in refusing
        ]
        self.stores = Reconciler(
            [*stores, *dead],
            [*(store_node(one.url, one.channel) for one in specs), *(f"channel:{one.dead}" for one in refusing)],
        )
        self._report = Report(self.clock.now())
        self._rates = {one.channel: Rate(self.clock) for one in self.watching}
        self._lately = {one.channel: SketchWindow(self.clock) for one in self.watching}
        self._bounds: Mapping[str, Mapping[int, tuple[int, int]]] = {}
        self._expiring: list[Endangered] = []
        self._verify_at, self._away = self.clock.elapsed() + VERIFY_EVERY, False
        self._retention = Retention(self.channels, self.clock, self.config.audit.expiring_share)

    def look(self, said: Mapping[str, Mapping[str, Any]]) -> Figures:
        now, away = self.clock.now(), list[Doubt]()
        try:
            sources = [one.channel for one in self.watching if one.kind is Kind.SOURCE]
            self._bounds = {channel: self.channels.bounds(channel) for channel in sources}
        except Unavailable as error:
            # The alarms are needed most when nothing else answers.
            if not self._away:
                log.warning("the audit looks at what it knew before: %s", error)
            away = [Doubt("channel", error.service, f"the auditor cannot read the channels: {error}")]
        self._away = bool(away)
        # Opened anew each time: a reader that stays open would keep the ledger's log from being folded in.
        with closing(Ledger(self.config.ledger, read_only=True)) as reader:
            if (began := self.clock.elapsed()) >= self._verify_at:
                reader.verify()
                ended = self.clock.elapsed()
                self._verify_at = ended + max(VERIFY_EVERY, _REST * (ended - began))
            content = reader.content()
            unread = reader.unread(self._bounds)
            positions = reader.positions()
        self.accounts = content.accounts
        self.positions = {
            stage: {channel: share.until for channel, share in account.shares.items()}
            for stage, account in content.accounts.items()
        }
        found = balance(content, now, _micros(self.config), unread)
        snapshot = Snapshot(now, self._elapsed.at(now), self.config.audit, found.to_json(), said)
        first = {channel: {at: low for at, (low, _) in one.items()} for channel, one in self._bounds.items()}
        self._report = Report(
            now,
            discrepancies=(*begun_late(content, first), *self.stores.discrepancies),
            doubts=(*away, *self._remade(snapshot), *self._unread(), *self._doubts.look(snapshot), *self.stores.doubts),
        )
        try:
            self.ledger.report(self._report)
        except Unavailable as error:
            # Such as a full disk: what is known is told all the same.
            doubt = Doubt("ledger", str(self.config.ledger), f"the ledger cannot be written: {error}")
            self._report = replace(self._report, doubts=(*self._report.doubts, doubt))
        found = found.with_report(self._report)
        brief = found.to_json(brief=True)
        nodes = {f"channel:{one['channel']}": self._counted(one, content) for one in brief["channels"]}
        if not away:
            self._expiring = self._retention.look(lambda: self._readers(positions))
        own = {"nodes": nodes, RETENTION: [one.to_json() for one in self._expiring]}
        self.standing = self._alarms.look(now, found.to_json(), {**said, Tier.AUDIT: own})
        return {**own, "balance": {**brief, "alarms": [alarm.to_json() for alarm in self.standing]}}

    def close(self) -> None:
        """Leave a last report: this auditor stops in order."""
        with suppress(Unavailable, Unreadable):
            self._leave()

    def _leave(self) -> None:
        self.ledger.report(replace(self._report, at=self.clock.now(), closed=True))

    def _remade(self, snapshot: Snapshot) -> Iterator[Doubt]:
        """Told for a while, so that nobody misses it: what the channels no longer hold is not in the new ledger."""
        if self.remade and snapshot.elapsed < REMADE_FOR:
            yield Doubt("ledger", str(self.config.ledger), self.remade)

    def _unread(self) -> Iterator[Doubt]:
        """What the auditor cannot read, such as a damaged partition; the rest is read on."""
        if (trouble := self.trouble()) is not None:
            yield Doubt("channel", trouble.service, f"the auditor cannot read on: {trouble}")

    def _readers(self, ledger: Mapping[str, Offsets]) -> Readers:
        """Whoever reads a channel of ours: the stages, the audit itself, and the groups of others."""
        names = {one.channel for one in self.watching}
        found: dict[str, Mapping[str, Offsets]] = {"audit": {name: ledger[name] for name in names if name in ledger}}
        for stage, read in self.positions.items():
            found[stage] = {channel: positions for channel, positions in read.items() if channel in names}
        for name in self.channels.groups():
            if not name.startswith("penstock."):
                try:
                    found[f"group:{name}"] = committed(self.channels.group(name), names)
                except Unaccounted as error:
                    log.warning("%s", error)
        return found

    def _counted(self, channel: Mapping[str, Any], content: Content) -> dict[str, Any]:
        name = channel["channel"]
        rate = self._rates[name]
        rate.set_total(channel["records"])
        return {
            "count": channel["records"],
            "rate": rate.per_second(),
            "lag": channel["unread"] or None,
            "latency": self._lately[name].update(content.latencies.get(name) or Sketch()).summary(),
            "state": "missing" if channel["missing"] else "whole",
            "note": f"{channel['duplicates']} duplicates, {channel['missing']} missing",
        }


def _interval(query: Query, config: Config) -> float:
    return (query.every or config.spark.every).total_seconds()


def _micros(config: Config) -> int:
    return int(config.audit.grace.total_seconds() * 1_000_000)


@contextmanager
def _mirroring(channels: Channels, pipeline: str, sight: _Sight) -> Iterator[None]:
    """Keep a consumer group for each stage, so that `penstock groups` and Kafka's own tools show its lag."""

    def mirror(stop: threading.Event) -> None:
        told: dict[str, Mapping[str, Offsets]] = {}
        while not stop.wait(MIRROR_EVERY):
            for stage, positions in dict(sight.positions).items():
                if told.get(stage) == positions or not any(positions.values()):
                    continue
                try:
                    channels.move(f"penstock.{pipeline}.{stage}", positions)
                    told[stage] = positions
                except PenstockError as error:
                    log.warning("the positions of %s are not mirrored: %s", stage, error)

    with run_in_background("mirror", mirror):
        yield


@contextmanager
def _watching_losses(sight: _Sight) -> Iterator[None]:
    """Look every few seconds whether channels have lost records before their time."""
    losses = Losses(sight.channels, sight.ledger, sight.clock)
    names = [one.channel for one in sight.watching]

    def watch(stop: threading.Event) -> None:
        while not stop.wait(LOSSES_EVERY):
            try:
                losses.look(names, lambda: sight.positions)
            except PenstockError as error:
                log.warning("nobody knows whether channels have lost records: %s", error)

    with run_in_background("losses", watch):
        yield


@contextmanager
def _reconciling(stores: Reconciler) -> Iterator[None]:
    """Compare the stores with their channels, a part in each turn."""

    def reconcile(stop: threading.Event) -> None:
        try:
            while not stop.wait(RECONCILE_EVERY):
                stores.turn()
        finally:
            stores.close()

    with run_in_background("reconciliation", reconcile):
        yield


@contextmanager
def _reduction(description: Description, config: Config) -> Iterator[Callable[[], Reduction]]:
    """Spark for the audit, started when it is first needed; a JVM of its own, for the queries' may be in trouble."""
    with ExitStack() as stack:
        started: list[Reduction] = []

        def tally() -> Reduction:
            if not started:
                # Spark is imported when it is needed: most audits never do.
                from penstock.run.spark_audit import tally as start

                log.info("the audit takes Spark")
                started.append(stack.enter_context(start(description, config, sys.stderr.buffer)))
            return started[0]

        yield tally

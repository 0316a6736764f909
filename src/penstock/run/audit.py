"""The auditor process: the ledger of all channels of a pipeline, its balance every two seconds, and the alarms."""

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
from penstock.audit.lag import Endangered, Readers, Retention, committed
from penstock.audit.ledger import Ledger, Unreadable, set_aside
from penstock.audit.reconcile import Reconciler
from penstock.audit.rules import Alarm, Elapsed, Snapshot
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
from penstock.run.status import Figures, follow_status, report_status, run_in_background
from penstock.run.tier import Ready, Tier

MIRROR_EVERY = 5.0
LOSSES_EVERY = 5.0
RECONCILE_EVERY = 2.0
LOOK_EVERY = 2.0
"""Seconds between two balances: younger records are in flight anyway."""
VERIFY_EVERY = 10.0
"""Seconds between two checks that the ledger holds what was written."""
_REST = 20
"""Minimum pause between two checks, as a multiple of their duration: a large ledger takes up to 5 % of a core."""
REBUILT_FOR = 60.0
"""Seconds for which a rebuilt ledger is reported; if it is damaged again in this time, the auditor ends."""

log = logging.getLogger(__name__)


def run(description: Description, config: Config, stop: threading.Event, ready: Ready) -> None:
    """Keep the ledger of all channels of the pipeline, and report balance and alarms every two seconds.

    A ledger that cannot be read is kept as a copy, and a new one is built from the channels.
    """
    clock, last, rebuilt = SystemClock(), -math.inf, ""
    while not stop.is_set():
        try:
            _audit(description, config, stop, ready, rebuilt)
        except Unreadable as error:
            if clock.elapsed() - last < REBUILT_FOR:
                # The file is not the reason: a new one would fail, too.
                raise
            last, copy = clock.elapsed(), set_aside(config.ledger)
            kept = f"; it is kept as {copy}" if copy else ""
            rebuilt = f"{error.problem}{kept}; a new one is built from the channels"
            log.error("%s: %s", error.location, rebuilt)


def _audit(description: Description, config: Config, stop: threading.Event, ready: Ready, rebuilt: str) -> None:
    channels, clock, watching = config.bind(), SystemClock(), watched(description, config.collect.workers)
    with ExitStack() as stack:
        ledger = stack.enter_context(closing(Ledger(config.ledger)))
        ledger.verify()
        ledger.tie({one.channel: channels.topic_id(one.channel) for one in watching})
        status = _AuditStatus(config, description, clock, watching, channels, ledger, rebuilt)
        stack.callback(status.close)
        reports = stack.enter_context(follow_status(channels, description.status))
        send_alarms = stack.enter_context(sending_alarms(config.audit, description.name))

        leave = stack.enter_context(_either(stop))
        unreadable: list[Unreadable] = []

        def figures() -> Figures:
            try:
                found = status.look(reports)
            except Unreadable as error:
                unreadable.append(error)
                leave.set()
                return {}
            send_alarms(status.alarms)
            return found

        stack.enter_context(report_status(channels, description.status, Tier.AUDIT, figures, LOOK_EVERY))
        stack.enter_context(_mirroring(channels, description.name, status))
        stack.enter_context(_watching_losses(status))
        stack.enter_context(_reconciling(status.stores))
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
        status.recent_error = auditor.recent_error
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
    """Return an event that is also set when `stop` is set."""
    either = threading.Event()

    def follow(ended: threading.Event) -> None:
        while not ended.wait(0.1):
            if stop.is_set():
                either.set()

    with run_in_background("the stop", follow):
        yield either


def watched(description: Description, workers: int = 1) -> list[Watched]:
    """Return every channel of the pipeline with the stages that write to it; each source has `workers` processes."""
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
class _AuditStatus:
    """The status of the audit, every two seconds: the balance, the figures of each channel, and the active alarms."""

    config: Config
    description: Description
    clock: Clock
    watching: list[Watched]
    channels: Channels
    ledger: Ledger
    rebuilt: str = ""
    """Why the ledger was just rebuilt."""
    alarms: list[Alarm] = field(default_factory=list)
    recent_error: Callable[[], Unavailable | None] = lambda: None
    """Returns a recent error of the auditor."""
    positions: Mapping[str, Mapping[str, Offsets]] = field(default_factory=dict)
    """How far each stage has read its channels."""
    accounts: Mapping[str, Account] = field(default_factory=dict)
    """The last account of each stage."""

    def __post_init__(self) -> None:
        self._rules = Alarms(self.config.spark.real_time_batch)
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

    def look(self, reports: Mapping[str, Mapping[str, Any]]) -> Figures:
        now, away = self.clock.now(), list[Doubt]()
        try:
            sources = [one.channel for one in self.watching if one.kind is Kind.SOURCE]
            self._bounds = {channel: self.channels.bounds(channel) for channel in sources}
        except Unavailable as error:
            # Alarms are also needed while the channels are unavailable.
            if not self._away:
                log.warning("the audit uses the last known offsets: %s", error)
            away = [Doubt("channel", error.service, f"the auditor cannot read the channels: {error}")]
        self._away = bool(away)
        # Opened each time: an open reader would prevent SQLite's checkpoints.
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
        snapshot = Snapshot(now, self._elapsed.at(now), self.config.audit, found, reports)
        first = {channel: {at: low for at, (low, _) in one.items()} for channel, one in self._bounds.items()}
        self._report = Report(
            now,
            discrepancies=(*begun_late(content, first), *self.stores.discrepancies),
            doubts=(
                *away,
                *self._rebuilt(snapshot),
                *self._unreadable(),
                *self._doubts.look(snapshot),
                *self.stores.doubts,
            ),
        )
        try:
            self.ledger.report(self._report)
        except Unavailable as error:
            # Such as a full disk: the status is reported all the same.
            doubt = Doubt("ledger", str(self.config.ledger), f"the ledger cannot be written: {error}")
            self._report = replace(self._report, doubts=(*self._report.doubts, doubt))
        found = found.with_report(self._report)
        brief = found.to_json(brief=True)
        nodes = {f"channel:{one['channel']}": self._counted(one, content) for one in brief["channels"]}
        if not away:
            self._expiring = self._retention.look(lambda: self._readers(positions))
        self.alarms = self._rules.look(replace(snapshot, balance=found, endangered=self._expiring))
        return {"nodes": nodes, "balance": {**brief, "alarms": [alarm.to_json() for alarm in self.alarms]}}

    def close(self) -> None:
        """Store a last report: this auditor stops normally."""
        with suppress(Unavailable, Unreadable):
            self._leave()

    def _leave(self) -> None:
        self.ledger.report(replace(self._report, at=self.clock.now(), closed=True))

    def _rebuilt(self, snapshot: Snapshot) -> Iterator[Doubt]:
        """Report a rebuilt ledger for a while: it lacks the records that the channels no longer hold."""
        if self.rebuilt and snapshot.elapsed < REBUILT_FOR:
            yield Doubt("ledger", str(self.config.ledger), self.rebuilt)

    def _unreadable(self) -> Iterator[Doubt]:
        """Report a part that the auditor cannot read, such as a damaged partition; it continues with the others."""
        if (error := self.recent_error()) is not None:
            yield Doubt("channel", error.service, f"the auditor cannot read it: {error}")

    def _readers(self, ledger: Mapping[str, Offsets]) -> Readers:
        """Return the readers of the channels: the stages, the audit itself, and other consumer groups."""
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
def _mirroring(channels: Channels, pipeline: str, status: _AuditStatus) -> Iterator[None]:
    """Keep a consumer group for each stage, so that `penstock groups` and Kafka's own tools show its lag."""

    def mirror(stop: threading.Event) -> None:
        mirrored: dict[str, Mapping[str, Offsets]] = {}
        while not stop.wait(MIRROR_EVERY):
            for stage, positions in dict(status.positions).items():
                if mirrored.get(stage) == positions or not any(positions.values()):
                    continue
                try:
                    channels.move(f"penstock.{pipeline}.{stage}", positions)
                    mirrored[stage] = positions
                except PenstockError as error:
                    log.warning("the positions of %s are not mirrored: %s", stage, error)

    with run_in_background("mirror", mirror):
        yield


@contextmanager
def _watching_losses(status: _AuditStatus) -> Iterator[None]:
    """Check every few seconds whether channels have lost records."""
    losses = Losses(status.channels, status.ledger, status.clock)
    names = [one.channel for one in status.watching]

    def watch(stop: threading.Event) -> None:
        while not stop.wait(LOSSES_EVERY):
            try:
                losses.look(names, lambda: status.positions)
            except PenstockError as error:
                log.warning("it is not known whether channels have lost records: %s", error)

    with run_in_background("losses", watch):
        yield


@contextmanager
def _reconciling(stores: Reconciler) -> Iterator[None]:
    """Run the checks of stores and dead letters, a part in each turn."""

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
    """Provide Spark for the audit, started when first needed, in a separate JVM."""
    with ExitStack() as stack:
        started: list[Reduction] = []

        def spark() -> Reduction:
            if not started:
                # Spark is imported only when needed: most audits never do.
                from penstock.run.spark_audit import spark_reader as start

                log.info("the audit starts Spark")
                started.append(stack.enter_context(start(description, config, sys.stderr.buffer)))
            return started[0]

        yield spark

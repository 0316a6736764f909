"""The auditor process: the ledger of all channels of a pipeline, its balance every two seconds, and the alarms."""

import logging
import math
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from typing import Any

from penstock.audit.account import Account
from penstock.audit.alarms import Alarms, Doubts
from penstock.audit.auditor import Auditor, Reduction
from penstock.audit.balance import balance
from penstock.audit.content import Content
from penstock.audit.dead_letters import DeadLetterCheck
from penstock.audit.findings import Kind, Watched
from penstock.audit.hops import begun_late
from penstock.audit.judge import Doubt, Report
from penstock.audit.lag import Endangered, OpenTransactions, Readers, Retention, committed
from penstock.audit.ledger import Ledger, Unreadable, set_aside
from penstock.audit.reconcile import Check, Reconciler
from penstock.audit.rules import Alarm, Elapsed, Snapshot
from penstock.audit.tampering import Losses
from penstock.channels.kafka import Kafka
from penstock.core.clock import SystemClock
from penstock.core.contracts import Channels, Offsets
from penstock.core.errors import PenstockError, Unaccounted, Unavailable
from penstock.core.metrics import Rate, Sketch, SketchWindow
from penstock.pipeline.config import Config
from penstock.pipeline.description import Description
from penstock.pipeline.graph import stage_inputs, store_node
from penstock.pipeline.sources import worker_name
from penstock.pipeline.stores import make_check
from penstock.run.alarm_sender import sending_alarms
from penstock.run.status import Figures, follow_status, repeat, report_status, run_in_background
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
    channels, watching = config.bind(), watched(description, config.collect.workers)
    with ExitStack() as stack:
        ledger = stack.enter_context(closing(Ledger(config.ledger)))
        ledger.verify()
        ledger.tie({one.channel: channels.topic_id(one.channel) for one in watching})
        spark_only = config.audit.engine == "spark"
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
        status = _AuditStatus(config, description, watching, channels, ledger, auditor, rebuilt)
        stack.callback(status.close)
        reports = stack.enter_context(follow_status(channels, description.status))
        send_alarms = stack.enter_context(sending_alarms(config.audit, description.name))

        def figures() -> Figures:
            try:
                found = status.look(reports)
            except Unreadable as error:
                auditor.failure = error
                return {}
            send_alarms(status.alarms)
            return found

        @cache
        def spark() -> Reduction:
            # Imported and started only when needed: most audits never do.
            from penstock.run.analyse import spark_reader

            log.info("the audit starts Spark")
            return stack.enter_context(spark_reader(description, config, sys.stderr.buffer))

        stack.enter_context(report_status(channels, description.status, Tier.AUDIT, figures, LOOK_EVERY))
        for name, work in (("mirror", status.mirror), ("losses", status.watch_losses), ("stores", status.reconcile)):
            stack.enter_context(run_in_background(name, work))
        ready()
        by_spark = spark_only or (config.audit.engine == "auto" and isinstance(channels, Kafka))
        auditor.run(stop, reduction=spark if by_spark else None, behind=0 if spark_only else config.audit.behind)


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


class _AuditStatus:
    """The status of the audit, every two seconds: the balance, the figures of each channel, and the active alarms."""

    def __init__(
        self,
        config: Config,
        description: Description,
        watching: list[Watched],
        channels: Channels,
        ledger: Ledger,
        auditor: Auditor,
        rebuilt: str,
    ) -> None:
        """`rebuilt`: why the ledger was just rebuilt."""
        self.alarms: list[Alarm] = []
        self._config, self._pipeline, self._watching = config, description.name, watching
        self._channels, self._ledger, self._auditor, self._rebuilt = channels, ledger, auditor, rebuilt
        self._clock = clock = SystemClock()
        self._accounts: Mapping[str, Account] = {}
        batch = config.spark.real_time_batch
        self._rules = Alarms(batch)
        intervals = {f"query:{one.name}": one.every or config.spark.every for one in description.queries}
        self._doubts = Doubts(
            {stage: every.total_seconds() for stage, every in intervals.items()}, batch.total_seconds()
        )
        self._elapsed = Elapsed()
        refusing = [one for one in description.channels.values() if one.result_of is None]
        checks: dict[str, Callable[[], Check]] = {
            store_node(one.url, one.channel): partial(make_check, one, description, config, channels, clock)
            for one in description.stores
        }
        for one in refusing:
            checks[f"channel:{one.dead}"] = partial(
                DeadLetterCheck, one.name, one.dead, channels, lambda: self._accounts, clock
            )
        self._stores = Reconciler([*checks.values()], [*checks])
        self._report = Report(clock.now())
        self._rates = {one.channel: Rate(clock) for one in watching}
        self._lately = {one.channel: SketchWindow(clock) for one in watching}
        self._bounds: Mapping[str, Mapping[int, tuple[int, int]]] = {}
        self._expiring: list[Endangered] = []
        self._verify_at, self._away = clock.elapsed() + VERIFY_EVERY, False
        self._retention = Retention(channels, clock, config.audit.expiring_share)
        self._sources = [one.channel for one in watching if one.kind is Kind.SOURCE]
        hidden = partial(channels.open_transactions, self._sources) if isinstance(channels, Kafka) else dict
        self._transactions = OpenTransactions(hidden, config.audit.away_after.total_seconds())

    @property
    def _positions(self) -> dict[str, Mapping[str, Offsets]]:
        """How far each stage has read its channels."""
        return {
            stage: {channel: share.until for channel, share in account.shares.items()}
            for stage, account in self._accounts.items()
        }

    def look(self, reports: Mapping[str, Mapping[str, Any]]) -> Figures:
        now, away = self._clock.now(), list[Doubt]()
        try:
            self._bounds = {channel: self._channels.bounds(channel) for channel in self._sources}
            away = self._transactions.look(self._clock.elapsed())
        except Unavailable as error:
            # Alarms are also needed while the channels are unavailable.
            if not self._away:
                log.warning("the audit uses the last known offsets: %s", error)
            away = [Doubt("channel", error.service, f"the auditor cannot read the channels: {error}")]
            self._away = True
        else:
            self._away = False
        # Opened each time: an open reader would prevent SQLite's checkpoints.
        with closing(Ledger(self._config.ledger, read_only=True)) as reader:
            if (began := self._clock.elapsed()) >= self._verify_at:
                reader.verify()
                ended = self._clock.elapsed()
                self._verify_at = ended + max(VERIFY_EVERY, _REST * (ended - began))
            content = reader.content()
            unread = reader.unread(self._bounds)
            positions = reader.positions()
        self._accounts = content.accounts
        found = balance(content, now, self._config.audit.grace // timedelta(microseconds=1), unread)
        snapshot = Snapshot(now, self._elapsed.at(now), self._config.audit, found, reports)
        first = {channel: {at: low for at, (low, _) in one.items()} for channel, one in self._bounds.items()}
        doubts = [*away]
        if self._rebuilt and snapshot.elapsed < REBUILT_FOR:
            # It lacks the records that the channels no longer hold.
            doubts.append(Doubt("ledger", str(self._config.ledger), self._rebuilt))
        if (recent := self._auditor.recent_error()) is not None:
            # Such as a damaged partition: the auditor continues with the others.
            doubts.append(Doubt("channel", recent.service, f"the auditor cannot read it: {recent}"))
        self._report = Report(
            now,
            discrepancies=(*begun_late(content, first), *self._stores.discrepancies),
            doubts=(*doubts, *self._doubts.look(snapshot), *self._stores.doubts),
        )
        try:
            self._ledger.report(self._report)
        except Unavailable as error:
            # Such as a full disk: the status is reported all the same.
            doubt = Doubt("ledger", str(self._config.ledger), f"the ledger cannot be written: {error}")
            self._report = replace(self._report, doubts=(*self._report.doubts, doubt))
        found = found.with_report(self._report)
        brief = found.to_json(brief=True)
        nodes = {f"channel:{one['channel']}": self._counted(one, content) for one in brief["channels"]}
        if not self._away:
            self._expiring = self._retention.look(lambda: self._readers(positions))
        self.alarms = self._rules.look(replace(snapshot, balance=found, endangered=self._expiring))
        return {"nodes": nodes, "balance": {**brief, "alarms": [alarm.to_json() for alarm in self.alarms]}}

    def close(self) -> None:
        """Store a last report: this auditor stops normally."""
        with suppress(Unavailable, Unreadable):
            self._ledger.report(replace(self._report, at=self._clock.now(), closed=True))

    def mirror(self, stop: threading.Event) -> None:
        """Keep a consumer group for each stage, so that `penstock groups` and Kafka's own tools show its lag."""
        mirrored: dict[str, Mapping[str, Offsets]] = {}
        while not stop.wait(MIRROR_EVERY):
            for stage, positions in self._positions.items():
                if mirrored.get(stage) == positions or not any(positions.values()):
                    continue
                try:
                    self._channels.move(f"penstock.{self._pipeline}.{stage}", positions)
                    mirrored[stage] = positions
                except PenstockError as error:
                    log.warning("the positions of %s are not mirrored: %s", stage, error)

    def watch_losses(self, stop: threading.Event) -> None:
        """Check every few seconds whether channels have lost records."""
        losses = Losses(self._channels, self._ledger, self._clock)
        names = [one.channel for one in self._watching]
        failure = "it is not known whether channels have lost records"
        # Not at once: then it is not known yet how far each stage has read.
        look = partial(losses.look, names, lambda: self._positions)
        repeat(stop, look, LOSSES_EVERY, failure, delay=LOSSES_EVERY)

    def reconcile(self, stop: threading.Event) -> None:
        """Run the checks of stores and dead letters, a part in each turn."""
        with closing(self._stores):
            repeat(stop, self._stores.turn, RECONCILE_EVERY, "stores cannot be compared", delay=RECONCILE_EVERY)

    def _readers(self, ledger: Mapping[str, Offsets]) -> Readers:
        """Return the readers of the channels: the stages, the audit itself, and other consumer groups."""
        names = {one.channel for one in self._watching}
        found: dict[str, Mapping[str, Offsets]] = {"audit": {name: ledger[name] for name in names if name in ledger}}
        for stage, read in self._positions.items():
            found[stage] = {channel: positions for channel, positions in read.items() if channel in names}
        for name in self._channels.groups():
            if not name.startswith("penstock."):
                try:
                    found[f"group:{name}"] = committed(self._channels.group(name), names)
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

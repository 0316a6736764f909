"""The audit: the ledger of all channels of a pipeline, its balance told every two seconds, and the alarms."""

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from penstock.audit.alarm import Alarm
from penstock.audit.alarms import Alarms
from penstock.audit.auditor import Auditor, Reduction
from penstock.audit.balance import balance
from penstock.audit.content import Content
from penstock.audit.findings import Kind, Watched
from penstock.audit.latency import Sketch
from penstock.audit.ledger import Ledger
from penstock.audit.rate import Rate
from penstock.audit.recent import Lately
from penstock.audit.retention import Endangered, Readers, Retention, committed
from penstock.audit.rules.retention import WHERE as RETENTION
from penstock.channels.kafka import Kafka
from penstock.clock import Clock, SystemClock
from penstock.contracts import Channels, Positions
from penstock.errors import PenstockError, Unaccounted, Unavailable
from penstock.pipeline.beside import beside
from penstock.pipeline.description import Description
from penstock.pipeline.graph import reads
from penstock.pipeline.pulse import Figures, pulse
from penstock.pipeline.sources import of_worker
from penstock.pipeline.status import listening
from penstock.pipeline.tiers import Ready, Tier
from penstock.pipeline.webhook import telling
from penstock.pipeline.wiring import Wiring

MIRROR_EVERY = 5.0
LOOK_EVERY = 2.0
"""Seconds between two balances: what is nearer to now is in flight anyway."""

log = logging.getLogger(__name__)


def run(description: Description, wiring: Wiring, stop: threading.Event, ready: Ready) -> None:
    """The ledger of all channels of the pipeline, its balance told every two seconds, and the alarms."""
    channels, clock, watching = wiring.bind(), SystemClock(), watched(description, wiring.collect.workers)
    with ExitStack() as stack:
        ledger = stack.enter_context(closing(Ledger(wiring.ledger)))
        ledger.tie({one.channel: channels.topic_id(one.channel) for one in watching})
        sight = _Sight(wiring, description, clock, watching, channels)
        said = stack.enter_context(listening(channels, description.status))
        tell = stack.enter_context(telling(wiring.audit, description.name))

        def figures() -> Figures:
            told = sight.look(said)
            tell(sight.standing)
            return told

        stack.enter_context(pulse(channels, description.status, Tier.AUDIT, figures, LOOK_EVERY))
        stack.enter_context(_mirroring(channels, description.name, sight))
        reduction = stack.enter_context(_reduction(description, wiring))
        spark_only = wiring.audit.engine == "spark"
        by_spark = spark_only or (wiring.audit.engine == "auto" and isinstance(channels, Kafka))
        auditor = Auditor(
            channels,
            ledger,
            watching,
            description.heartbeats,
            bookmarks=description.bookmarks,
            stages=[
                *reads(description),
                *(stage for one in watching if one.kind is Kind.SOURCE for stage in one.fed_by),
            ],
            strides_only=spark_only,
            skip_lost=wiring.channels.lost == "skip",
        )
        ready()
        auditor.run(
            stop,
            reduction=reduction if by_spark else None,
            behind=0 if spark_only else wiring.audit.behind,
        )


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
            fed_by = tuple(f"source:{of_worker(name, worker)}" for name in sources for worker in range(workers))
            own = Watched(channel.name, Kind.SOURCE, fed_by, compacted=channel.compacted)
            found += [own, Watched(channel.dead, Kind.DEAD)]
    return found


@dataclass
class _Sight:
    """What the audit sees every two seconds: the balance, the figures of each channel, and the alarms that stand."""

    wiring: Wiring
    description: Description
    clock: Clock
    watching: list[Watched]
    channels: Channels
    standing: list[Alarm] = field(default_factory=list)
    positions: Mapping[str, Mapping[str, Positions]] = field(default_factory=dict)
    """How far each stage has read its channels."""

    def __post_init__(self) -> None:
        self._alarms = Alarms(self.wiring.audit, self.wiring.spark.real_time_batch, reads(self.description))
        self._rates = {one.channel: Rate(self.clock) for one in self.watching}
        self._lately = {one.channel: Lately(self.clock) for one in self.watching}
        self._bounds: Mapping[str, Mapping[int, tuple[int, int]]] = {}
        self._expiring: list[Endangered] = []
        self._retention = Retention(self.channels, self.clock, self.wiring.audit.expiring_share)

    def look(self, said: Mapping[str, Mapping[str, Any]]) -> Figures:
        away = False
        try:
            sources = [one.channel for one in self.watching if one.kind is Kind.SOURCE]
            self._bounds = {channel: self.channels.bounds(channel) for channel in sources}
        except Unavailable as error:
            # The alarms are needed most when nothing else answers.
            log.warning("the audit looks at what it knew before: %s", error)
            away = True
        # Opened anew each time: a reader that stays open would keep the ledger's log from being folded in.
        with closing(Ledger(self.wiring.ledger, read_only=True)) as reader:
            content = reader.content()
            unread = reader.unread(self._bounds)
            ledger = reader.positions()
        self.positions = {
            stage: {channel: share.until for channel, share in account.shares.items()}
            for stage, account in content.accounts.items()
        }
        found = balance(content, self.clock.now(), _micros(self.wiring), unread)
        brief = found.to_json(brief=True)
        nodes = {f"channel:{one['channel']}": self._counted(one, content) for one in brief["channels"]}
        if not away:
            self._expiring = self._retention.look(lambda: self._readers(ledger))
        own = {"nodes": nodes, RETENTION: [one.to_json() for one in self._expiring]}
        self.standing = self._alarms.look(self.clock.now(), found.to_json(), {**said, Tier.AUDIT: own})
        return {**own, "balance": {**brief, "alarms": [alarm.to_json() for alarm in self.standing]}}

    def _readers(self, ledger: Mapping[str, Positions]) -> Readers:
        """Whoever reads a channel of ours: the stages, the audit itself, and the groups of others."""
        names = {one.channel for one in self.watching}
        found: dict[str, Mapping[str, Positions]] = {"audit": {name: ledger[name] for name in names if name in ledger}}
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
        rate.reach(channel["records"])
        return {
            "count": channel["records"],
            "rate": rate.per_second(),
            "lag": channel["unread"] or None,
            "latency": self._lately[name].of(content.latencies.get(name) or Sketch()).summary(),
            "state": "missing" if channel["missing"] else "whole",
            "note": f"{channel['duplicates']} duplicates, {channel['missing']} missing",
        }


def _micros(wiring: Wiring) -> int:
    return int(wiring.audit.grace.total_seconds() * 1_000_000)


@contextmanager
def _mirroring(channels: Channels, pipeline: str, sight: _Sight) -> Iterator[None]:
    """Keep a consumer group for each stage, so that `penstock groups` and Kafka's own tools show its lag."""

    def mirror(stop: threading.Event) -> None:
        told: dict[str, Mapping[str, Positions]] = {}
        while not stop.wait(MIRROR_EVERY):
            for stage, positions in dict(sight.positions).items():
                if told.get(stage) == positions or not any(positions.values()):
                    continue
                try:
                    channels.move(f"penstock.{pipeline}.{stage}", positions)
                    told[stage] = positions
                except PenstockError as error:
                    log.warning("the positions of %s are not mirrored: %s", stage, error)

    with beside("mirror", mirror):
        yield


@contextmanager
def _reduction(description: Description, wiring: Wiring) -> Iterator[Callable[[], Reduction]]:
    """Spark for the audit, started when it is first needed; a JVM of its own, for the queries' may be in trouble."""
    with ExitStack() as stack:
        started: list[Reduction] = []

        def tally() -> Reduction:
            if not started:
                # Spark is imported when it is needed: most audits never do.
                from penstock.pipeline.tiers.tally import tally as start

                log.info("the audit takes Spark")
                started.append(stack.enter_context(start(description, wiring, sys.stderr.buffer)))
            return started[0]

        yield tally

"""The rules that find alarms: about records, about stages and processes, and about senders. No I/O."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from penstock.audit.snapshot import (
    Alarm,
    Growth,
    Json,
    Level,
    Snapshot,
    Standstill,
    lasting,
    listed,
    mappings,
    named,
    number,
    senders,
)
from penstock.core.clock import Micros

RANGES = 5
"""Maximum missing ranges that are named."""
NAMED = 20
"""Maximum senders that are named."""
FEW = 3
"""Fewer refused or slow records are not an alarm."""
SETTLES = 10.0
"""Seconds after which a verdict that is not known is an alarm: at each start it is not known for a while."""
REPORTED_FOR = 60.0
"""Seconds for which an outage interval is reported after its end."""
NOISE = 0.05
"""Two quantiles that differ by less than this share are the same."""
USED_TO_SEND = 10
"""A sender of fewer records is not expected to send."""
PAUSES = 5
"""A rare sender may be silent for this many of its usual intervals."""
CONFIRMED = 10.0
"""Partitions are read one after the other: for this many seconds a sender can seem silent and is only unread."""
TIMES = 10
"""A slow sender has this many times the median latency of its channel."""
ROUNDED = 0.001
"""Mean latencies are in whole microseconds: the error in ms for each record that was ever counted."""
RETENTION = "retention"
"""The key in the status of the audit, see `audit.lag`."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

SenderKey = tuple[str, str]
"""Channel and sender."""


# --- records: missing, unknown, refused, out of order ----------------------------------------------------------------


def missing(snapshot: Snapshot) -> Iterator[Alarm]:
    """Records are missing at a hop."""
    for hop in snapshot.hops:
        if count := int(number(hop.get("missing")) or 0):
            records = f"{count:,} record{'s' if count > 1 else ''}"
            of = f" of {hop['reads']}" if hop.get("reads") else ""
            text = f'{hop["stage"]} misses {records}{of}{_ranges(hop, count)}: see "penstock audit".'
            yield Alarm("missing", str(hop["stage"]), text, snapshot.now)


def _ranges(hop: Json, missing: int) -> str:
    gaps = list(mappings(hop.get("gaps")))[:RANGES]
    if not gaps:
        return ""
    ranges = [f"{named(gap['sender'])}/{gap['epoch']}: {gap['first']}–{gap['last']}" for gap in gaps]
    if rest := missing - sum(gap["last"] - gap["first"] + 1 for gap in gaps):
        ranges.append(f"and {rest:,} more")
    return f" ({', '.join(ranges)})"


def discrepancies(snapshot: Snapshot) -> Iterator[Alarm]:
    """The audit has a finding: a changed row of a store, records that were removed from the log, …"""
    for one in mappings(snapshot.balance.get("discrepancies")):
        yield Alarm(str(one.get("kind")), str(one.get("stage")), f"{named(one.get('text'))}.", snapshot.now)


class NotKnown:
    """The verdict remains not known."""

    def __init__(self) -> None:
        self._watch = Standstill()

    def look(self, snapshot: Snapshot) -> Iterator[Alarm]:
        doubts = [named(one.get("text")) for one in mappings(snapshot.balance.get("doubts"))]
        quiet = self._watch.look(snapshot.elapsed, (), bool(doubts))
        if doubts and quiet >= SETTLES:
            more = f"; and {len(doubts) - RANGES} more reasons" if len(doubts) > RANGES else ""
            text = (
                f'whether records are missing is not known: {"; ".join(doubts[:RANGES])}{more}: see "penstock audit".'
            )
            yield Alarm("not-known", "audit", text, snapshot.ago(quiet))


class Unknown:
    """The outage time of a source grew."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}
        self._grown: dict[str, tuple[float, float]] = {}
        """Per channel: when it grew last, and from what."""

    def look(self, snapshot: Snapshot) -> Iterator[Alarm]:
        for channel, one in snapshot.channels.items():
            seconds = number(one.get("unknown_seconds")) or 0.0
            before = self._before.get(channel, seconds)
            self._before[channel] = seconds
            if seconds > before:
                self._grown[channel] = snapshot.elapsed, self._grown.get(channel, (0.0, before))[1]
            if channel not in self._grown:
                continue
            at, start = self._grown[channel]
            if snapshot.elapsed - at > REPORTED_FOR:
                del self._grown[channel]
                continue
            stage = snapshot.feeder(channel)
            length = f"{seconds - start:.1f} s"
            text = f'{stage} was not connected for {length}: what it sent then is unknown, see "penstock audit".'
            yield Alarm("unknown", stage, text, snapshot.now)


class Refused:
    """A stage refused more than a share of its last records."""

    def __init__(self) -> None:
        self._growth: dict[tuple[str, str], Growth] = {}

    def look(self, snapshot: Snapshot) -> Iterator[Alarm]:
        for hop in snapshot.hops:
            stage = str(hop["stage"])
            growth = self._growth.setdefault((stage, str(hop.get("reads"))), Growth())
            outcomes = hop.get("outcomes") or {}
            totals = number(hop.get("taken")) or 0, number(outcomes.get("refused")) or 0
            count, refused = growth.reach(snapshot.elapsed, *totals)
            if refused >= FEW and refused > count * snapshot.settings.refused_share:
                share = (
                    f"{refused:,.0f} of its last {count:,.0f} records ({refused / count:.0%})" if count else "records"
                )
                yield Alarm("refused", stage, f'{stage} refused {share}: see "penstock dlq list".', snapshot.now)


class Disorder:
    """Records of a sender arrived in another order than their numbers: a notice, not a loss."""

    def __init__(self) -> None:
        self._most: dict[str, int] = {}

    def look(self, snapshot: Snapshot) -> Iterator[Alarm]:
        for channel, one in snapshot.channels.items():
            found = sum(int(number(generation.get("reordered")) or 0) for generation in senders(one))
            # The senders of the brief form are not always the same.
            most = self._most[channel] = max(found, self._most.get(channel, 0))
            if most:
                stage = snapshot.feeder(channel)
                text = f'{most:,} records came to {channel} out of order, none is lost: see "penstock audit --senders".'
                yield Alarm("disorder", stage, text, snapshot.now, Level.NOTICE)


# --- stages and processes: stalled, unheard, slow, away, slower than retention ----------------------------------------


class Stalled:
    """A stage has input and makes no progress.

    Progress is a new account of the stage. A higher count of its process than any since the last account is progress,
    too: a process in a restart loop counts, but never reaches a higher count.
    """

    def __init__(self, batch: timedelta, reads: Mapping[str, Sequence[str]]) -> None:
        self._batch, self._reads = batch, reads
        self._stages: dict[tuple[str, str], Standstill] = {}
        self._highest: dict[tuple[str, str], tuple[float | None, float]] = {}
        self._audit = Standstill()

    def look(self, snapshot: Snapshot) -> Iterator[Alarm]:
        # A query sends its account when its batch ends.
        limit = max(snapshot.settings.stalled_after, 2 * self._batch).total_seconds()
        behind = self._audit.look(snapshot.elapsed, (snapshot.balance.get("as_of"),), snapshot.unread > 0)
        stuck = []
        for stage, hop in self._hops(snapshot):
            reads = str(hop.get("reads") or "")
            node = snapshot.nodes.get(stage, {})
            arrived = number(snapshot.channels.get(reads, {}).get("records"))
            waiting = _waiting(hop, node, arrived)
            watch = self._stages.setdefault((stage, reads), Standstill())
            quiet = watch.look(snapshot.elapsed, self._progress(stage, hop, node), waiting > 0, arrived)
            if quiet >= limit:
                what = f"{waiting:,.0f} records wait" if waiting else "more records came"
                where = f" in {reads}" if reads else ""
                text = f'{stage} made no progress for {lasting(quiet)}, while {what}{where}: see "penstock status".'
                stuck.append(Alarm("stalled", stage, text, snapshot.ago(quiet)))
        if behind >= limit:
            # Then the progress of the stages is not known.
            entries = f"{snapshot.unread:,.0f} entries"
            text = f'the audit read nothing for {lasting(behind)}, while {entries} wait: see "penstock status".'
            yield Alarm("stalled", "audit", text, snapshot.ago(behind))
        else:
            yield from stuck

    def _hops(self, snapshot: Snapshot) -> list[tuple[str, Json]]:
        """Return the stages with an account, those that should have one, and other nodes with a lag."""
        found: list[tuple[str, Json]] = [(str(hop["stage"]), hop) for hop in snapshot.hops]
        stages = {stage for stage, _ in found}
        for stage, channels in self._reads.items():
            if stage not in stages:
                found += [(stage, {"reads": channel}) for channel in channels]
        stages |= self._reads.keys()
        return found + [(node, {}) for node in snapshot.nodes if node not in stages and not node.startswith("channel:")]

    def _progress(self, stage: str, hop: Json, node: Json) -> tuple[float | None, float]:
        key = stage, str(hop.get("reads") or "")
        accounted = number(hop.get("taken"))
        count = number(node.get("count")) or 0.0
        before, highest = self._highest.get(key, (accounted, count))
        self._highest[key] = accounted, max(count, highest) if accounted == before else count
        return self._highest[key]


def _waiting(hop: Json, node: Json, arrived: float | None) -> float:
    """Return how many records the stage has not read."""
    count, lag = number(hop.get("taken")), number(node.get("lag")) or 0
    if count is None:
        # It has no account. If its node has no count either, the whole channel waits.
        return max(lag, 0 if node.get("count") else arrived or 0)
    if arrived is not None and count >= arrived:
        # The other two figures compare offsets: transaction markers use offsets, too.
        return 0
    return max(lag, number(hop.get("in_flight")) or 0)


class Unheard:
    """A source has no connection: records wait at the sender, or are lost."""

    def __init__(self) -> None:
        self._sources: dict[str, Standstill] = {}

    def look(self, snapshot: Snapshot) -> Iterator[Alarm]:
        for node, figures in snapshot.nodes.items():
            if not isinstance(connected := figures.get("connected"), bool):
                continue
            watch = self._sources.setdefault(node, Standstill())
            quiet = watch.look(snapshot.elapsed, (connected,), not connected)
            if quiet >= snapshot.settings.silent_after.total_seconds():
                why = f" ({named(figures['trouble'])})" if figures.get("trouble") else ""
                text = f'{node} has had no connection for {lasting(quiet)}{why}: see "penstock status".'
                yield Alarm("unheard", node, text, snapshot.ago(quiet))


def full_disk(snapshot: Snapshot) -> Iterator[Alarm]:
    """A process reports that its disk is full: it accepts and acknowledges nothing."""
    full: dict[str, tuple[float, float]] = {}
    for report in snapshot.processes.values():
        disk = report.get("disk") if isinstance(report, Mapping) else None
        if isinstance(disk, Mapping):
            free, reserve = number(disk.get("free")), number(disk.get("reserve"))
            if free is not None and reserve is not None and free < reserve:
                full[named(disk.get("folder"))] = free, reserve
    for folder, (free, reserve) in full.items():
        sizes = f"{free / 2**20:,.0f} MiB are free, less than the {reserve / 2**20:,.0f} MiB of [local] reserve"
        text = f"the disk of {folder} is full: {sizes}; sources wait, and continue when there is space."
        yield Alarm("disk", folder, text, snapshot.now)


def event_time(snapshot: Snapshot) -> Iterator[Alarm]:
    """The newest event time of a query is far from the time at which it was read."""
    limit = snapshot.settings.event_time_off / timedelta(microseconds=1)
    for stage, figures in snapshot.nodes.items():
        newest, skew = number(figures.get("newest")), number(figures.get("skew"))
        if newest is None or skew is None or abs(skew * 1_000) <= limit:
            continue
        at = newest + skew * 1_000
        text = f"the newest event time of {stage} is of {_day(newest)}, and was read on {_day(at)}"
        for factor, unit in ((1_000, "milliseconds"), (1_000_000, "microseconds")):
            if abs(newest * factor - at) <= limit:
                why = f"seconds read as {unit}? See event_time= of the channel: timestamp_seconds(…)."
                yield Alarm("event-time", stage, f"{text}: {why}", snapshot.now)
                break
        else:
            why = "history, or another unit than event_time= of the channel expects?"
            yield Alarm("event-time", stage, f"{text}: {why}", snapshot.now, Level.NOTICE)


def _day(timestamp: float) -> str:
    return f"{EPOCH + timedelta(microseconds=timestamp):%Y-%m-%d}"


def slow_stage(snapshot: Snapshot) -> Iterator[Alarm]:
    """The p99 latency of a stage is too high."""
    least = snapshot.settings.slow_stage.total_seconds() * 1_000
    history = snapshot.settings.gone_after.total_seconds() * 1_000
    for hop in snapshot.hops:
        stage = str(hop["stage"])
        took = _took(hop, snapshot)
        # Records that arrive days after they were sent are history; the source is not slow.
        if took is not None and took > least and (hop.get("reads") or took < history):
            text = f'{stage} takes {lasting(took / 1_000)} for one record in a hundred (p99): see "penstock status".'
            yield Alarm("slow-stage", stage, text, snapshot.now)


def _took(hop: Json, snapshot: Snapshot) -> float | None:
    """Return the p99 of the stage alone, in ms: of the last minutes if its node reports it, otherwise of the hop."""
    figures = snapshot.nodes.get(str(hop["stage"]), {})
    after = (
        _p99(figures.get("delivery")) or _p99(figures.get("latency")) or _p99(_latency_of(snapshot, hop.get("writes")))
    )
    if not hop.get("reads"):
        return after or _p99(hop.get("latency"))
    before = _p99(_latency_of(snapshot, hop["reads"]))
    if after is None or before is None:
        return _p99(hop.get("step"))
    return after - before if after - before > NOISE * before else 0.0


def _latency_of(snapshot: Snapshot, channel: object) -> Any:
    """Return the latency of a channel in the last minutes, as its node reports it."""
    return snapshot.nodes.get(f"channel:{channel}", {}).get("latency")


def _p99(summary: object) -> float | None:
    return number(summary.get("p99")) if isinstance(summary, Mapping) else None


class Away:
    """A process sends no reports any more."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[Micros, float]] = {}
        """Per process: the time of its last report by its own clock, and when it was first seen by this clock."""

    def look(self, snapshot: Snapshot) -> Iterator[Alarm]:
        gone = snapshot.settings.gone_after / timedelta(microseconds=1)
        for process in _ours(snapshot.processes):
            at = int(number(snapshot.processes[process].get("at")) or 0)
            if process not in self._heard or self._heard[process][0] != at:
                self._heard[process] = at, snapshot.elapsed
            quiet = snapshot.elapsed - self._heard[process][1]
            if quiet > snapshot.settings.away_after.total_seconds() and snapshot.now - at < gone:
                name = named(process)
                text = (
                    f'the process {name} has reported nothing for {lasting(quiet)}: see "penstock status" and its log.'
                )
                yield Alarm("away", name, text, snapshot.ago(quiet))


def _ours(processes: Json) -> list[str]:
    """Return the processes of this run: the supervisor lists them. Without a supervisor, all that ever reported."""
    names = [name for name, report in processes.items() if isinstance(report, Mapping)]
    usage = processes["run"].get("usage") if "run" in names else None
    return [name for name in names if name == "run" or name in usage] if isinstance(usage, Mapping) and usage else names


def overtaken(snapshot: Snapshot) -> Iterator[Alarm]:
    """Retention has removed records that a reader had not read, or is about to."""
    for report in snapshot.processes.values():
        for one in mappings(report.get(RETENTION)) if hasattr(report, "get") else ():
            reader, channel = named(one.get("reader")), named(one.get("channel"))
            if lost := number(one.get("lost")):
                text = (
                    f"{reader} had not read {lost:,.0f} offsets of {channel} when they were removed: their "
                    f"retention was too short. {_fix(reader)}"
                )
                yield Alarm("overtaken", reader, text, snapshot.now)
            if unread := number(one.get("unread")):
                left = number(one.get("left"))
                when = "soon" if left is None else f"in {lasting(left)}"
                text = (
                    f"{reader} has not read {unread:,.0f} old records of {channel}, and the first of them will be "
                    f"removed {when}: let it catch up, or keep them for longer (retention=)."
                )
                yield Alarm("expiring", reader, text, snapshot.now)


def _fix(reader: str) -> str:
    if reader.startswith("group:"):
        group = reader.removeprefix("group:")
        return f"To start at the beginning of the channel: penstock groups --reset --group {group} --to beginning."
    return 'It continues after them if [channels] lost = "skip".'


# --- senders: silent, slow --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Sender:
    """All epochs of a sender together."""

    records: int = 0
    newest: Micros = 0
    count: float = 0
    total: float = 0
    """Of its latencies, in ms."""


def _senders_by_channel(snapshot: Snapshot) -> Iterator[tuple[str, Json, dict[str, _Sender]]]:
    for channel, one in snapshot.channels.items():
        found: dict[str, _Sender] = {}
        for generation in senders(one):
            sender = found.setdefault(str(generation["sender"]), _Sender())
            sender.records += int(number(generation.get("records")) or 0)
            sender.newest = max(sender.newest, int(number(generation.get("newest")) or 0))
            latency = generation.get("latency") or {}
            count = number(latency.get("count")) or 0
            sender.count += count
            sender.total += count * (number(latency.get("mean")) or 0)
        yield channel, one, found


class Silent:
    """A sender that used to send does not, while its channel still receives.

    It is compared with the newest record of the channel, not with the clock: an audit that is behind sees all senders
    at an earlier time. The balance does not contain whether a sender reports that it has nothing to send.
    """

    def __init__(self) -> None:
        self._received: dict[str, tuple[Micros, float]] = {}
        """Per channel: its newest record, and when that was seen first."""
        self._first: dict[SenderKey, tuple[Micros, int]] = {}
        """The newest record of a sender and their number, when they were seen first."""
        self._quiet: dict[SenderKey, float] = {}
        """Since when it seems silent."""

    def look(self, snapshot: Snapshot) -> Iterator[Alarm]:
        first, quiet = self._first, self._quiet
        self._first, self._quiet = {}, {}
        for channel, _, found in _senders_by_channel(snapshot):
            newest = snapshot.newest(channel)
            for name, sender in found.items():
                key = channel, name
                self._first[key] = first.get(key, (sender.newest, sender.records))
                if self._is_quiet(key, sender, newest, snapshot):
                    self._quiet[key] = quiet.get(key, snapshot.elapsed)
            if not self._receives(channel, newest, snapshot):
                continue
            silent = sorted(
                (sender.newest, name)
                for name, sender in found.items()
                if snapshot.elapsed - self._quiet.get((channel, name), snapshot.elapsed) >= CONFIRMED
            )
            if silent:
                names = [f"{named(name)} for {lasting((newest - since) / 1e6)}" for since, name in silent]
                text = f'{channel} receives nothing from {listed(names, NAMED)}: see "penstock audit --senders".'
                yield Alarm("silent", snapshot.feeder(channel), text, silent[0][0])

    def _receives(self, channel: str, newest: Micros, snapshot: Snapshot) -> bool:
        if self._received.get(channel, (None, 0.0))[0] != newest:
            self._received[channel] = newest, snapshot.elapsed
        return snapshot.elapsed - self._received[channel][1] <= snapshot.settings.silent_after.total_seconds()

    def _is_quiet(self, key: SenderKey, sender: _Sender, newest: Micros, snapshot: Snapshot) -> bool:
        if sender.records < USED_TO_SEND or not sender.newest:
            return False
        limit = snapshot.settings.silent_after / timedelta(microseconds=1)
        since, records = self._first[key]
        if sender.records > records:
            limit = max(limit, PAUSES * (sender.newest - since) / (sender.records - records))
        return limit < newest - sender.newest <= snapshot.settings.gone_after / timedelta(microseconds=1)


class SlowSender:
    """The last records of a sender had a much higher latency than those of other senders."""

    def __init__(self) -> None:
        self._growth: dict[SenderKey, Growth] = {}

    def look(self, snapshot: Snapshot) -> Iterator[Alarm]:
        before, self._growth = self._growth, {}
        least = snapshot.settings.slow / timedelta(milliseconds=1)
        for channel, one, found in _senders_by_channel(snapshot):
            # The latency in the balance is of all time.
            latency = _latency_of(snapshot, channel) or one.get("latency") or {}
            median = number(latency.get("p50")) or 0.0
            slow = []
            for name, sender in found.items():
                growth = self._growth[channel, name] = before.get((channel, name)) or Growth()
                count, total = growth.reach(snapshot.elapsed, sender.count, sender.total)
                if count < FEW:
                    continue
                mean = (total - ROUNDED * sender.count) / count
                if mean > max(least, TIMES * median):
                    slow.append((mean, name))
            if slow:
                slow.sort(reverse=True)
                names = [f"{named(name)} ({lasting(mean / 1_000)})" for mean, name in slow]
                text = (
                    f"the records of {listed(names, NAMED)} arrive late in {channel}, where the median latency is "
                    f'{lasting(median / 1_000)}: see "penstock audit --senders".'
                )
                yield Alarm("slow-sender", snapshot.feeder(channel), text, snapshot.now)

"""The rules that find alarms: about records, about stages and processes, and about senders. No I/O."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any

from penstock.audit.account import Outcome
from penstock.audit.balance import Balance, SenderBalance
from penstock.audit.findings import MINUTE
from penstock.audit.hops import Hop
from penstock.audit.lag import Endangered
from penstock.audit.settings import AuditSettings
from penstock.core.clock import Micros
from penstock.core.text import counted, printable

LONGEST = 80
"""Longer names are truncated."""
RANGES = 5
"""Maximum missing ranges that are named."""
NAMED = 20
"""Maximum senders that are named."""
FEW = 3
"""Fewer refused records are not an alarm."""
SETTLES = 10.0
"""Seconds after which a verdict that is not known is an alarm: at each start it is not known for a while."""
USED_TO_SEND = 10
"""A sender of fewer records is not expected to send."""
PAUSES = 5
"""A rare sender may be silent for this many of its usual intervals."""
CONFIRMED = 10.0
"""Partitions are read one after the other: for this many seconds a sender can seem silent and is only unread."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Alarm:
    """A problem of a stage that an operator must act on: name and stage together identify an alarm."""

    name: str
    stage: str
    """As in the graph of the pipeline, or the name of a process."""
    text: str
    """The facts, and the command that shows more."""
    since: Micros

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.stage

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def named(name: object, longest: int = LONGEST) -> str:
    """Return a name from outside as one printable line of limited length."""
    text = str(name)
    return printable(text if len(text) <= longest else f"{text[:longest]}…")


def listed(names: Sequence[str], most: int) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def lasting(seconds: float) -> str:
    """Return a duration in a suitable unit."""
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def number(value: object) -> float | None:
    """Return a number of a report; None if it is anything else."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


# --- what is evaluated, and memory between evaluations ----------------------------------------------------------------


@dataclass(frozen=True)
class Snapshot:
    now: Micros
    elapsed: float
    """See `Elapsed`."""
    settings: AuditSettings
    balance: Balance
    processes: Json
    """The last report of each process. Reports come from a channel: their content is not trusted."""
    endangered: Sequence[Endangered] = ()

    @property
    def unread(self) -> int:
        """The number of entries that the audit has not read."""
        return sum(channel.unread for channel in self.balance.channels)

    @cached_property
    def reports(self) -> dict[str, Json]:
        return _mappings(self.processes)

    @cached_property
    def usage(self) -> dict[str, Json]:
        """The processes of this run, as the supervisor reports them."""
        return _mappings(self.reports.get("run", {}).get("usage"))

    @cached_property
    def nodes(self) -> dict[str, Json]:
        """The figures of each part of the pipeline, from the reports of all processes."""
        every = (_mappings(report.get("nodes")) for report in self.reports.values())
        return {node: figures for nodes in every for node, figures in nodes.items()}

    def ago(self, seconds: float) -> Micros:
        """Return the time this many seconds before."""
        return self.now - round(seconds * 1e6)

    def feeder(self, channel: str) -> str:
        """Return the source of a channel; the channel itself if there are several, or none is known."""
        sources = [hop.stage for hop in self.balance.hops if not hop.reads and hop.writes == channel]
        return sources[0] if len(sources) == 1 else f"channel:{channel}"


def _mappings(value: object) -> dict[str, Json]:
    """Return the members of a mapping that are mappings; nothing if it is none."""
    items = value.items() if isinstance(value, Mapping) else ()
    return {str(name): member for name, member in items if isinstance(member, Mapping)}


LONGEST_STEP = 5.0
"""Maximum seconds that count between two evaluations."""


class Elapsed:
    """Seconds of observation: jumps of the clock and sleep of the machine do not count."""

    def __init__(self) -> None:
        self._now: Micros | None = None
        self._seconds = 0.0

    def at(self, now: Micros) -> float:
        if self._now is not None:
            self._seconds += min(max(now - self._now, 0) / 1e6, LONGEST_STEP)
        self._now = now
        return self._seconds


OVER = 300.0
"""Seconds over which growth is measured."""


class Growth:
    """How much totals grew in the last minutes: over a time between half of `OVER` and all of it."""

    def __init__(self) -> None:
        self._at = 0.0
        self._older: tuple[float, ...] = ()
        self._newer: tuple[float, ...] = ()

    def reach(self, elapsed: float, *totals: float) -> tuple[float, ...]:
        """Take the current totals and return their growth since the first call.

        If the first of them shrinks, its process has restarted, and the measurement restarts, too.
        """
        if not self._older or totals[0] < self._newer[0]:
            self._at, self._older, self._newer = elapsed, totals, totals
        elif elapsed - self._at >= OVER / 2:
            self._at, self._older, self._newer = elapsed, self._newer, totals
        return tuple(now - before for now, before in zip(totals, self._older, strict=True))


class Standstill:
    """How long a part has had input without progress."""

    def __init__(self) -> None:
        self._state: object = None
        self._since: float | None = None

    def look(self, elapsed: float, state: object, waiting: bool) -> float:
        """Return for how many seconds there was input while `state` stayed the same."""
        if state != self._state or not waiting:
            self._state, self._since = state, None
        if waiting and self._since is None:
            self._since = elapsed
        return 0.0 if self._since is None else elapsed - self._since


@dataclass
class Memory:
    """What the rules remember between evaluations, by rule and subject."""

    standstills: defaultdict[tuple[str, ...], Standstill] = field(default_factory=lambda: defaultdict(Standstill))
    growths: defaultdict[tuple[str, ...], Growth] = field(default_factory=lambda: defaultdict(Growth))
    senders: dict[tuple[str, str], tuple[Micros, int]] = field(default_factory=dict)
    """By channel and sender: its newest record and their number, when they were seen first."""

    def quiet(self, snapshot: Snapshot, *key: str, state: object = None, waiting: bool = True) -> float:
        """Return for how many seconds a part had input, or a problem, while its state stayed the same."""
        return self.standstills[key].look(snapshot.elapsed, state, waiting)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A stage that has read nothing for some seconds, while records of a channel wait for it."""

    stage: str
    reads: str
    records: int
    seconds: float


def unread_for(snapshot: Snapshot, memory: Memory) -> float:
    """Return for how many seconds the audit has read nothing, while entries wait."""
    return memory.quiet(snapshot, "audit", state=snapshot.balance.as_of, waiting=snapshot.unread > 0)


def waiting_stages(snapshot: Snapshot, memory: Memory) -> Iterator[Waiting]:
    """Yield each stage, and how long it has had input without progress, by its account."""
    records = {channel.channel: channel.records for channel in snapshot.balance.channels}
    for hop in snapshot.balance.hops:
        if not hop.reads:
            continue
        # In flight are offsets: transaction markers use offsets, too.
        total = records.get(hop.reads)
        waiting = 0 if total is not None and hop.taken >= total else hop.in_flight
        quiet = memory.quiet(snapshot, "stage", hop.stage, hop.reads, state=hop.taken, waiting=waiting > 0)
        yield Waiting(hop.stage, hop.reads, waiting, quiet)


# --- records: missing, unknown, refused -------------------------------------------------------------------------------


def missing(snapshot: Snapshot, _: Memory) -> Iterator[Alarm]:
    """Records are missing at a hop."""
    for hop in snapshot.balance.hops:
        if hop.missing:
            of = f" of {hop.reads}" if hop.reads else ""
            records = counted(hop.missing, "record")
            text = f'{hop.stage} misses {records}{of}{_ranges(hop)}: see "penstock audit".'
            yield Alarm("missing", hop.stage, text, snapshot.now)


def _ranges(hop: Hop) -> str:
    if not (gaps := hop.gaps[:RANGES]):
        return ""
    ranges = [f"{named(gap.sender)}/{gap.epoch}: {gap.first}–{gap.last}" for gap in gaps]
    if rest := hop.missing - sum(gap.size for gap in gaps):
        ranges.append(f"and {rest:,} more")
    return f" ({', '.join(ranges)})"


def discrepancies(snapshot: Snapshot, _: Memory) -> Iterator[Alarm]:
    """The audit has a finding: a changed row of a store, records that were removed from the log, …"""
    for one in snapshot.balance.discrepancies:
        yield Alarm(one.kind, one.stage, f"{named(one.text)}.", snapshot.now)


def not_known(snapshot: Snapshot, memory: Memory) -> Iterator[Alarm]:
    """The verdict remains not known."""
    doubts = [named(one.text) for one in snapshot.balance.doubts]
    quiet = memory.quiet(snapshot, "not-known", waiting=bool(doubts))
    if doubts and quiet >= SETTLES:
        more = f"; and {counted(len(doubts) - RANGES, 'more reason')}" if len(doubts) > RANGES else ""
        text = f'whether records are missing is not known: {"; ".join(doubts[:RANGES])}{more}: see "penstock audit".'
        yield Alarm("not-known", "audit", text, snapshot.ago(quiet))


def unknown(snapshot: Snapshot, memory: Memory) -> Iterator[Alarm]:
    """The outage time of a source grew in the last minutes."""
    for one in snapshot.balance.channels:
        (seconds,) = memory.growths["unknown", one.channel].reach(snapshot.elapsed, one.unknown_seconds)
        if seconds > 0:
            stage = snapshot.feeder(one.channel)
            text = f'{stage} was not connected for {seconds:.1f} s: what it sent then is unknown, see "penstock audit".'
            yield Alarm("unknown", stage, text, snapshot.now)


def refused(snapshot: Snapshot, memory: Memory) -> Iterator[Alarm]:
    """A stage refused more than a share of its last records."""
    for hop in snapshot.balance.hops:
        growth = memory.growths["refused", hop.stage, hop.reads]
        count, some = growth.reach(snapshot.elapsed, hop.taken, hop.outcomes.get(Outcome.REFUSED, 0))
        if some >= FEW and some > count * snapshot.settings.refused_share:
            share = f"{some:,.0f} of its last {count:,.0f} records ({some / count:.0%})" if count else "records"
            yield Alarm("refused", hop.stage, f'{hop.stage} refused {share}: see "penstock dlq list".', snapshot.now)


# --- stages and processes: stalled, unheard, away, slower than retention ----------------------------------------------


def stalled(snapshot: Snapshot, memory: Memory, batch: timedelta) -> Iterator[Alarm]:
    """A stage has input and makes no progress."""
    # A query sends its account when its batch ends.
    limit = max(snapshot.settings.stalled_after, 2 * batch).total_seconds()
    behind, stages = unread_for(snapshot, memory), list(waiting_stages(snapshot, memory))
    if behind >= limit:
        # Then the progress of the stages is not known.
        entries = f"{snapshot.unread:,} entries"
        text = f'the audit read nothing for {lasting(behind)}, while {entries} wait: see "penstock status".'
        yield Alarm("stalled", "audit", text, snapshot.ago(behind))
        return
    for one in stages:
        if one.seconds >= limit:
            text = (
                f"{one.stage} made no progress for {lasting(one.seconds)}, while {one.records:,} records wait in "
                f'{one.reads}: see "penstock status".'
            )
            yield Alarm("stalled", one.stage, text, snapshot.ago(one.seconds))


def unheard(snapshot: Snapshot, memory: Memory) -> Iterator[Alarm]:
    """A source has no connection: records wait at the sender, or are lost."""
    for node, figures in snapshot.nodes.items():
        if not isinstance(connected := figures.get("connected"), bool):
            continue
        quiet = memory.quiet(snapshot, "unheard", node, waiting=not connected)
        if quiet >= snapshot.settings.silent_after.total_seconds():
            why = f" ({named(figures['trouble'])})" if figures.get("trouble") else ""
            text = f'{node} has had no connection for {lasting(quiet)}{why}: see "penstock status".'
            yield Alarm("unheard", node, text, snapshot.ago(quiet))


def full_disk(snapshot: Snapshot, _: Memory) -> Iterator[Alarm]:
    """A process reports that its disk is full: it accepts and acknowledges nothing."""
    full: dict[str, Alarm] = {}
    for report in snapshot.reports.values():
        disk = report.get("disk")
        if not isinstance(disk, Mapping):
            continue
        folder, free, reserve = named(disk.get("folder")), number(disk.get("free")), number(disk.get("reserve"))
        if free is not None and reserve is not None and free < reserve:
            sizes = f"{free / 2**20:,.0f} MiB are free, less than the {reserve / 2**20:,.0f} MiB of [local] reserve"
            text = f"the disk of {folder} is full: {sizes}; sources wait, and continue when there is space."
            full[folder] = Alarm("disk", folder, text, snapshot.now)
    yield from full.values()


def event_time(snapshot: Snapshot, _: Memory) -> Iterator[Alarm]:
    """The newest event time of a query is far from the time at which it was read, because its unit is another one."""
    limit = snapshot.settings.event_time_off / timedelta(microseconds=1)
    for stage, figures in snapshot.nodes.items():
        newest, skew = number(figures.get("newest")), number(figures.get("skew"))
        if newest is None or skew is None or abs(skew * 1_000) <= limit:
            continue
        at = newest + skew * 1_000
        for factor, unit in ((1_000, "milliseconds"), (1_000_000, "microseconds")):
            if abs(newest * factor - at) <= limit:
                text = (
                    f"the newest event time of {stage} is of {_day(newest)}, and was read on {_day(at)}: seconds read "
                    f"as {unit}? See event_time= of the channel: timestamp_seconds(…)."
                )
                yield Alarm("event-time", stage, text, snapshot.now)


def _day(timestamp: float) -> str:
    return f"{EPOCH + timedelta(microseconds=timestamp):%Y-%m-%d}"


def away(snapshot: Snapshot, memory: Memory) -> Iterator[Alarm]:
    """A process sends no reports any more."""
    gone = snapshot.settings.gone_after / timedelta(microseconds=1)
    for process, report in snapshot.reports.items():
        if snapshot.usage and process != "run" and process not in snapshot.usage:
            continue  # It belongs to an earlier run.
        # The report has the time of its process; how long it lasts is measured by this clock.
        at = int(number(report.get("at")) or 0)
        quiet = memory.quiet(snapshot, "away", process, state=at)
        if quiet > snapshot.settings.away_after.total_seconds() and snapshot.now - at < gone:
            name = named(process)
            text = f'the process {name} has reported nothing for {lasting(quiet)}: see "penstock status" and its log.'
            yield Alarm("away", name, text, snapshot.ago(quiet))


def overtaken(snapshot: Snapshot, _: Memory) -> Iterator[Alarm]:
    """Retention has removed records that a reader had not read, or is about to."""
    for one in snapshot.endangered:
        reader, channel = named(one.reader), named(one.channel)
        if one.lost:
            text = (
                f"{reader} had not read {one.lost:,} offsets of {channel} when they were removed: their retention was "
                f"too short. {_fix(reader)}"
            )
            yield Alarm("overtaken", reader, text, snapshot.now)
        if one.unread:
            when = "soon" if one.left is None else f"in {lasting(one.left)}"
            text = (
                f"{reader} has not read {one.unread:,} old records of {channel}, and the first of them will be "
                f"removed {when}: let it catch up, or keep them for longer (retention=)."
            )
            yield Alarm("expiring", reader, text, snapshot.now)


def _fix(reader: str) -> str:
    if reader.startswith("group:"):
        group = reader.removeprefix("group:")
        return f"To start at the beginning of the channel: penstock groups --reset --group {group} --to beginning."
    return 'It continues after them if [channels] lost = "skip".'


# --- senders: silent --------------------------------------------------------------------------------------------------


def silent(snapshot: Snapshot, memory: Memory) -> Iterator[Alarm]:
    """A sender that used to send does not, while its channel still receives.

    It is compared with the newest record of the channel, not with the clock: an audit that is behind sees all senders
    at an earlier time. The balance does not contain whether a sender reports that it has nothing to send.
    """
    for channel in snapshot.balance.channels:
        senders, found = list(_senders(channel.by_sender)), []
        minutes = (minute * MINUTE for minute, _ in snapshot.balance.minutes.get(channel.channel, ()))
        newest = max([0, *minutes, *(at for _, _, at in senders)])
        for name, records, at in senders:
            first = memory.senders.setdefault((channel.channel, name), (at, records))
            quiet = records >= USED_TO_SEND and at > 0 and _is_quiet(first, records, at, newest, snapshot.settings)
            if memory.quiet(snapshot, "silent", channel.channel, name, waiting=quiet) >= CONFIRMED:
                found.append((at, name))
        since_newest = memory.quiet(snapshot, "received", channel.channel, state=newest)
        if found and since_newest <= snapshot.settings.silent_after.total_seconds():
            found.sort()
            names = [f"{named(name)} for {lasting((newest - at) / 1e6)}" for at, name in found]
            text = f'{channel.channel} receives nothing from {listed(names, NAMED)}: see "penstock audit --senders".'
            yield Alarm("silent", snapshot.feeder(channel.channel), text, found[0][0])


def _is_quiet(first: tuple[Micros, int], records: int, at: Micros, newest: Micros, settings: AuditSettings) -> bool:
    limit = settings.silent_after / timedelta(microseconds=1)
    if records > first[1]:
        limit = max(limit, PAUSES * (at - first[0]) / (records - first[1]))
    return limit < newest - at <= settings.gone_after / timedelta(microseconds=1)


def _senders(epochs: Sequence[SenderBalance]) -> Iterator[tuple[str, int, Micros]]:
    """Each sender with its records and the time of its newest one, over all its epochs."""
    found: dict[str, tuple[int, Micros]] = {}
    for one in epochs:
        records, newest = found.get(one.sender, (0, 0))
        found[one.sender] = records + one.records, max(newest, one.newest or 0)
    return ((name, *both) for name, both in found.items())

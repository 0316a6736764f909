"""The balance of records, computed from the content of the ledger: what arrived, what is missing, what is not known.

For each source channel, claimed = distinct + missing + in flight. A record has arrived if it is in the channel, in its
dead letters, or was dropped on purpose with its number recorded. A sender is counted from its first number that was
seen. No I/O.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from penstock.audit import tampering
from penstock.audit.account import Outcome
from penstock.audit.content import ChannelCounts, Content, Numbered, Run, size
from penstock.audit.findings import Kind, Numbering, Span, Watched, as_delay, shed_from
from penstock.audit.hops import Gap, Hop, hops, paths, without_account
from penstock.audit.judge import Discrepancy, Doubt, Report, Verdict, unique, verdict_of
from penstock.audit.ledger import SETTLES_AFTER
from penstock.core.clock import Micros
from penstock.core.record import LARGEST_JUMP, OutageInterval

BRIEF = 100
"""Maximum gaps per channel in the brief form."""
WORST = 50
"""Maximum senders per channel in the brief form."""
HOUR = 60
"""In minutes."""


@dataclass(frozen=True, slots=True)
class Jump:
    """A number of a sender, or a claimed one, that is more than LARGEST_JUMP above the last one before it."""

    sender: str
    epoch: int
    before: int
    after: int

    @property
    def size(self) -> int:
        return self.after - self.before - 1

    def __str__(self) -> str:
        return f"{self.sender} {self.epoch} from {self.before} to {self.after}"


@dataclass(frozen=True, slots=True)
class SenderBalance:
    """One epoch of a sender in a source channel. `first` and `last` are the numbers seen; None if none was seen."""

    sender: str
    epoch: int
    first: int | None
    last: int | None
    records: int
    distinct: int
    duplicates: int
    missing: int
    reordered: int = 0
    newest: Micros | None = None
    """When its newest record arrived."""
    latency: Mapping[str, float] | None = None
    """The latency of its records, in ms: count, min, mean, max."""

    @property
    def severity(self) -> tuple[int, int, float]:
        """The sort key: the senders with the highest values are shown first."""
        return self.missing, self.duplicates + self.reordered, self.latency["mean"] if self.latency else 0.0


@dataclass(frozen=True, slots=True)
class ChannelBalance:
    channel: str
    kind: Kind
    senders: int
    records: int
    distinct: int
    duplicates: int
    missing: int
    claimed: int
    in_flight: int
    refused: int
    unknown_seconds: float
    without_identity: int
    gaps: tuple[Gap, ...]
    latency: Mapping[str, float] | None
    unread: int = 0
    """Entries of the channel that are not in the ledger yet. They count as in flight."""
    only_dead: int = 0
    """Records that are only in the dead letters."""
    shed: int = 0
    """Records that were dropped on purpose, because of overload, and did not arrive later."""
    by_sender: tuple[SenderBalance, ...] = ()
    note: str = ""
    """What is not known about the missing records, and why."""
    jumps: tuple[Jump, ...] = ()
    """Numbers that are too far from those before them to be a gap."""

    @property
    def worst(self) -> tuple[SenderBalance, ...]:
        return tuple(sorted(self.by_sender, key=lambda one: one.severity, reverse=True)[:WORST])


@dataclass(frozen=True, slots=True)
class Balance:
    at: Micros
    as_of: Micros | None
    """The time up to which the channels were read; None if they never were."""
    channels: tuple[ChannelBalance, ...]
    hops: tuple[Hop, ...] = ()
    """Each stage with each channel that it reads."""
    paths: tuple[Hop, ...] = ()
    """End to end."""
    minutes: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    """The records of the last hour: per channel, minutes since 1970 and how many came."""
    discrepancies: tuple[Discrepancy, ...] = ()
    doubts: tuple[Doubt, ...] = ()

    @property
    def missing(self) -> int:
        return sum(hop.missing for hop in self.hops)

    @property
    def verdict(self) -> Verdict:
        """Records in flight can still arrive; outage intervals of sources are not considered."""
        return verdict_of(self.missing, self.discrepancies, self.doubts)

    @property
    def whole(self) -> bool:
        return self.verdict is Verdict.WHOLE

    @property
    def settled(self) -> bool:
        """Nothing is in flight: the verdict will not change unless more is sent."""
        return not any(hop.in_flight for hop in self.hops)

    @property
    def unknown_seconds(self) -> float:
        return sum(channel.unknown_seconds for channel in self.channels)

    def with_report(self, report: Report) -> "Balance":
        """Return the balance with the findings of the auditor that do not follow from the ledger."""
        return replace(
            self,
            discrepancies=(*self.discrepancies, *report.discrepancies),
            doubts=unique((*self.doubts, *report.doubts)),
        )

    def to_json(self, brief: bool = False) -> dict[str, Any]:
        """Return all of it; the brief form has only the worst senders, and the first gaps of each channel."""
        selected = self
        if brief:
            selected = replace(
                self,
                channels=tuple(
                    replace(one, gaps=one.gaps[:BRIEF], jumps=one.jumps[:BRIEF], by_sender=one.worst)
                    for one in self.channels
                ),
                hops=tuple(replace(one, gaps=one.gaps[:BRIEF], late=one.late[:BRIEF]) for one in self.hops),
                paths=tuple(replace(one, gaps=(), late=()) for one in self.paths),
            )
        document = {"whole": self.whole, "verdict": self.verdict, **asdict(selected)}
        for hop in (*document["hops"], *document["paths"]):
            hop["outcomes"] = {str(outcome): number for outcome, number in hop["outcomes"].items()}
        for channel, one in zip(document["channels"], self.channels, strict=True):
            channel["gap_count"] = len(one.gaps)
            senders = channel.pop("by_sender")
            if one.kind is Kind.SOURCE:
                channel["worst" if brief else "by_sender"] = senders
        return document


def balance(
    content: Content,
    at: Micros,
    grace: Micros = SETTLES_AFTER,
    unread: Mapping[str, int] = MappingProxyType({}),
    report: Report | None = None,
) -> Balance:
    """Compute the balance at a time. A record that is due for less than `grace` is in flight, then it is missing.

    `unread` counts the entries per channel that are not in the ledger yet: they are in flight, too. `report` holds the
    findings of the auditor that do not follow from the ledger.
    """
    sources = [channel for channel, one in content.channels.items() if one.kind is Kind.SOURCE]
    # An entry that the ledger had not read when a gap was noticed can fill the gap.
    settled = at - grace if content.drained is None else min(at - grace, content.drained)
    claims: dict[str, dict[tuple[str, int], _Claimed]] = {channel: {} for channel in content.channels}
    for (reported, sender, epoch), claimed in content.claims.items():
        for channel in _channels_of(reported, sender, content.runs, sources):
            claims[channel][sender, epoch] = claimed
    outages: dict[str, list[OutageInterval]] = {channel: [] for channel in content.channels}
    for reported, outage in content.blinds:
        for channel in _channels_of(reported, outage.source, content.runs, sources):
            outages[channel].append(outage)
    in_order = sorted(content.channels.values(), key=lambda one: (list(Kind).index(one.kind), one.channel))
    channels = tuple(
        _channel(one, content, claims[one.channel], outages[one.channel], settled, unread.get(one.channel, 0))
        for one in in_order
    )
    from_senders = (source_hop(content, one) for one in channels if one.kind is Kind.SOURCE)
    found = (*from_senders, *hops(content))
    minutes = {channel: some[-HOUR:] for channel, some in content.minutes.items()}
    surplus = (
        Discrepancy("doubled", hop.stage, hop.surplus, f"{hop.stage}: {hop.note}") for hop in found if hop.surplus
    )
    doubts = unique((*_of_ledger(content, sources), *without_account(content)))
    if content.as_of is None:
        doubts = (Doubt("audit", "audit", "the auditor has read no channel yet"),)
    made = Balance(
        at,
        content.as_of,
        channels,
        found,
        paths(found),
        minutes,
        (*surplus, *_jumped(channels), *tampering.discrepancies(content)),
        doubts,
    )
    return made.with_report(report) if report else made


def source_hop(content: Content, channel: ChannelBalance) -> Hop:
    """Return the hop from the senders of a source channel."""
    watched = content.channels[channel.channel]
    outcomes = dict.fromkeys(Outcome, 0)
    for stage in watched.fed_by:
        for share in content.accounts[stage].shares.values() if stage in content.accounts else ():
            for outcome, number in share.outcomes.items():
                outcomes[outcome] += number
    outcomes |= {Outcome.PASSED: channel.records, Outcome.REFUSED: channel.only_dead, Outcome.SHED: channel.shed}
    taken = sum(outcomes.values())
    return Hop(
        " ".join(watched.fed_by) or f"source:{channel.channel}",
        "",
        channel.channel,
        taken + channel.in_flight + channel.missing,
        taken,
        channel.in_flight,
        channel.missing,
        outcomes,
        channel.gaps,
        note=channel.note,
        latency=channel.latency,
        step=channel.latency,
    )


def _jumped(channels: Iterable[ChannelBalance]) -> Iterator[Discrepancy]:
    for one in channels:
        if one.jumps:
            text = (
                f"{one.channel}: the numbers of {one.jumps[0].sender} jump from {one.jumps[0].before} to "
                f"{one.jumps[0].after}, beyond the limit of {LARGEST_JUMP:,}: the numbers between were lost, or one "
                "is forged; they are not counted as missing"
            )
            examples = tuple(map(str, one.jumps[:BRIEF]))
            yield Discrepancy("unexplained", f"channel:{one.channel}", len(one.jumps), text, examples)


def _of_ledger(content: Content, sources: Sequence[str]) -> Iterator[Doubt]:
    """A new ledger has not counted records that its channels had already removed."""
    gone = {channel: sum(content.since.get(channel, {}).values()) for channel in sources}
    if lost := [f"{count:,} of {channel}" for channel, count in gone.items() if count]:
        for copy in content.copies:
            text = (
                f"an earlier ledger could not be read, and this one was rebuilt from the channels: offsets that they "
                f"had removed before ({', '.join(lost)}) are not known. The earlier ledger is {copy}; to accept the "
                "new one, move that file away"
            )
            yield Doubt("ledger", copy, text)


_Claimed = Sequence[tuple[int, Micros]]
"""The numbers that were claimed to be the last, and when; in order."""
Claims = Mapping[tuple[str, int], _Claimed]
"""Per sender and epoch."""
Seen = Mapping[tuple[str, int], Sequence[Run]]
"""Per sender and epoch: the numbers that are there."""


def _channel(
    watched: Watched,
    content: Content,
    claims: Claims,
    outages: Sequence[OutageInterval],
    settled: Micros,
    unread: int,
) -> ChannelBalance:
    channel, source = watched.channel, watched.kind is Kind.SOURCE
    runs = _runs(channel, content)
    dead = _runs(f"{channel}.dead", content) if source else {}
    shed = _runs(shed_from(channel), content) if source else {}
    kept = {who: _merged([*runs.get(who, ()), *dead.get(who, ())]) for who in {*runs, *dead}}
    there = {who: _merged([*kept.get(who, ()), *shed.get(who, ())]) for who in {*kept, *shed}}
    due, jumps = _due(there, claims, settled) if source else ([], [])
    gaps = tuple(gap for gap, missing in due if missing)
    distinct, missing, note = _size(there), sum(gap.size for gap in gaps), ""
    if watched.compacted:
        outdated = _outdated(channel, content)
        jumps = [jump for jump in jumps if jump.size > outdated]
        if outdated := min(missing, outdated):
            missing, gaps = missing - outdated, ()
            if missing:
                note = (
                    f"{outdated:,} more may have been outdated before they were read: it is not known which are missing"
                )
    # An unread entry can be one that is due: the sum would count it twice.
    in_flight = max(unread, sum(gap.size for gap, missing in due if not missing))
    numbered = {(sender, epoch): one for (name, sender, epoch), one in content.numbered.items() if name == channel}
    counts = content.counts.get(channel, ChannelCounts())
    dead_counts = content.counts.get(f"{channel}.dead", ChannelCounts()) if source else ChannelCounts()
    latencies = content.latencies.get(channel)
    return ChannelBalance(
        channel=channel,
        kind=watched.kind,
        senders=len({sender for sender, _ in [*there, *claims]}),
        records=counts.records,
        distinct=distinct,
        duplicates=sum(_doubled(one, runs.get(who, ())) for who, one in numbered.items()),
        missing=missing,
        claimed=distinct + missing + in_flight,
        in_flight=in_flight,
        refused=_size(dead) + dead_counts.without_identity,
        unknown_seconds=_length(outages) / 1_000_000,
        without_identity=counts.without_identity,
        gaps=gaps,
        latency=latencies.summary() if latencies else None,
        unread=unread,
        only_dead=_size(kept) - _size(runs),
        shed=_size(there) - _size(kept),
        by_sender=tuple(_senders(numbered, runs, there, claims, gaps)) if source else (),
        note=note,
        jumps=tuple(jumps),
    )


def _senders(
    numbered: Mapping[tuple[str, int], Numbered], runs: Seen, there: Seen, claims: Claims, gaps: Iterable[Gap]
) -> Iterable[SenderBalance]:
    missing = Counter[tuple[str, int]]()
    for gap in gaps:
        missing[gap.sender, gap.epoch] += gap.size
    for who in sorted({*there, *claims}):
        seen, one = there.get(who, ()), numbered.get(who, Numbered(0))
        yield SenderBalance(
            *who,
            first=seen[0].first if seen else None,
            last=seen[-1].last if seen else None,
            records=one.records,
            distinct=size(seen),
            duplicates=_doubled(one, runs.get(who, ())),
            missing=missing[who],
            reordered=one.disorder,
            newest=one.span.newest if one.span else None,
            latency=_latency(one.span) if one.span else None,
        )


def _outdated(channel: str, content: Content) -> int:
    """Return how many offsets had no entry: at most this many records were compacted away before they were read."""
    since, until = content.since.get(channel, {}), content.until.get(channel, {})
    passed = sum(offset - since.get(partition, 0) for partition, offset in until.items())
    return max(0, passed - content.counts.get(channel, ChannelCounts()).records)


def _doubled(one: Numbered, runs: Sequence[Run]) -> int:
    """A redriven dead letter is not a duplicate."""
    return max(0, one.records - one.redriven - size(runs))


def _latency(span: Span) -> dict[str, float]:
    mean = as_delay(span.total // span.count)
    return {"count": span.count, "min": as_delay(span.least), "mean": mean, "max": as_delay(span.most)}


def _runs(channel: str, content: Content) -> dict[tuple[str, int], Sequence[Run]]:
    return {(sender, epoch): runs for (name, sender, epoch), runs in content.runs.items() if name == channel}


def _size(seen: Seen) -> int:
    return sum(size(runs) for runs in seen.values())


def _merged(runs: Iterable[Run]) -> list[Run]:
    """Merge runs that overlap or touch."""
    merged: list[Run] = []
    for run in sorted(runs, key=lambda run: run.first):
        if merged and run.first <= merged[-1].last + 1:
            before = merged[-1]
            merged[-1] = Run(before.first, max(before.last, run.last), min(before.noticed, run.noticed))
        else:
            merged.append(run)
    return merged


def _due(runs: Seen, claims: Claims, settled: Micros) -> tuple[list[tuple[Gap, bool]], list[Jump]]:
    """Find the ranges that have not arrived (True if they are overdue), and the jumps: what they skip is not due."""
    due, jumps = list[tuple[Gap, bool]](), list[Jump]()
    for who in sorted({*runs, *claims}):
        seen, claimed = runs.get(who, ()), claims.get(who, ())
        for before, after in pairwise(seen):
            overdue = after.noticed <= settled
            if not _is_jump(before.last, after.first):
                due.append((Gap(*who, before.last + 1, after.first - 1), overdue))
            elif overdue:
                jumps.append(Jump(*who, before.last, after.first))
        ends = _ends(seen, claimed)
        for last in ends:
            near = [(seq, at) for seq, at in claimed if last < seq and not _is_jump(last, seq)]
            settled_end = max([last, *(seq for seq, at in near if at <= settled)])
            newest = max([settled_end, *(seq for seq, _ in near)])
            if settled_end > last:
                due.append((Gap(*who, last + 1, settled_end), True))
            if newest > settled_end:
                due.append((Gap(*who, settled_end + 1, newest), False))
        for seq, at in claimed:
            last_before = max((last for last in ends if last < seq), default=seq)
            inside = any(run.first <= seq <= run.last for run in seen)
            if not inside and _is_jump(last_before, seq) and at <= settled:
                jumps.append(Jump(*who, last_before, seq))
    return due, jumps


def _is_jump(before: int, after: int) -> bool:
    return after - before - 1 > LARGEST_JUMP


def _ends(seen: Sequence[Run], claimed: _Claimed) -> list[int]:
    """Return the last number before each jump, and the last of all: a claim after it defines what is due.

    Of a sender that was never seen, only numbers after its first claim are due.
    """
    if not seen:
        return [claimed[0][0]] if claimed else []
    return [before.last for before, after in pairwise(seen) if _is_jump(before.last, after.first)] + [seen[-1].last]


def _channels_of(reported: str, name: str, runs: Iterable[Numbering], sources: Sequence[str]) -> Sequence[str]:
    """Return the channel of a sender or source: the one that it reported, or where it was seen, or the first one."""
    if reported in sources:
        return [reported]
    seen = {channel for channel, sender, _ in runs if sender == name}
    return [channel for channel in sources if channel in seen] or sources[:1]


def _length(outages: Sequence[OutageInterval]) -> Micros:
    """Return how long at least one of the sources was not connected."""
    total, until = 0, None
    for outage in sorted(outages, key=lambda outage: outage.since):
        since = outage.since if until is None else max(outage.since, until)
        if outage.until > since:
            total += outage.until - since
            until = outage.until
    return total

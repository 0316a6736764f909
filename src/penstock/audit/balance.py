"""The balance of records: from what the ledger holds to what is there, what is missing, and what nobody can know.

For each source channel, claimed = distinct + missing + in flight. A record is there when it is in the channel or in its
dead letters, or was dropped on purpose and its number written down. A sender is counted from the first number that was
seen of it. No I/O.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from penstock.audit import tampering
from penstock.audit.content import ChannelCounts, Content, Numbered, Run
from penstock.audit.findings import Kind, Numbering, Span, as_delay, shed_from
from penstock.audit.hops import Gap, Hop, Intake, hops, paths, without_account
from penstock.audit.judge import Discrepancy, Doubt, Report, Verdict, unique, verdict_of
from penstock.audit.ledger import SETTLES_AFTER
from penstock.core.clock import Micros
from penstock.core.errors import Unaccounted
from penstock.core.record import LARGEST_JUMP, OutageInterval

BRIEF = 100
"""So many gaps per channel are named in brief."""
WORST = 50
"""So many senders per channel are told in brief."""
HOUR = 60
"""In minutes."""


@dataclass(frozen=True, slots=True)
class Jump:
    """A number of a sender, or the claim of one, that is more than LARGEST_JUMP behind the last one before it."""

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
    """One life of a sender in a source channel. `first` and `last` are what was seen of it: None when nothing was."""

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
    """When the newest record of it came."""
    latency: Mapping[str, float] | None = None
    """How long its records were under way, in ms: count, min, mean, max."""

    @property
    def trouble(self) -> tuple[int, int, float]:
        """What is to be shown first has the most of it."""
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
    """Entries that lie in the channel and are not in the ledger yet. They are among those in flight."""
    only_dead: int = 0
    """Records that lie in the dead letters alone."""
    shed: int = 0
    """Records that were dropped on purpose, because there was too much, and did not come later."""
    by_sender: tuple[SenderBalance, ...] = ()
    note: str = ""
    """What cannot be told of what is missing, and why."""
    jumps: tuple[Jump, ...] = ()
    """Numbers that are too far from those before them to be a gap."""


@dataclass(frozen=True, slots=True)
class Balance:
    at: Micros
    as_of: Micros | None
    """Up to when the channels were read; None when they never were."""
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
        """What is in flight may still come; intervals in which a source was not heard are not counted here."""
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
        """The balance, with what the auditor finds beside the counts of the ledger."""
        return replace(
            self,
            discrepancies=(*self.discrepancies, *report.discrepancies),
            doubts=unique((*self.doubts, *report.doubts)),
        )

    def to_json(self, brief: bool = False) -> dict[str, Any]:
        """Everything; in brief the worst senders instead of all, and of each channel the first gaps."""
        shown = self
        if brief:
            shown = replace(
                self,
                channels=tuple(
                    replace(one, gaps=one.gaps[:BRIEF], jumps=one.jumps[:BRIEF], by_sender=_worst(one.by_sender))
                    for one in self.channels
                ),
                hops=tuple(replace(one, gaps=one.gaps[:BRIEF], late=one.late[:BRIEF]) for one in self.hops),
                paths=tuple(replace(one, gaps=(), late=()) for one in self.paths),
            )
        told = {"whole": self.whole, "verdict": self.verdict, **asdict(shown)}
        for hop in (*told["hops"], *told["paths"]):
            hop["outcomes"] = {str(outcome): number for outcome, number in hop["outcomes"].items()}
        for channel, one in zip(told["channels"], self.channels, strict=True):
            channel["gap_count"] = len(one.gaps)
            senders = channel.pop("by_sender")
            if one.kind is Kind.SOURCE:
                channel["worst" if brief else "by_sender"] = senders
        return told

    def dumps(self) -> str:
        return json.dumps(self.to_json(), ensure_ascii=False)

    def require_whole(self) -> None:
        """Raise Unaccounted for the first stage that misses records."""
        for hop in self.hops:
            if hop.missing:
                ranges = tuple((gap.sender, gap.epoch, gap.first, gap.last) for gap in hop.gaps)
                raise Unaccounted(hop.stage, ranges)


def balance(
    content: Content,
    at: Micros,
    grace: Micros = SETTLES_AFTER,
    unread: Mapping[str, int] = MappingProxyType({}),
    report: Report | None = None,
) -> Balance:
    """The balance at a moment. What is due for less than `grace` is in flight, afterwards it is missing.

    `unread` are entries per channel that the ledger does not know yet: they are in flight, too. `report` is what the
    auditor finds beside the counts of the ledger.
    """
    sources = [channel for channel, one in content.channels.items() if one.kind is Kind.SOURCE]
    # What the ledger had not read when something was noticed may be the very thing that is due.
    settled = at - grace if content.drained is None else min(at - grace, content.drained)
    claims = _claims_by_channel(content, sources)
    blinds = _blinds_by_channel(content, sources)
    channels = tuple(
        _channel(
            channel, kind, content, claims.get(channel, {}), blinds.get(channel, ()), settled, unread.get(channel, 0)
        )
        for channel, kind in sorted(
            ((channel, one.kind) for channel, one in content.channels.items()),
            key=lambda item: (list(Kind).index(item[1]), item[0]),
        )
    )
    intakes = [
        Intake(
            channel=one.channel,
            records=one.records,
            refused=one.only_dead,
            in_flight=one.in_flight,
            missing=one.missing,
            gaps=one.gaps,
            latency=one.latency,
            note=one.note,
            shed=one.shed,
        )
        for one in channels
        if one.kind is Kind.SOURCE
    ]
    found = hops(content, intakes)
    minutes = {channel: some[-HOUR:] for channel, some in content.minutes.items()}
    surplus = (
        Discrepancy("doubled", hop.stage, hop.surplus, f"{hop.stage}: {hop.note}") for hop in found if hop.surplus
    )
    made = Balance(
        at,
        content.as_of,
        channels,
        found,
        paths(found),
        minutes,
        (*surplus, *_jumped(channels), *tampering.discrepancies(content)),
        tuple(_unread(content)) or unique((*_of_ledger(content, sources), *without_account(content))),
    )
    return made.with_report(report) if report else made


def _jumped(channels: Iterable[ChannelBalance]) -> Iterator[Discrepancy]:
    for one in channels:
        if one.jumps:
            text = (
                f"{one.channel}: the numbers of {one.jumps[0].sender} jump from {one.jumps[0].before} to "
                f"{one.jumps[0].after}, beyond the limit of {LARGEST_JUMP:,}: what lies between was lost, or somebody "
                "made up a number; it is not counted as missing"
            )
            examples = tuple(map(str, one.jumps[:BRIEF]))
            yield Discrepancy("unexplained", f"channel:{one.channel}", len(one.jumps), text, examples)


def _unread(content: Content) -> Iterable[Doubt]:
    if content.as_of is None:
        yield Doubt("audit", "audit", "the auditor has read no channel yet")


def _of_ledger(content: Content, sources: Sequence[str]) -> Iterator[Doubt]:
    """A ledger that was made anew has not counted what its channels held no more by then."""
    gone = {channel: sum(content.since.get(channel, {}).values()) for channel in sources}
    if lost := [f"{count:,} of {channel}" for channel, count in gone.items() if count]:
        for copy in content.copies:
            text = (
                f"an earlier ledger could not be read, and this one counts from what the channels held then: offsets "
                f"that were removed before ({', '.join(lost)}) are not known. The earlier one is {copy}; to take the "
                "new one as the beginning, move that file away"
            )
            yield Doubt("ledger", copy, text)


def _worst(senders: Sequence[SenderBalance]) -> tuple[SenderBalance, ...]:
    return tuple(sorted(senders, key=lambda one: one.trouble, reverse=True)[:WORST])


_Claimed = Sequence[tuple[int, Micros]]
"""The numbers that were claimed to be the last, and when; in order."""
Claims = Mapping[tuple[str, int], _Claimed]
"""Per sender and epoch."""
Seen = Mapping[tuple[str, int], Sequence[Run]]
"""Per sender and epoch: the numbers that are there."""


def _channel(
    channel: str,
    kind: Kind,
    content: Content,
    claims: Claims,
    blinds: Sequence[OutageInterval],
    settled: Micros,
    unread: int,
) -> ChannelBalance:
    runs = _runs(channel, content)
    dead = _runs(f"{channel}.dead", content) if kind is Kind.SOURCE else {}
    shed = _runs(shed_from(channel), content) if kind is Kind.SOURCE else {}
    kept = {who: _melted([*runs.get(who, ()), *dead.get(who, ())]) for who in {*runs, *dead}}
    there = {who: _melted([*kept.get(who, ()), *shed.get(who, ())]) for who in {*kept, *shed}}
    due = list(_due(there, claims, settled)) if kind is Kind.SOURCE else []
    jumps = list(_jumps(there, claims, settled)) if kind is Kind.SOURCE else []
    gaps = tuple(gap for gap, missing in due if missing)
    distinct, missing, note = _size(there), sum(gap.size for gap in gaps), ""
    if content.channels[channel].compacted:
        jumps = [jump for jump in jumps if jump.size > _outdated(channel, content)]
    if content.channels[channel].compacted and (outdated := min(missing, _outdated(channel, content))):
        missing, gaps = missing - outdated, ()
        if missing:
            note = f"{outdated:,} more may have been outdated before they were read: which are missing cannot be told"
    # What is unread may be what is due: adding the two up would count it twice.
    in_flight = max(unread, sum(gap.size for gap, missing in due if not missing))
    numbered = {(sender, epoch): one for (name, sender, epoch), one in content.numbered.items() if name == channel}
    tally = content.counts.get(channel, ChannelCounts())
    nameless_dead = (
        content.counts.get(f"{channel}.dead", ChannelCounts()).without_identity if kind is Kind.SOURCE else 0
    )
    latencies = content.latencies.get(channel)
    return ChannelBalance(
        channel=channel,
        kind=kind,
        senders=len({sender for sender, _ in [*there, *claims]}),
        records=tally.records,
        distinct=distinct,
        duplicates=sum(_doubled(one, runs.get(who, ())) for who, one in numbered.items()),
        missing=missing,
        claimed=distinct + missing + in_flight,
        in_flight=in_flight,
        refused=_size(dead) + nameless_dead,
        unknown_seconds=_length(blinds) / 1_000_000,
        without_identity=tally.without_identity,
        gaps=gaps,
        latency=latencies.summary() if latencies else None,
        unread=unread,
        only_dead=_size(kept) - _size(runs),
        shed=_size(there) - _size(kept),
        by_sender=tuple(_senders(numbered, runs, there, claims, gaps)) if kind is Kind.SOURCE else (),
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
            distinct=_span(seen),
            duplicates=_doubled(one, runs.get(who, ())),
            missing=missing[who],
            reordered=one.disorder,
            newest=one.span.newest if one.span else None,
            latency=_latency(one.span) if one.span else None,
        )


def _outdated(channel: str, content: Content) -> int:
    """How many offsets of a channel held nothing: as many records may have been outdated before they were read."""
    since, until = content.since.get(channel, {}), content.until.get(channel, {})
    passed = sum(offset - since.get(partition, 0) for partition, offset in until.items())
    return max(0, passed - content.counts.get(channel, ChannelCounts()).records)


def _doubled(one: Numbered, runs: Sequence[Run]) -> int:
    """What was brought back from the dead letters is no second record."""
    return max(0, one.records - one.redriven - _span(runs))


def _latency(span: Span) -> dict[str, float]:
    mean = as_delay(span.total // span.count)
    return {"count": span.count, "min": as_delay(span.least), "mean": mean, "max": as_delay(span.most)}


def _runs(channel: str, content: Content) -> dict[tuple[str, int], Sequence[Run]]:
    return {(sender, epoch): runs for (name, sender, epoch), runs in content.runs.items() if name == channel}


def _size(seen: Seen) -> int:
    return sum(_span(runs) for runs in seen.values())


def _span(runs: Iterable[Run]) -> int:
    return sum(run.last - run.first + 1 for run in runs)


def _melted(runs: Iterable[Run]) -> list[Run]:
    """Runs that overlap or touch become one."""
    melted: list[Run] = []
    for run in sorted(runs, key=lambda run: run.first):
        if melted and run.first <= melted[-1].last + 1:
            before = melted[-1]
            melted[-1] = Run(before.first, max(before.last, run.last), min(before.noticed, run.noticed))
        else:
            melted.append(run)
    return melted


def _due(runs: Seen, claims: Claims, settled: Micros) -> Iterable[tuple[Gap, bool]]:
    """The ranges that are not there; True for those that should be by now. What a jump leaves out is not due."""
    for sender, epoch in sorted({*runs, *claims}):
        seen, claimed = runs.get((sender, epoch), ()), claims.get((sender, epoch), ())
        for before, after in pairwise(seen):
            if not _is_jump(before.last, after.first):
                yield Gap(sender, epoch, before.last + 1, after.first - 1), after.noticed <= settled
        for last in _ends(seen, claimed):
            near = [(seq, at) for seq, at in claimed if last < seq and not _is_jump(last, seq)]
            overdue = max([last, *(seq for seq, at in near if at <= settled)])
            newest = max([overdue, *(seq for seq, _ in near)])
            if overdue > last:
                yield Gap(sender, epoch, last + 1, overdue), True
            if newest > overdue:
                yield Gap(sender, epoch, overdue + 1, newest), False


def _jumps(runs: Seen, claims: Claims, settled: Micros) -> Iterator[Jump]:
    for sender, epoch in sorted({*runs, *claims}):
        seen, claimed = runs.get((sender, epoch), ()), claims.get((sender, epoch), ())
        for before, after in pairwise(seen):
            if _is_jump(before.last, after.first) and after.noticed <= settled:
                yield Jump(sender, epoch, before.last, after.first)
        ends = _ends(seen, claimed)
        for seq, at in claimed:
            before_it = max((last for last in ends if last < seq), default=None)
            inside = any(run.first <= seq <= run.last for run in seen)
            if before_it is not None and not inside and _is_jump(before_it, seq) and at <= settled:
                yield Jump(sender, epoch, before_it, seq)


def _is_jump(before: int, after: int) -> bool:
    return after - before - 1 > LARGEST_JUMP


def _ends(seen: Sequence[Run], claimed: _Claimed) -> list[int]:
    """The last number before each jump, and the last of all: behind each of them, a claim tells what is due.

    Of a sender that was never seen, only what came after its first claim is known to be due.
    """
    if not seen:
        return [claimed[0][0]] if claimed else []
    return [before.last for before, after in pairwise(seen) if _is_jump(before.last, after.first)] + [seen[-1].last]


def _claims_by_channel(content: Content, sources: Sequence[str]) -> dict[str, dict[tuple[str, int], _Claimed]]:
    found: dict[str, dict[tuple[str, int], _Claimed]] = {channel: {} for channel in sources}
    for (told, sender, epoch), claims in content.claims.items():
        for channel in _homes(told, sender, content.runs, sources):
            found[channel][sender, epoch] = claims
    return found


def _blinds_by_channel(content: Content, sources: Sequence[str]) -> dict[str, list[OutageInterval]]:
    found: dict[str, list[OutageInterval]] = {channel: [] for channel in sources}
    for told, blind in content.blinds:
        for channel in _homes(told, blind.source, content.runs, sources):
            found[channel].append(blind)
    return found


def _homes(told: str, name: str, runs: Iterable[Numbering], sources: Sequence[str]) -> Sequence[str]:
    """The channel that a sender or source fills: the one that it told, or where it was seen, or else the first."""
    if told in sources:
        return [told]
    seen = {channel for channel, sender, _ in runs if sender == name}
    return [channel for channel in sources if channel in seen] or sources[:1]


def _length(blinds: Sequence[OutageInterval]) -> Micros:
    """How long at least one of the sources was not heard."""
    total, until = 0, None
    for blind in sorted(blinds, key=lambda blind: blind.since):
        since = blind.since if until is None else max(blind.since, until)
        if blind.until > since:
            total += blind.until - since
            until = blind.until
    return total

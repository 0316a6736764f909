"""The balance of records: from what the ledger holds to what is there, what is missing, and what nobody can know.

For each source channel, claimed = distinct + missing + in flight. A record is there when it is in the channel or in its
dead letters. A sender is counted from the first number that was seen of it. No I/O.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from penstock.audit.findings import Kind, Numbering
from penstock.audit.ledger import SETTLES_AFTER, Content, Run, Tally
from penstock.clock import Micros
from penstock.errors import Unaccounted
from penstock.record import Blind

BRIEF = 100
"""So many gaps per channel are named in brief."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Numbers that are missing: first–last of a sender in one of its lives."""

    sender: str
    epoch: int
    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first + 1


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
    by_sender: tuple[SenderBalance, ...] = ()


@dataclass(frozen=True, slots=True)
class Balance:
    at: Micros
    as_of: Micros | None
    """Up to when the channels were read; None when they never were."""
    channels: tuple[ChannelBalance, ...]

    @property
    def whole(self) -> bool:
        """Nothing is missing. What is in flight may still come; what is unknown is not counted here."""
        return not any(channel.missing for channel in self.channels)

    @property
    def settled(self) -> bool:
        """Nothing is in flight: the verdict will not change unless more is sent."""
        return not any(channel.in_flight for channel in self.channels)

    @property
    def unknown_seconds(self) -> float:
        return sum(channel.unknown_seconds for channel in self.channels)

    def to_json(self, brief: bool = False) -> dict[str, Any]:
        """Everything; in brief without the senders, and with the first gaps of each channel and the number of all."""
        shown = self
        if brief:
            shown = replace(
                self,
                channels=tuple(replace(one, gaps=one.gaps[:BRIEF], by_sender=()) for one in self.channels),
            )
        told = {"whole": self.whole, **asdict(shown)}
        for channel, one in zip(told["channels"], self.channels, strict=True):
            channel["gap_count"] = len(one.gaps)
            if brief or one.kind is not Kind.SOURCE:
                del channel["by_sender"]
        return told

    def dumps(self) -> str:
        return json.dumps(self.to_json(), ensure_ascii=False)

    def require_whole(self) -> None:
        """Raise Unaccounted for the first channel that misses records."""
        for channel in self.channels:
            if channel.missing:
                ranges = tuple((gap.sender, gap.epoch, gap.first, gap.last) for gap in channel.gaps)
                raise Unaccounted(channel.channel, ranges)


def balance(
    content: Content, at: Micros, grace: Micros = SETTLES_AFTER, unread: Mapping[str, int] = MappingProxyType({})
) -> Balance:
    """The balance at a moment. What is due for less than `grace` is in flight, afterwards it is missing.

    `unread` are entries per channel that the ledger does not know yet: they are in flight, too.
    """
    sources = [channel for channel, kind in content.channels.items() if kind is Kind.SOURCE]
    claims = _claims_by_channel(content, sources)
    blinds = _blinds_by_channel(content, sources)
    return Balance(
        at,
        content.as_of,
        tuple(
            _channel(
                channel,
                kind,
                content,
                claims.get(channel, {}),
                blinds.get(channel, ()),
                at - grace,
                unread.get(channel, 0),
            )
            for channel, kind in sorted(content.channels.items(), key=lambda item: (list(Kind).index(item[1]), item[0]))
        ),
    )


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
    blinds: Sequence[Blind],
    settled: Micros,
    unread: int,
) -> ChannelBalance:
    runs = _runs(channel, content)
    dead = _runs(f"{channel}.dead", content) if kind is Kind.SOURCE else {}
    there = {who: _melted([*runs.get(who, ()), *dead.get(who, ())]) for who in {*runs, *dead}}
    due = list(_due(there, claims, settled)) if kind is Kind.SOURCE else []
    gaps = tuple(gap for gap, missing in due if missing)
    distinct, missing = _size(there), sum(gap.size for gap in gaps)
    # What is unread may be what is due: adding the two up would count it twice.
    in_flight = max(unread, sum(gap.size for gap, missing in due if not missing))
    numbered = {(sender, epoch): n for (name, sender, epoch), n in content.numbered.items() if name == channel}
    tally = content.tallies.get(channel, Tally())
    nameless_dead = content.tallies.get(f"{channel}.dead", Tally()).without_identity if kind is Kind.SOURCE else 0
    latencies = content.latencies.get(channel)
    return ChannelBalance(
        channel=channel,
        kind=kind,
        senders=len({sender for sender, _ in [*there, *claims]}),
        records=tally.records,
        distinct=distinct,
        duplicates=sum(numbered.values()) - _size(runs),
        missing=missing,
        claimed=distinct + missing + in_flight,
        in_flight=in_flight,
        refused=_size(dead) + nameless_dead,
        unknown_seconds=_length(blinds) / 1_000_000,
        without_identity=tally.without_identity,
        gaps=gaps,
        latency=latencies.summary() if latencies else None,
        unread=unread,
        by_sender=tuple(_senders(numbered, runs, there, claims, gaps)) if kind is Kind.SOURCE else (),
    )


def _senders(
    numbered: Mapping[tuple[str, int], int], runs: Seen, there: Seen, claims: Claims, gaps: Iterable[Gap]
) -> Iterable[SenderBalance]:
    missing = Counter[tuple[str, int]]()
    for gap in gaps:
        missing[gap.sender, gap.epoch] += gap.size
    for who in sorted({*there, *claims}):
        seen, records = there.get(who, ()), numbered.get(who, 0)
        yield SenderBalance(
            *who,
            first=seen[0].first if seen else None,
            last=seen[-1].last if seen else None,
            records=records,
            distinct=_span(seen),
            duplicates=records - _span(runs.get(who, ())),
            missing=missing[who],
        )


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
    """The ranges that are not there; True for those that should be by now."""
    for sender, epoch in sorted({*runs, *claims}):
        seen, claimed = runs.get((sender, epoch), ()), claims.get((sender, epoch), ())
        for before, after in pairwise(seen):
            yield Gap(sender, epoch, before.last + 1, after.first - 1), after.noticed <= settled
        if not claimed:
            continue
        # Of a sender that was never seen, only what came after its first word is known to be due.
        last = seen[-1].last if seen else claimed[0][0]
        overdue = max([last, *(seq for seq, at in claimed if at <= settled)])
        newest = max(overdue, claimed[-1][0])
        if overdue > last:
            yield Gap(sender, epoch, last + 1, overdue), True
        if newest > overdue:
            yield Gap(sender, epoch, overdue + 1, newest), False


def _claims_by_channel(content: Content, sources: Sequence[str]) -> dict[str, dict[tuple[str, int], _Claimed]]:
    found: dict[str, dict[tuple[str, int], _Claimed]] = {channel: {} for channel in sources}
    for (told, sender, epoch), claims in content.claims.items():
        for channel in _homes(told, sender, content.runs, sources):
            found[channel][sender, epoch] = claims
    return found


def _blinds_by_channel(content: Content, sources: Sequence[str]) -> dict[str, list[Blind]]:
    found: dict[str, list[Blind]] = {channel: [] for channel in sources}
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


def _length(blinds: Sequence[Blind]) -> Micros:
    """How long at least one of the sources was not heard."""
    total, until = 0, None
    for blind in sorted(blinds, key=lambda blind: blind.since):
        since = blind.since if until is None else max(blind.since, until)
        if blind.until > since:
            total += blind.until - since
            until = blind.until
    return total

"""Dead letters: refused and late records; reads, selects and redrives them.

A dead letter is a copy of the record, with the header `reason` and, from Spark, the header `place` (its channel,
partition and offset); of a late record also the header `query`, the query that it was late for.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice

from penstock.audit.findings import EXCLUDED, LATE_PREFIX
from penstock.core.clock import Micros
from penstock.core.contracts import Channels, Entry, Offsets, Sender
from penstock.core.errors import Misconfigured, Refused, Unavailable
from penstock.core.record import Headers, Origin, Record
from penstock.core.scan import Bounds, scan

DEAD = ".dead"


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter, and the content of its headers."""

    entry: Entry
    reason: str
    location: str | None
    """The position of the record when it was refused; None if it never reached its channel."""
    origin: Origin | None
    came_back: bool
    """It was redriven, and refused again."""
    size: int
    """The size of the record in bytes; the letter may hold only its beginning."""
    late_for: str | None = None
    """The query that it was late for; its channel has not refused it."""
    excluded_by: str | None = None
    """The query that fails with it and excludes it; its channel has not refused it."""

    @classmethod
    def of(cls, entry: Entry) -> "Letter":
        fields = {name: value.decode(errors="backslashreplace") for name, value in entry.headers}
        reason, location = fields.get("reason", "no reason"), fields.get("place")
        kept = len(entry.value or b"")
        # The collector keeps the beginning of a record that is too large, and adds its size. In a letter of Spark, a
        # header of that name is from the record.
        size = fields.get("size", "") if location is None else ""
        whole = int(size) if size.isascii() and size.isdigit() and len(size) < 20 else kept
        late_for = fields.get("query") if reason.startswith(LATE_PREFIX) else None
        origin = Origin.read(entry.headers)
        excluded_by = fields.get("query") if reason.startswith(EXCLUDED) else None
        return cls(entry, reason, location, origin, "redriven" in fields, max(whole, kept), late_for, excluded_by)

    @property
    def value(self) -> bytes | None:
        return self.entry.value

    @property
    def at(self) -> str:
        """The position of the letter itself, as channel:partition:offset."""
        return f"{self.entry.channel}:{self.entry.partition}:{self.entry.offset}"

    @property
    def cut(self) -> bool:
        """Whether only the beginning of the record was kept."""
        return self.size > len(self.value or b"")

    @property
    def headers(self) -> Headers:
        """The headers of the record before it was refused."""
        found, added = list(self.entry.headers), ["reason", "place" if self.location is not None else "size"]
        added += ["query"] if self.late_for is not None else []
        added += ["query", "error"] if self.excluded_by is not None else []
        for name in added:
            # The last of that name: the record can have had such a header.
            last = max((at for at, (header, _) in enumerate(found) if header == name), default=None)
            if last is not None:
                del found[last]
        return found

    def to_json(self) -> dict[str, object]:
        """Return all but the value."""
        origin = self.origin
        return {
            "channel": self.entry.channel,
            "partition": self.entry.partition,
            "offset": self.entry.offset,
            "place": self.location,
            "reason": self.reason,
            "refused": self.entry.appended,
            "sender": origin and origin.sender,
            "epoch": origin and origin.epoch,
            "seq": origin and origin.seq,
            "time": origin and origin.time,
            "size": self.size,
            "cut": self.cut,
            "came_back": self.came_back,
            "late_for": self.late_for,
            "excluded_by": self.excluded_by,
        }


@dataclass(frozen=True)
class Selection:
    """A selection of letters: those that meet all given conditions."""

    reason: str = ""
    sender: str | None = None
    since: Micros | None = None
    locations: frozenset[str] = frozenset()
    """Positions of the letters, or of their records; as channel:partition:offset."""

    def takes(self, letter: Letter) -> bool:
        return (
            self.reason.casefold() in letter.reason.casefold()
            and (self.sender is None or (letter.origin is not None and letter.origin.sender == self.sender))
            and (self.since is None or letter.entry.appended >= self.since)
            and (not self.locations or letter.at in self.locations or letter.location in self.locations)
        )


@dataclass
class ReasonCount:
    """How many letters of a channel have one reason, and when the first and the last of them were refused."""

    reason: str
    first: Micros
    last: Micros
    count: int = 0
    came_back: int = 0


def dead_letters(channels: Channels, channel: str, selection: Selection | None = None) -> Iterator[Letter]:
    """Yield the letters of a channel, in their order within each partition."""
    selection = selection or Selection()
    return (letter for letter in map(Letter.of, scan(channels, channel)) if selection.takes(letter))


def count_reasons(found: Iterable[Letter]) -> list[ReasonCount]:
    """Count letters per reason, the most frequent first."""
    rows: dict[str, ReasonCount] = {}
    for letter in found:
        at = letter.entry.appended
        row = rows.setdefault(letter.reason, ReasonCount(letter.reason, at, at))
        row.first, row.last = min(row.first, at), max(row.last, at)
        row.count += 1
        row.came_back += letter.came_back
    return sorted(rows.values(), key=lambda row: (-row.count, row.reason))


def letter_at(channels: Channels, channel: str, position: str) -> Letter:
    """Return the letter at a position, its own or that of its record; raise Misconfigured if there is none."""
    start: Offsets = {}
    if position.startswith(f"{channel}:"):
        _, partition, offset = position.rsplit(":", 2)
        ends = {number: end for number, (_, end) in channels.bounds(channel).items()}
        start = {**ends, int(partition): int(offset)}
    for letter in map(Letter.of, scan(channels, channel, start)):
        if position in (letter.at, letter.location):
            return letter
    raise absent(channels, channel, position)


def absent(channels: Channels, channel: str, position: str) -> Misconfigured:
    """Return the error that there is no letter at a position; its fix names the existing ones."""
    kept = [
        f"{partition}:{low} to {partition}:{end - 1}"
        for partition, (low, end) in sorted(channels.bounds(channel).items())
        if low < end
    ]
    fix = f"it holds {' and '.join(kept)}" if kept else "it holds none"
    return Misconfigured(
        f"channel {channel}", f"there is no dead letter at {position.removeprefix(f'{channel}:')}", fix
    )


_SKEW = 3_600_000_000
"""Tolerated difference between the clocks of the writers of channels."""
_SENT_AT_ONCE = 100

Identity = tuple[str, int, int] | str


class Verdict(StrEnum):
    """The outcome of redriving a letter."""

    SENT = "sent"
    BEFORE = "redriven before"
    BACK = "came back"
    LATE = "late"
    EXCLUDED = "excluded"
    CUT = "cut"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    letter: str
    """Its position."""
    origin: Origin | None
    verdict: Verdict
    why: str = ""


def redrive(
    channels: Channels,
    channel: str,
    selection: Selection,
    into: str,
    dry: bool = False,
    since: Callable[[str, Micros], Offsets] | None = None,
) -> list[Outcome]:
    """Send the records of the selected letters into a channel, in their order; return the outcome of each.

    A record that was redriven before is not sent again, nor one that was refused again: a second call has no effect. A
    record that was late for a query is in its channel: it is sent only into other channels. `since` returns the offsets
    of a channel at a time; without it, all of the channel is read. With `dry` nothing is sent, and the outcomes are
    those of a real run.
    """
    bounds = channels.bounds(channel)
    earliest, nameless = _survey(channels, channel, selection, bounds)
    if earliest is None:
        return []
    start = since(into, earliest - _SKEW) if since and earliest > _SKEW else {}
    redriven = (entry for entry in scan(channels, into, start) if any(name == "redriven" for name, _ in entry.headers))
    there = {_identity(Origin.read(entry.headers), _last(entry.headers, "from")) for entry in redriven}
    wanted = filter(selection.takes, map(Letter.of, scan(channels, channel, bounds=bounds)))
    same = channel.removesuffix(DEAD) == into
    named = ((letter, nameless.get(_print(letter), letter.at)) for letter in wanted)
    judged = (
        (letter, name, Outcome(letter.at, letter.origin, *_judge(letter, name, there, same))) for letter, name in named
    )
    if dry:
        return [outcome for _, _, outcome in judged]
    return asyncio.run(_drive(channels, into, judged))


def _survey(
    channels: Channels, channel: str, selection: Selection, bounds: Bounds
) -> tuple[Micros | None, dict[int, str]]:
    """Return when the first of the selected records was first refused, and the names of all without an origin.

    A name is the position of the first letter: Spark can write a letter twice after a crash.
    """
    earliest: Micros | None = None
    refused: dict[int, Micros] = {}
    nameless: dict[int, str] = {}
    unseen = set(selection.locations)
    for letter in map(Letter.of, scan(channels, channel, bounds=bounds)):
        first = refused.setdefault(_print(letter), letter.entry.appended)
        if letter.origin is None:
            nameless.setdefault(_print(letter), letter.at)
        if selection.takes(letter):
            first = min(first, letter.entry.appended)
            earliest = first if earliest is None else min(first, earliest)
        unseen -= {letter.at, letter.location}
    if unseen:
        raise absent(channels, channel, min(unseen))
    return earliest, nameless


def _print(letter: Letter) -> int:
    """Return a hash that is the same for all letters of a record."""
    if letter.origin is not None:
        return hash(_identity(letter.origin, ""))
    # With the content: in a channel that was created again, the offsets start again.
    return hash((letter.location or letter.at, letter.entry.key, letter.entry.value))


def _identity(origin: Origin | None, position: str) -> Identity:
    return (origin.sender, origin.epoch, origin.seq) if origin else position


def _judge(letter: Letter, name: str, there: set[Identity], same: bool) -> tuple[Verdict, str]:
    if same and letter.late_for is not None:
        # Other queries have counted it already, and for this query it would be late again.
        why = f"it is in its channel, and was late for query {letter.late_for}; send it --into another channel"
        return Verdict.LATE, why
    if same and letter.excluded_by is not None:
        why = f"it is in its channel, and query {letter.excluded_by} fails with it; send it --into another channel"
        return Verdict.EXCLUDED, why
    if letter.came_back:
        return Verdict.BACK, f"it was redriven and refused again: {letter.reason}"
    identity = _identity(letter.origin, name)
    if identity in there:
        return Verdict.BEFORE, "it was redriven before"
    if letter.cut:
        return Verdict.CUT, f"only {len(letter.value or b''):,} of its {letter.size:,} bytes were kept"
    there.add(identity)
    return Verdict.SENT, ""


async def _drive(channels: Channels, into: str, judged: Iterable[tuple[Letter, str, Outcome]]) -> list[Outcome]:
    """Send the letters. Reading blocks the event loop, which runs nothing else."""
    outcomes: list[Outcome] = []
    rest = iter(judged)
    async with channels.sender() as sender:
        while some := list(islice(rest, _SENT_AT_ONCE)):
            # Concurrently, because each has its own outcome; the sender keeps the order of the calls.
            outcomes += await asyncio.gather(*(_send(sender, into, *one) for one in some))
    return outcomes


async def _send(sender: Sender, into: str, letter: Letter, name: str, outcome: Outcome) -> Outcome:
    if outcome.verdict is Verdict.SENT:
        marks = (("redriven", b"1"), ("from", name.encode()))
        # The original headers contain the origin.
        record = Record(letter.value, key=letter.entry.key, extra=(*letter.headers, *marks))
        try:
            await sender.send(into, [record])
        except (Unavailable, Refused) as error:
            return replace(outcome, verdict=Verdict.FAILED, why=error.reason)
    return outcome


def _last(headers: Headers, name: str) -> str:
    return next((value.decode(errors="backslashreplace") for header, value in reversed(headers) if header == name), "")

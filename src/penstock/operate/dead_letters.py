"""Dead letters: what a channel refused, or what came too late; to read them, and to choose among them.

A letter is the record as it came, with headers that tell the `reason` and, from Spark, the `place` that it had; of one
that came too late, also the `query` that it came too late for.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
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
    """A dead letter, and what its headers tell."""

    entry: Entry
    reason: str
    place: str | None
    """Where the record lay when it was refused; None when it never came into its channel."""
    origin: Origin | None
    came_back: bool
    """It was redriven once, and refused again."""
    size: int
    """The bytes of the record, which may be more than were kept."""
    late_for: str | None = None
    """The query that it came too late for; its channel has not refused it."""
    excluded_by: str | None = None
    """The query that fails with it, and leaves it out; its channel has not refused it."""

    @classmethod
    def of(cls, entry: Entry) -> "Letter":
        told = {name: value.decode(errors="backslashreplace") for name, value in entry.headers}
        reason, place = told.get("reason", "no reason is told"), told.get("place")
        kept = len(entry.value or b"")
        # The collector keeps the beginning of what is too large, and tells the size. In another's letter, a header of
        # that name is the record's own.
        size = told.get("size", "") if place is None else ""
        whole = int(size) if size.isascii() and size.isdigit() and len(size) < 20 else kept
        late_for = told.get("query") if reason.startswith(LATE_PREFIX) else None
        origin = Origin.read(entry.headers)
        excluded_by = told.get("query") if reason.startswith(EXCLUDED) else None
        return cls(entry, reason, place, origin, "redriven" in told, max(whole, kept), late_for, excluded_by)

    @property
    def value(self) -> bytes | None:
        return self.entry.value

    @property
    def at(self) -> str:
        """Where the letter itself lies, as channel:partition:offset."""
        return f"{self.entry.channel}:{self.entry.partition}:{self.entry.offset}"

    @property
    def cut(self) -> bool:
        """Whether only a part of the record was kept."""
        return self.size > len(self.value or b"")

    @property
    def headers(self) -> Headers:
        """Those that the record had before it was refused."""
        found, added = list(self.entry.headers), ["reason", "place" if self.place is not None else "size"]
        added += ["query"] if self.late_for is not None else []
        added += ["query", "error"] if self.excluded_by is not None else []
        for name in added:
            # The last of that name: a record may have had such a header before.
            last = max((at for at, (known, _) in enumerate(found) if known == name), default=None)
            if last is not None:
                del found[last]
        return found

    @property
    def told(self) -> dict[str, object]:
        """All but the value, for JSON."""
        origin = self.origin
        return {
            "channel": self.entry.channel,
            "partition": self.entry.partition,
            "offset": self.entry.offset,
            "place": self.place,
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
    """Which letters are meant: those for which all that is given holds."""

    reason: str = ""
    sender: str | None = None
    since: Micros | None = None
    places: frozenset[str] = frozenset()
    """Of the letters, or of the records when they were refused; as channel:partition:offset."""

    def takes(self, letter: Letter) -> bool:
        return (
            self.reason.casefold() in letter.reason.casefold()
            and (self.sender is None or (letter.origin is not None and letter.origin.sender == self.sender))
            and (self.since is None or letter.entry.appended >= self.since)
            and (not self.places or letter.at in self.places or letter.place in self.places)
        )


@dataclass
class Tally:
    """How many letters of a channel have one reason, and when the first and the last of them were refused."""

    reason: str
    first: Micros
    last: Micros
    count: int = 0
    came_back: int = 0


def letters(channels: Channels, channel: str, chosen: Selection | None = None) -> Iterator[Letter]:
    """The letters that a channel holds now, in their order within each partition."""
    chosen = chosen or Selection()
    return (letter for letter in map(Letter.of, scan(channels, channel)) if chosen.takes(letter))


def tallied(found: Iterable[Letter]) -> list[Tally]:
    """Per reason, the most frequent first."""
    tallies: dict[str, Tally] = {}
    for letter in found:
        at = letter.entry.appended
        tally = tallies.setdefault(letter.reason, Tally(letter.reason, at, at))
        tally.first, tally.last = min(tally.first, at), max(tally.last, at)
        tally.count += 1
        tally.came_back += letter.came_back
    return sorted(tallies.values(), key=lambda tally: (-tally.count, tally.reason))


def letter_at(channels: Channels, channel: str, place: str) -> Letter:
    """The letter at a place, its own or that of its record; Misconfigured when there is none."""
    start: Offsets = {}
    if place.startswith(f"{channel}:"):
        _, partition, offset = place.rsplit(":", 2)
        ends = {number: end for number, (_, end) in channels.bounds(channel).items()}
        start = {**ends, int(partition): int(offset)}
    for letter in map(Letter.of, scan(channels, channel, start)):
        if place in (letter.at, letter.place):
            return letter
    raise absent(channels, channel, place)


def absent(channels: Channels, channel: str, place: str) -> Misconfigured:
    """That there is no letter at a place, and where there are some."""
    kept = [
        f"{partition}:{low} to {partition}:{end - 1}"
        for partition, (low, end) in sorted(channels.bounds(channel).items())
        if low < end
    ]
    fix = f"it holds {' and '.join(kept)}" if kept else "it holds none"
    return Misconfigured(f"channel {channel}", f"there is no dead letter at {place.removeprefix(f'{channel}:')}", fix)


_SKEW = 3_600_000_000
"""How far the clocks of those who write into channels may be apart."""
_SENT_AT_ONCE = 100

Identity = tuple[str, int, int] | str


class Verdict(StrEnum):
    """What became of a letter that was to be redriven."""

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
    """Its place."""
    origin: Origin | None
    verdict: Verdict
    why: str = ""


def redrive(
    channels: Channels,
    channel: str,
    chosen: Selection,
    into: str,
    dry: bool = False,
    since: Callable[[str, Micros], Offsets] | None = None,
) -> list[Outcome]:
    """Send the records of the chosen letters into a channel, in their order; what became of each.

    One that lies there redriven already is not sent again, nor one that came back. So calling this twice is as calling
    it once. One that came too late for a query lies in its channel: it is sent into others only. `since` tells from
    where on a channel has to be read for what came after a moment; without it, all of it is read. With `dry` nothing is
    sent, and the outcomes are those that would be.
    """
    bounds = channels.bounds(channel)
    survey = _survey(channels, channel, chosen, bounds)
    if survey.earliest is None:
        return []
    start = since(into, survey.earliest - _SKEW) if since and survey.earliest > _SKEW else {}
    redriven = (entry for entry in scan(channels, into, start) if any(name == "redriven" for name, _ in entry.headers))
    there = {_identity(Origin.read(entry.headers), _last(entry.headers, "from")) for entry in redriven}
    wanted = filter(chosen.takes, map(Letter.of, scan(channels, channel, bounds=bounds)))
    home = channel.removesuffix(DEAD) == into
    judged = ((letter, survey.name(letter), _judge(letter, survey.name(letter), there, home)) for letter in wanted)
    if dry:
        return [_outcome(letter, *verdict) for letter, _, verdict in judged]
    return asyncio.run(_drive(channels, into, judged))


@dataclass
class _Survey:
    """What has to be known of all letters before the first is sent. Spark may write one twice after a crash."""

    earliest: Micros | None = None
    """When the first of the chosen was refused for the first time."""
    _refused: dict[int, Micros] = field(default_factory=dict)
    _nameless: dict[int, str] = field(default_factory=dict)

    def add(self, letter: Letter, chosen: bool) -> None:
        known, refused = _print(letter), letter.entry.appended
        first = self._refused.setdefault(known, refused)
        if letter.origin is None:
            self._nameless.setdefault(known, letter.at)
        if chosen:
            self.earliest = min(first, refused, first if self.earliest is None else self.earliest)

    def name(self, letter: Letter) -> str:
        """The place by which a record without identity is known: that of its first letter."""
        return letter.at if letter.origin is not None else self._nameless.get(_print(letter), letter.at)


def _survey(channels: Channels, channel: str, chosen: Selection, bounds: Bounds) -> _Survey:
    survey, unseen = _Survey(), set(chosen.places)
    for letter in map(Letter.of, scan(channels, channel, bounds=bounds)):
        survey.add(letter, chosen.takes(letter))
        unseen -= {letter.at, letter.place}
    if unseen:
        raise absent(channels, channel, min(unseen))
    return survey


def _print(letter: Letter) -> int:
    """The same for all letters of a record. It takes less room than what it stands for."""
    if letter.origin is not None:
        return hash(_identity(letter.origin, ""))
    # With the content: a channel that was made anew counts its places anew.
    return hash((letter.place or letter.at, letter.entry.key, letter.entry.value))


def _identity(origin: Origin | None, place: str) -> Identity:
    return (origin.sender, origin.epoch, origin.seq) if origin else place


def _judge(letter: Letter, name: str, there: set[Identity], home: bool) -> tuple[Verdict, str]:
    if home and letter.late_for is not None:
        # Other queries have counted it where it lies, and the one that has not would find it late again.
        why = f"it lies in its channel, and came too late for query {letter.late_for}; send it --into another channel"
        return Verdict.LATE, why
    if home and letter.excluded_by is not None:
        why = f"it lies in its channel, and query {letter.excluded_by} fails with it; send it --into another channel"
        return Verdict.EXCLUDED, why
    if letter.came_back:
        return Verdict.BACK, f"it was redriven once and refused again: {letter.reason}"
    identity = _identity(letter.origin, name)
    if identity in there:
        return Verdict.BEFORE, "it was redriven before"
    if letter.cut:
        return Verdict.CUT, f"only {len(letter.value or b''):,} of its {letter.size:,} bytes were kept"
    there.add(identity)
    return Verdict.SENT, ""


def _outcome(letter: Letter, verdict: Verdict, why: str) -> Outcome:
    return Outcome(letter.at, letter.origin, verdict, why)


async def _drive(
    channels: Channels, into: str, judged: Iterable[tuple[Letter, str, tuple[Verdict, str]]]
) -> list[Outcome]:
    """It blocks while it reads: nobody shares its loop."""
    outcomes: list[Outcome] = []
    rest = iter(judged)
    async with channels.sender() as sender:
        while some := list(islice(rest, _SENT_AT_ONCE)):
            # Side by side, for each has an outcome of its own; the sender keeps the order of the calls.
            outcomes += await asyncio.gather(*(_send(sender, into, *one) for one in some))
    return outcomes


async def _send(sender: Sender, into: str, letter: Letter, name: str, verdict: tuple[Verdict, str]) -> Outcome:
    if verdict[0] is Verdict.SENT:
        marks = (("redriven", b"1"), ("from", name.encode()))
        # The headers as they came hold the origin, too.
        record = Record(letter.value, key=letter.entry.key, extra=(*letter.headers, *marks))
        try:
            await sender.send(into, [record])
        except Unavailable as error:
            verdict = Verdict.FAILED, error.reason
        except Refused as error:
            verdict = Verdict.FAILED, error.reason
    return _outcome(letter, *verdict)


def _last(headers: Headers, name: str) -> str:
    return next((value.decode(errors="backslashreplace") for known, value in reversed(headers) if known == name), "")

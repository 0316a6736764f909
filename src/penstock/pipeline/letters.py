"""Dead letters: what a channel refused, or what came too late; to read them, and to choose among them.

A letter is the record as it came, with headers that tell the `reason` and, from Spark, the `place` that it had; of one
that came too late, also the `query` that it came too late for.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from penstock.audit.findings import BELATED, EXCLUDED
from penstock.core.clock import Micros
from penstock.core.contracts import Channels, Entry, Positions
from penstock.core.errors import Misconfigured
from penstock.core.held import held
from penstock.core.record import Headers, Origin

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
        late_for = told.get("query") if reason.startswith(BELATED) else None
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
    return (letter for letter in map(Letter.of, held(channels, channel)) if chosen.takes(letter))


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
    start: Positions = {}
    if place.startswith(f"{channel}:"):
        _, partition, offset = place.rsplit(":", 2)
        ends = {number: end for number, (_, end) in channels.bounds(channel).items()}
        start = {**ends, int(partition): int(offset)}
    for letter in map(Letter.of, held(channels, channel, start)):
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
    way_out = f"it holds {' and '.join(kept)}" if kept else "it holds none"
    return Misconfigured(
        f"channel {channel}", f"there is no dead letter at {place.removeprefix(f'{channel}:')}", way_out
    )

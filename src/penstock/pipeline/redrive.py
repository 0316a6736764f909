"""Dead letters that are sent into their channel once more, and never round in a circle.

A redriven record keeps its identity and carries two headers more: `redriven`, by which it is known should it be refused
again, and `from`, the place of its letter, by which one without identity is known.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

from penstock.core.clock import Micros
from penstock.core.contracts import Channels, Positions, Sender
from penstock.core.errors import Refused, Unavailable
from penstock.core.held import Bounds, held
from penstock.core.record import Headers, Origin, Record
from penstock.pipeline.letters import DEAD, Letter, Selection, absent

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
    since: Callable[[str, Micros], Positions] | None = None,
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
    redriven = (entry for entry in held(channels, into, start) if any(name == "redriven" for name, _ in entry.headers))
    there = {_identity(Origin.read(entry.headers), _last(entry.headers, "from")) for entry in redriven}
    wanted = filter(chosen.takes, map(Letter.of, held(channels, channel, bounds=bounds)))
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
    for letter in map(Letter.of, held(channels, channel, bounds=bounds)):
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
            verdict = Verdict.FAILED, error.why
        except Refused as error:
            verdict = Verdict.FAILED, error.reason
    return _outcome(letter, *verdict)


def _last(headers: Headers, name: str) -> str:
    return next((value.decode(errors="backslashreplace") for known, value in reversed(headers) if known == name), "")

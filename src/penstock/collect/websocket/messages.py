"""What a message of a feed is: a record with its number or its place, a heartbeat, the end, or nothing. No I/O."""

from collections.abc import Callable, Sequence

import orjson

from penstock.core.contracts import Arrival
from penstock.core.record import LONGEST_SENDER, Heartbeat, Origin

LARGEST = 1 << 63
LONGEST_PLACE = 1_000
"""So many characters may the text have by which a message tells its place."""
EXACT = 1 << 53
"""Beyond it, a number with a fraction may stand for its neighbours, too."""

Read = Callable[[bytes], Sequence[Arrival | Heartbeat]]


class _End(tuple[Arrival | Heartbeat, ...]):
    """The feed's word that nothing follows."""


END = _End()


def read(message: bytes, numbered: str | None) -> Sequence[Arrival | Heartbeat]:
    """What a message is: an arrival, with its origin if that can be read; some heartbeats; or END. It never raises."""
    if numbered is None:
        return (Arrival(message),)
    return _numbered(message, _loaded(message), numbered)


class Reading:
    """As `read`, for a feed whose messages tell their places, or of which not all are records. It never raises."""

    def __init__(
        self, numbered: str | None, cursor: str | None, after: str | None, only: Sequence[str], ignore: Sequence[str]
    ) -> None:
        self._numbered = numbered
        self._places = None if cursor is None else MessageCursors(cursor, after)
        self._only, self._ignore = ([_condition(one) for one in some] for some in (only, ignore))

    def __call__(self, message: bytes) -> Sequence[Arrival | Heartbeat]:
        document = _loaded(message)
        said: Sequence[Arrival | Heartbeat] = (Arrival(message),)
        if self._numbered is not None:
            said = _numbered(message, document, self._numbered)
        # What cannot be read may be a record: it is never passed over.
        if isinstance(document, dict) and not self._wanted(document) and said and isinstance(said[0], Arrival):
            return ()
        return said if self._places is None else (Arrival(message, cursor=self._places.cursor(document)),)

    def _wanted(self, document: object) -> bool:
        if self._only and not any(_told(document, steps) == value for steps, value in self._only):
            return False
        return not any(_told(document, steps) == value for steps, value in self._ignore)


class MessageCursors:
    """Makes cursors: the place that a message tells, and which of those it is that tell the same in a row.

    `1725911162329308/0`, `…/1`. A message that tells none is found behind the one before it: `…/1+1`.
    """

    def __init__(self, path: str, after: str | None) -> None:
        self._steps = path.split(".")
        # The feed begins with the first message of the place, or even before it.
        self._place, self._index, self._beside = place_of(after), -1, 0

    def cursor(self, document: object) -> str:
        place = _told(document, self._steps)
        if not place or len(place) > LONGEST_PLACE:
            self._beside += 1
            return f"{self._place}/{self._index}+{self._beside}"
        self._index = self._index + 1 if place == self._place else 0
        self._place, self._beside = place, 0
        return f"{place}/{self._index}"


def place_of(cursor: str | None) -> str:
    """What the feed is told to go on at; empty where there is nothing to tell."""
    return (cursor or "").rpartition("/")[0]


def _condition(text: str) -> tuple[list[str], str]:
    path, _, value = text.partition("=")
    return path.strip().split("."), value.strip()


def _loaded(message: bytes) -> object:
    try:
        return orjson.loads(message)
    except orjson.JSONDecodeError:
        return None


def _told(document: object, steps: Sequence[str]) -> str | None:
    """The text, number or boolean at a path, as text; None for all else, and for numbers that are not exact."""
    for step in steps:
        if not isinstance(document, dict):
            return None
        document = document.get(step)
    if isinstance(document, str):
        return document
    if isinstance(document, float) and not -EXACT < document < EXACT:
        return None
    return orjson.dumps(document).decode() if isinstance(document, int | float) else None


def _numbered(message: bytes, document: object, numbered: str) -> Sequence[Arrival | Heartbeat]:
    if not isinstance(document, dict):
        return (Arrival(message),)
    if (said := document.get(numbered)) is not None:
        place = _place(said)
        return (Arrival(message, Origin(*place) if place else None),)
    if len(document) > 1:
        return (Arrival(message),)
    if document.get("end") is True:
        return END
    beats = document.get("heartbeats", [document.get("heartbeat")])
    if isinstance(beats, list):
        places = [_place(beat) for beat in beats]
        if places and None not in places:
            return tuple(Heartbeat(*place) for place in places if place)
    return (Arrival(message),)


def _place(said: object) -> tuple[str, int, int, int] | None:
    """Sender, epoch, number and time, if they are sane: the name printable, the numbers neither negative nor absurd."""
    match said:
        case {"sender": str(sender), "epoch": int(epoch), "seq": int(seq), "time": int(time)}:
            numbers = (epoch, seq, time)
            if any(isinstance(number, bool) or not 0 <= number < LARGEST for number in numbers):
                return None
            if 0 < len(sender) <= LONGEST_SENDER and sender.isprintable():
                return sender, epoch, seq, time
    return None

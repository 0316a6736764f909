"""A record and its identity: the words that all tiers share.

The identity travels in the headers of a channel, as text that Kafka's own tools can show:
`sender`, `epoch` (the sender's incarnation), `seq` (contiguous within the epoch), `time` (microseconds, at the sender).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

from penstock.core.clock import Micros
from penstock.core.errors import Refused

Headers = Sequence[tuple[str, bytes]]

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def light_dataclass(cls: type[T]) -> type[T]:
    """A dataclass that nobody changes: whoever checks types is told. To enforce it takes a microsecond for each record.

    That is too much where several are made of each.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)


LONGEST_SENDER = 200
"""So many characters may the name of a sender have."""
LARGEST_JUMP = 1_000_000
"""Numbers of a sender that are further apart than this are no gap: they are not counted as missing records one by one.
Anybody can write down a number such as 2^62."""
GENERATIONS = 2**44
"""A version is a life of its query times this, and the count of `seen()`: after a new start every row is newer."""


def generation_and_count(version: int) -> tuple[int, int]:
    """In which life of its query a row was written, and how many records it held."""
    return divmod(version, GENERATIONS)


@light_dataclass
class Origin:
    """Who sent a record, in which of its lives, as which number, and when."""

    sender: str
    epoch: int
    seq: int
    time: Micros

    def headers(self) -> list[tuple[str, bytes]]:
        return [
            ("sender", self.sender.encode()),
            ("epoch", b"%d" % self.epoch),
            ("seq", b"%d" % self.seq),
            ("time", b"%d" % self.time),
        ]

    @classmethod
    def of(cls, headers: Iterable[tuple[str, bytes | str | None]] | None) -> "Origin | None":
        """The origin that the headers tell; None when they tell none; Refused when they contradict themselves."""
        told: dict[str, bytes | str | None] = {}
        for name, value in headers or ():
            if name in _NAMES:
                if name in told:
                    raise Refused("an origin", f'the header "{name}" is there twice')
                told[name] = value
        if not told:
            return None
        if missing := [name for name in _NAMES if told.get(name) is None]:
            raise Refused("an origin", f"the header {' and '.join(missing)} is missing")
        try:
            text = {name: _text(value) for name, value in told.items()}
            return cls(text["sender"], _number(text["epoch"]), _number(text["seq"]), _number(text["time"]))
        except ValueError as error:
            raise Refused("an origin", str(error)) from error

    @classmethod
    def read(cls, headers: Iterable[tuple[str, bytes | str | None]] | None) -> "Origin | None":
        """The origin, if the headers tell a whole one. What contradicts itself is no identity."""
        try:
            return cls.of(headers)
        except Refused:
            return None


_NAMES = ("sender", "epoch", "seq", "time")


def _text(value: bytes | str | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""


def _number(text: str) -> int:
    number = int(text)
    if str(number) != text:
        # Spark reads fewer spellings than Python; what one part takes as a number, all have to.
        raise ValueError(f"{text!r} is another spelling of {number}")
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{text} lies beyond 64 bits")
    return number


@light_dataclass
class Record:
    """What a channel carries. The value is the payload as it came, untouched; None deletes its key."""

    value: bytes | None
    origin: Origin | None = None
    key: bytes | None = None
    extra: Headers = ()

    def headers(self) -> list[tuple[str, bytes]]:
        """The origin's headers and the extra ones."""
        told = self.origin.headers() if self.origin else []
        told += self.extra
        return told


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sender's word that `seq` is its last number so far: a lost tail leaves no gap, but contradicts this."""

    sender: str
    epoch: int
    seq: int
    time: Micros


@dataclass(frozen=True, slots=True)
class OutageInterval:
    """A time during which a source that cannot be replayed was not heard: what it sent then is unknown, not absent."""

    source: str
    since: Micros
    until: Micros

"""A record and its origin.

The origin is stored in the headers of the record, as text that Kafka's tools can show: `sender`, `epoch` (the
generation of the sender), `seq` (contiguous within the epoch) and `time` (microseconds, by the sender's clock).
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
    """A dataclass that is frozen for type checkers only.

    Enforcing it at run time costs a microsecond per instance, which is too much for objects that are made per record.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)


LONGEST_SENDER = 200
"""Characters that the name of a sender may have."""
LARGEST_JUMP = 1_000_000
"""The largest gap in the numbers of a sender whose records are counted as missing. A wrong number may be 2^62."""
MAX_NUMBER = 2**63 - 1
"""The largest epoch and the largest number. An origin and a bookmark hold 64 bits."""
GENERATIONS = 2**44
"""A version is the generation of its query times this number, plus the count of `seen()`."""


def generation_and_count(version: int) -> tuple[int, int]:
    """Split a version into the generation of its query and the number of records in the row."""
    return divmod(version, GENERATIONS)


@light_dataclass
class Origin:
    """The identity of a record: its sender, the generation of the sender, its number and its time."""

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
        """The origin in the headers; None if there is none; Refused if it is incomplete or invalid."""
        values: dict[str, bytes | str | None] = {}
        for name, value in headers or ():
            if name in _NAMES:
                if name in values:
                    raise Refused("an origin", f'the header "{name}" is there twice')
                values[name] = value
        if not values:
            return None
        if missing := [name for name in _NAMES if values.get(name) is None]:
            raise Refused("an origin", f"the header {' and '.join(missing)} is missing")
        try:
            text = {name: _text(value) for name, value in values.items()}
            return cls(text["sender"], _number(text["epoch"]), _number(text["seq"]), _number(text["time"]))
        except ValueError as error:
            raise Refused("an origin", str(error)) from error

    @classmethod
    def read(cls, headers: Iterable[tuple[str, bytes | str | None]] | None) -> "Origin | None":
        """The origin in the headers; None if there is none, or if it is incomplete or invalid."""
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
        # Spark accepts fewer spellings of a number than Python. All parts must accept the same.
        raise ValueError(f"{text!r} has to be written as {number}")
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{text} is larger than 64 bits")
    return number


@light_dataclass
class Record:
    """A record to send. The value is the unchanged payload; None deletes the key of the record."""

    value: bytes | None
    origin: Origin | None = None
    key: bytes | None = None
    extra: Headers = ()

    def headers(self) -> list[tuple[str, bytes]]:
        """The origin's headers and the extra ones."""
        headers = self.origin.headers() if self.origin else []
        headers += self.extra
        return headers


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The last number of a sender so far. It shows that the newest records are missing, which leave no gap."""

    sender: str
    epoch: int
    seq: int
    time: Micros


@dataclass(frozen=True, slots=True)
class OutageInterval:
    """A time without connection to a source that cannot be replayed. Records of this time are unknown."""

    source: str
    since: Micros
    until: Micros

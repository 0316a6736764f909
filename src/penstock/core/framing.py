"""The protocol between a sender and a receiver of records. No I/O.

A sender begins with `{"sender": "NAME", "epoch": N, "seq": M}`. The epoch grows with each start of the sender. Records
are numbered within an epoch, and `seq` is the first one that the sender still has (default: 1). The answer
`{"after": 41}` means: send the records after 41. `{"safe": 45}` means: the records up to 45 are safe. `{"error": "…"}`
is the reason for the end of a connection. These messages have the same framing as the records.
"""

from collections.abc import Mapping
from typing import Protocol

import orjson

from penstock.core.errors import Refused
from penstock.core.record import MAX_NUMBER

KEPT = 64 << 10
"""How many of the first bytes of a record beyond the limit its dead letter has."""
FAR = 16
"""A record of up to this many times the limit is skipped. A larger length means that the stream is not framed so."""

Found = tuple[bytes, int, str | None]
"""A record, the offset after it, and why it is invalid; then the record is only its first bytes."""


class Framing(Protocol):
    broken: str | None
    """Why the rest of the stream cannot be read."""

    @property
    def held(self) -> int:
        """The bytes of an incomplete record."""

    @property
    def midway(self) -> bool:
        """Whether a record is incomplete."""

    def push(self, data: bytes) -> list[Found]: ...

    def end(self) -> list[Found]:
        """The incomplete rest, at the end of the stream."""


class Lines:
    """A record ends with a line feed; a carriage return before it is removed. An empty line is not a record.

    A line beyond the limit is returned as soon as this is known, and its rest is skipped. Its offset is the point from
    which this is known: to continue there, start with `skipping`.
    """

    broken: str | None = None

    def __init__(self, max_size: int, offset: int = 0, skipping: bool = False) -> None:
        self._max, self._start, self._skipping = max_size, offset, skipping
        self._kept = min(max_size, KEPT)
        self._rest = bytearray()
        self._reason = f"the line has more than {max_size} bytes, the limit of a record"

    @property
    def held(self) -> int:
        return len(self._rest)

    @property
    def midway(self) -> bool:
        return self._skipping or bool(self._rest)

    def push(self, data: bytes) -> list[Found]:
        lines = data.split(b"\n")
        rest = lines.pop()
        found: list[Found] = []
        if not lines:
            self._unfinished(rest, found)
            return found
        if self._skipping:
            self._start += len(lines.pop(0)) + 1
            self._skipping = False
        elif self._rest:
            lines[0] = bytes(self._rest + lines[0])
            self._rest.clear()
        start, largest = self._start, self._max
        for line in lines:
            end_ = start + len(line) + 1
            if line[-1:] == b"\r":
                line = line[:-1]
            if len(line) > largest:
                found.append((line[: self._kept], start + largest + 1, self._reason))
            elif line:
                found.append((line, end_, None))
            start = end_
        self._start = start
        self._unfinished(rest, found)
        return found

    def _unfinished(self, data: bytes, found: list[Found]) -> None:
        if self._skipping:
            self._start += len(data)
            return
        self._rest += data
        # The last byte can be a carriage return.
        if len(self._rest) > self._max + 1:
            found.append((bytes(self._rest[: self._kept]), self._start + self._max + 1, self._reason))
            self._start += len(self._rest)
            self._rest.clear()
            self._skipping = True

    def end(self) -> list[Found]:
        if not self._rest:
            return []
        start, size = self._start, len(self._rest)
        # As if a line feed followed, except for the offset.
        return [(value, min(offset, start + size), reason) for value, offset, reason in self.push(b"\n")]


class Lengths:
    """Each record follows its length: four bytes, big-endian. A record can be empty."""

    def __init__(self, max_size: int) -> None:
        self.broken: str | None = None
        self._max = max_size
        self._rest = bytearray()
        self._needed = 4
        self._skip = 0
        self._offset = 0

    @property
    def held(self) -> int:
        return len(self._rest)

    @property
    def midway(self) -> bool:
        return bool(self._skip or self._rest)

    def push(self, data: bytes) -> list[Found]:
        if self.broken is not None:
            return []
        if self._skip:
            skipped = min(self._skip, len(data))
            self._skip -= skipped
            self._offset += skipped
            data = data[skipped:]
        self._rest += data
        # Wait for the complete record.
        if len(self._rest) < self._needed:
            return []
        found: list[Found] = []
        whole = bytes(self._rest)
        at = self._parse(whole, found)
        self._offset += at
        self._rest = bytearray(whole[at:])
        return found

    def _parse(self, data: bytes, found: list[Found]) -> int:
        """Return how many bytes were consumed."""
        at, size = 0, len(data)
        while size - at >= 4:
            start = at + 4
            length = int.from_bytes(data[at:start], "big")
            kept = length if length <= self._max else min(length, KEPT)
            if length > FAR * self._max:
                self.broken = f"the length of a record is {length} bytes, the limit is {self._max}"
                found.append((b"", self._offset + start, self.broken))
                return size
            if size - start < kept:
                self._needed = 4 + kept
                return at
            end_ = start + length
            reason = None if length <= self._max else f"it has {length} bytes, the limit of a record is {self._max}"
            found.append((data[start : start + kept], self._offset + end_, reason))
            self._skip = max(0, end_ - size)
            at = min(end_, size)
        self._needed = 4
        return at

    def end(self) -> list[Found]:
        if not self._rest:
            return []
        rest, self._rest = bytes(self._rest), bytearray()
        reason = f"the stream ends after {max(0, len(rest) - 4)} bytes of the record"
        return [(rest[4:][:KEPT], self._offset + len(rest), reason)]


FRAMES = ("lines", "length")


def framing(frames: str, max_size: int) -> Framing:
    return Lines(max_size) if frames == "lines" else Lengths(max_size)


def framed(frames: str, record: bytes) -> bytes:
    return record + b"\n" if frames == "lines" else len(record).to_bytes(4, "big") + record


def framed_message(frames: str, message: Mapping[str, object]) -> bytes:
    return framed(frames, orjson.dumps(message))


HELLO_EXPECTED = 'begin with the sender, and an epoch that grows with each start: {"sender": "NAME", "epoch": 1}'

SenderKey = tuple[str, int]
"""The name and the epoch of a sender."""


def parse_hello(hello: Found) -> tuple[SenderKey, int]:
    """The sender, and the first number that it still has; Refused if the message is not valid."""
    match {"seq": 1, **(parse_message(hello) or {})}:
        case {"sender": str(sender), "epoch": int(epoch), "seq": int(first), **more} if not more:
            if 0 <= epoch <= MAX_NUMBER and 1 <= first <= MAX_NUMBER and not {type(epoch), type(first)} & {bool}:
                return (sender, epoch), first
    raise Refused("a connection", HELLO_EXPECTED)


def parse_message(found: Found) -> dict[str, object] | None:
    """A message; None if it is not one."""
    value, _, why = found
    try:
        message = None if why else orjson.loads(value)
    except orjson.JSONDecodeError:
        return None
    return message if isinstance(message, dict) else None

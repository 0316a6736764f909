"""Where a record ends in a stream of bytes: bytes in, records out, however they were cut on their way. No I/O."""

from typing import Protocol

KEPT = 64 << 10
"""So many of the first bytes of a record that is too large go into its dead letter."""
FAR = 16
"""So many times the largest size is passed over; who announces more than that does not speak in lengths at all."""

Found = tuple[bytes, int, str | None]
"""A record; the place in the stream behind it; and why it cannot be taken, of which the value is only the beginning."""


class Framing(Protocol):
    broken: str | None
    """Why nothing can be found any more."""

    @property
    def held(self) -> int:
        """How many bytes of an unfinished record are kept."""

    @property
    def midway(self) -> bool:
        """Whether a record has begun that has not ended."""

    def push(self, data: bytes) -> list[Found]: ...

    def end(self) -> list[Found]:
        """What the unfinished rest is, if nothing follows."""


class Lines:
    """A record ends with a line feed; a carriage return before it is not part of it. An empty line is no record.

    A line that is too long is told as soon as it is, and the rest of it is passed over. Its place is that from which
    this is so: who goes on there goes on `skipping`.
    """

    broken: str | None = None

    def __init__(self, max_size: int, place: int = 0, skipping: bool = False) -> None:
        self._max, self._begin, self._skipping = max_size, place, skipping
        self._kept = min(max_size, KEPT)
        self._rest = bytearray()
        self._why = f"the line is longer than the {max_size} bytes that a record may have"

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
            self._begin += len(lines.pop(0)) + 1
            self._skipping = False
        elif self._rest:
            lines[0] = bytes(self._rest + lines[0])
            self._rest.clear()
        begin, largest = self._begin, self._max
        for line in lines:
            behind = begin + len(line) + 1
            if line[-1:] == b"\r":
                line = line[:-1]
            if len(line) > largest:
                found.append((line[: self._kept], begin + largest + 1, self._why))
            elif line:
                found.append((line, behind, None))
            begin = behind
        self._begin = begin
        self._unfinished(rest, found)
        return found

    def _unfinished(self, data: bytes, found: list[Found]) -> None:
        if self._skipping:
            self._begin += len(data)
            return
        self._rest += data
        # With a carriage return at its end a line may still be one byte shorter than it looks.
        if len(self._rest) > self._max + 1:
            found.append((bytes(self._rest[: self._kept]), self._begin + self._max + 1, self._why))
            self._begin += len(self._rest)
            self._rest.clear()
            self._skipping = True

    def end(self) -> list[Found]:
        if not self._rest:
            return []
        begin, size = self._begin, len(self._rest)
        # It is as if the line feed had come, but for the place.
        return [(value, min(place, begin + size), why) for value, place, why in self.push(b"\n")]


class Lengths:
    """Before each record stands its length, in four bytes, the highest first. An empty record is one, too."""

    def __init__(self, max_size: int) -> None:
        self.broken: str | None = None
        self._max = max_size
        self._rest = bytearray()
        self._needed = 4
        self._skip = 0
        self._place = 0

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
            passed = min(self._skip, len(data))
            self._skip -= passed
            self._place += passed
            data = data[passed:]
        self._rest += data
        # Nothing is done for a record that comes byte by byte until it is whole.
        if len(self._rest) < self._needed:
            return []
        found: list[Found] = []
        whole = bytes(self._rest)
        at = self._parse(whole, found)
        self._place += at
        self._rest = bytearray(whole[at:])
        return found

    def _parse(self, data: bytes, found: list[Found]) -> int:
        """How many bytes are done with."""
        at, size = 0, len(data)
        while size - at >= 4:
            begin = at + 4
            length = int.from_bytes(data[at:begin], "big")
            kept = length if length <= self._max else min(length, KEPT)
            if length > FAR * self._max:
                self.broken = f"a record of {length} bytes is announced, and {self._max} is the most"
                found.append((b"", self._place + begin, self.broken))
                return size
            if size - begin < kept:
                self._needed = 4 + kept
                return at
            behind = begin + length
            why = None if length <= self._max else f"it has {length} bytes, and a record may have {self._max}"
            found.append((data[begin : begin + kept], self._place + behind, why))
            self._skip = max(0, behind - size)
            at = min(behind, size)
        self._needed = 4
        return at

    def end(self) -> list[Found]:
        if not self._rest:
            return []
        rest, self._rest = bytes(self._rest), bytearray()
        why = f"the stream ends after {max(0, len(rest) - 4)} bytes of it"
        return [(rest[4:][:KEPT], self._place + len(rest), why)]


FRAMES = ("lines", "length")


def framing(frames: str, max_size: int) -> Framing:
    return Lines(max_size) if frames == "lines" else Lengths(max_size)

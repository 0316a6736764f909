"""A record as bytes on disk: its length, a checksum over the rest, and the rest.

    length u32 · crc32 u32 · offset i64 · appended i64 · key i32 · value i32 · headers u16 · key · value · headers

Key and value are told by their lengths; -1 is none, which is not the same as empty. The headers are the lengths of each
name and value, and then their bytes. All numbers are little-endian.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, islice
from struct import Struct
from zlib import crc32

from penstock.core.clock import Micros
from penstock.core.contracts import Entry
from penstock.core.errors import Refused
from penstock.core.record import Record

FRONT = 8
_FRONT = Struct("<II")
_FIXED = Struct("<qqiiH")
LIMIT = 1 << 30
"""Of one record, in bytes."""


class Damaged(Exception):
    """Raised when the bytes at a position of a file are not the record that was written."""

    def __init__(self, position: int, why: str) -> None:
        super().__init__(position, why)
        self.position, self.why = position, why


@cache
def _lengths(headers: int) -> Struct:
    return Struct(f"<{2 * headers}I")


def pack(records: Sequence[Record], first: int, offset: int, appended: Micros, room: int) -> tuple[bytearray, int]:
    """Records from the one with the number `first` on, until the room is used up; and how many they are."""
    out = bytearray()
    count = 0
    for record in islice(records, first, None):
        key, value, headers = record.key, record.value, record.headers()
        lengths = (-1 if key is None else len(key), -1 if value is None else len(value), len(headers))
        if len(headers) >= 1 << 16:
            raise Refused("a record", f"it has {len(headers)} headers, and {(1 << 16) - 1} are the most")
        if max(lengths) > LIMIT:
            raise Refused("a record", f"it has {max(lengths)} bytes, and {LIMIT} are the most")
        parts = [_FIXED.pack(offset, appended, *lengths), key or b"", value or b""]
        if headers:
            texts = [text for name, told in headers for text in (_encoded(name), told)]
            parts.append(_lengths(len(headers)).pack(*map(len, texts)))
            parts += texts
        body = b"".join(parts)
        if len(body) > LIMIT:
            raise Refused("a record", f"it has {len(body)} bytes, and {LIMIT} are the most")
        out += _FRONT.pack(len(body), crc32(body))
        out += body
        offset += 1
        count += 1
        if len(out) >= room:
            break
    return out, count


def _encoded(name: str) -> bytes:
    try:
        return name.encode()
    except UnicodeEncodeError as error:
        raise Refused("a record", f"the name of a header is no text: {error.reason}") from error


def needed(chunk: bytes) -> int:
    """How many bytes the record takes with which a chunk begins; no less than it takes to tell."""
    return FRONT + int(_FRONT.unpack_from(chunk)[0]) if len(chunk) >= FRONT else FRONT


def body_of(chunk: bytes, at: int, start: int) -> bytes | None:
    """What lies behind the checksum of the record that begins here; None when the chunk does not hold all of it.

    `start` is where the chunk lies in its file. Damaged when this is no record.
    """
    begins = at + FRONT
    if begins > len(chunk):
        return None
    length, checksum = _FRONT.unpack_from(chunk, at)
    if length < _FIXED.size or length > LIMIT:
        raise Damaged(start + at, f"its length says {length}")
    if begins + length > len(chunk):
        return None
    body = chunk[begins : begins + length]
    if crc32(body) != checksum:
        raise Damaged(start + at, "its checksum is another")
    return body


@dataclass(frozen=True, slots=True)
class Outline:
    """What a record is about, without all of it."""

    position: int
    stop: int
    offset: int
    appended: Micros
    key: bytes | None
    deletes: bool


def outline(body: bytes, position: int) -> Outline:
    offset, appended, key, value, _ = _FIXED.unpack_from(body)
    found = None if key < 0 else body[_FIXED.size : _FIXED.size + key]
    return Outline(position, position + FRONT + len(body), offset, appended, found, value < 0)


@dataclass(slots=True)
class Run:
    """Where reading stands within a run of records, which holds each offset, or some only."""

    offset: int
    """The next that may come."""
    whole: bool
    """Each offset has to be there."""


def unpack(
    chunk: bytes, at: int, start: int, most: int, run: Run, channel: str, partition: int
) -> tuple[list[Entry], int]:
    """Up to `most` entries, and where to go on in the chunk.

    It ends before a record of which the chunk does not hold all, and before one that is not what was written: Damaged
    when that is the first.
    """
    found: list[Entry] = []
    front, size = _FIXED.size, len(chunk)
    while len(found) < most and at + FRONT <= size:
        # As body_of does it, and here once more: this loop is what reading costs.
        length, checksum = _FRONT.unpack_from(chunk, at)
        stop = at + FRONT + length
        if stop > size:
            break
        body = chunk[at + FRONT : stop]
        if length < front or crc32(body) != checksum:
            if found:
                break
            raise Damaged(start + at, "its checksum is another")
        offset, appended, key, value, headers = _FIXED.unpack_from(body)
        if offset != run.offset and (run.whole or offset < run.offset):
            if found:
                break
            raise Damaged(start + at, f"{run.offset} should lie there, and {offset} does")
        run.offset, at = offset + 1, stop
        behind_key = front + key if key > 0 else front
        behind_value = behind_key + value if value > 0 else behind_key
        found.append(
            Entry(
                channel,
                partition,
                offset,
                appended,
                body[front:behind_key] if key >= 0 else None,
                body[behind_key:behind_value] if value >= 0 else None,
                _headers(body, behind_value, headers) if headers else (),
            )
        )
    return found, at


def _headers(body: bytes, at: int, count: int) -> tuple[tuple[str, bytes], ...]:
    texts = at + 8 * count
    return tuple(
        [
            (body[texts + name : texts + value].decode(), body[texts + value : texts + stop])
            for name, value, stop in _layout(body[at:texts])
        ]
    )


@lru_cache(1024)
def _layout(lengths: bytes) -> list[tuple[int, int, int]]:
    """Where each name and each value begin, and where that ends. Few are ever different."""
    ends = list(accumulate(_lengths(len(lengths) // 8).unpack(lengths), initial=0))
    return list(zip(ends[:-1:2], ends[1::2], ends[2::2], strict=True))

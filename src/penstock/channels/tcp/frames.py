"""The protocol between sender and receiver. No I/O.

A frame is a header (magic, version, kind, length of the body) and a body; numbers are big-endian. The sender begins
with HELLO and its identity. WELCOME answers with the last batch that was accepted from it, and the channels of this
reader. Numbered batches follow. ACKNOWLEDGED answers with the last accepted batch, and is repeated while nothing
arrives, so that a slow receiver does not look dead. FAULT is the reason for the end of a connection.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from penstock.core.errors import Refused
from penstock.core.record import Headers, Record

LIMIT = 4 << 20
"""Bytes of the body of a frame."""
MOST = 5_000
"""Records of a batch."""
_SPLIT = 256 << 10  # A sender splits larger calls into batches.

_MAGIC, _VERSION = b"PNST", 1
_HEAD = struct.Struct("!4sBBI")
_IDENTITY = struct.Struct("!16s")
_NUMBER = struct.Struct("!Q")
_COUNT = struct.Struct("!I")
_LENGTH = struct.Struct("!i")
_NULL = _LENGTH.pack(-1)

HEAD = _HEAD.size


class Kind(IntEnum):
    HELLO = 1
    HELLO_REPLY = 2
    BATCH = 3
    ACKNOWLEDGED = 4
    FAULT = 5


@dataclass(frozen=True, slots=True)
class Hello:
    identity: bytes


@dataclass(frozen=True, slots=True)
class HelloReply:
    acknowledged: int
    channels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    number: int
    channel: str
    records: Sequence[tuple[bytes | None, bytes | None, Headers]]
    """Key, value, headers."""


@dataclass(frozen=True, slots=True)
class Acknowledged:
    number: int


@dataclass(frozen=True, slots=True)
class Fault:
    description: str


Frame = Hello | HelloReply | Batch | Acknowledged | Fault


def hello(identity: bytes) -> bytes:
    return _framed(Kind.HELLO, _IDENTITY.pack(identity))


def hello_reply(acknowledged: int, channels: Iterable[str]) -> bytes:
    names = [_field(name.encode()) for name in channels]
    return _framed(Kind.HELLO_REPLY, _NUMBER.pack(acknowledged) + _COUNT.pack(len(names)) + b"".join(names))


def batch(number: int, records: bytes) -> bytes:
    """A batch with a body of `packed`."""
    return _framed(Kind.BATCH, _NUMBER.pack(number) + records)


def acknowledged(number: int) -> bytes:
    return _framed(Kind.ACKNOWLEDGED, _NUMBER.pack(number))


def fault(description: str) -> bytes:
    return _framed(Kind.FAULT, description.encode(errors="replace")[:LIMIT])


def packed(channel: str, records: Sequence[Record]) -> Iterator[bytes]:
    """The bodies of the batches. Refused if a record is larger than a frame."""
    start = _field(_utf8("the name of a channel", channel))
    some: list[bytes] = []
    size = 0
    for record in records:
        one = _packed(record)
        if _NUMBER.size + len(start) + _COUNT.size + len(one) > LIMIT:
            raise Refused("a record", f"it has {len(one):,} bytes; the limit of tcp:// is {LIMIT:,}")
        if some and (size + len(one) > _SPLIT or len(some) == MOST):
            yield start + _COUNT.pack(len(some)) + b"".join(some)
            some, size = [], 0
        some.append(one)
        size += len(one)
    if some:
        yield start + _COUNT.pack(len(some)) + b"".join(some)


def head(data: bytes) -> tuple[Kind, int]:
    """The kind of a frame and the length of its body; Refused if this is another protocol."""
    magic, version, kind, length = _HEAD.unpack(data)
    if magic != _MAGIC:
        raise Refused("a frame", f"it begins with {magic!r}, not with {_MAGIC!r}: this is another protocol")
    if version != _VERSION:
        raise Refused("a frame", f"it has version {version}; this side knows {_VERSION}")
    if length > LIMIT:
        raise Refused("a frame", f"it has {length:,} bytes; the limit is {LIMIT:,}")
    try:
        return Kind(kind), length
    except ValueError as error:
        raise Refused("a frame", f"its kind {kind} is not known") from error


def read(kind: Kind, body: bytes) -> Frame:
    """Parse the body of a frame; Refused if it is malformed."""
    cursor = _Cursor(body)
    try:
        frame = _read(kind, cursor)
    except struct.error as error:
        raise Refused("a frame", "it is shorter than its contents") from error
    except UnicodeDecodeError as error:
        raise Refused("a frame", "a name in it is not UTF-8") from error
    if cursor.at != len(body):
        raise Refused("a frame", f"{len(body) - cursor.at:,} bytes follow its contents")
    return frame


def _read(kind: Kind, cursor: "_Cursor") -> Frame:
    match kind:
        case Kind.HELLO:
            return Hello(cursor.identity())
        case Kind.HELLO_REPLY:
            return HelloReply(cursor.number(), tuple(cursor.name() for _ in range(cursor.count())))
        case Kind.ACKNOWLEDGED:
            return Acknowledged(cursor.number())
        case Kind.FAULT:
            return Fault(cursor.rest().decode())
        case Kind.BATCH:
            number, channel, count = cursor.number(), cursor.name(), cursor.count()
            if count > MOST:
                raise Refused("a frame", f"it has {count:,} records; the limit is {MOST:,}")
            return Batch(number, channel, [cursor.record() for _ in range(count)])


def _framed(kind: Kind, body: bytes) -> bytes:
    return _HEAD.pack(_MAGIC, _VERSION, kind, len(body)) + body


def _packed(record: Record) -> bytes:
    headers = record.headers()
    parts = [_field(record.key), _field(record.value), _COUNT.pack(len(headers))]
    for name, value in headers:
        parts += (_field(_utf8("the name of a header", name)), _field(value))
    return b"".join(parts)


def _field(data: bytes | None) -> bytes:
    return _NULL if data is None else _LENGTH.pack(len(data)) + data


def _utf8(what: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise Refused("a record", f"{what} cannot be written as UTF-8") from error


class _Cursor:
    __slots__ = ("_body", "at")

    def __init__(self, body: bytes) -> None:
        self._body = body
        self.at = 0

    def _one(self, shape: struct.Struct) -> int:
        value: int = shape.unpack_from(self._body, self.at)[0]
        self.at += shape.size
        return value

    def number(self) -> int:
        return self._one(_NUMBER)

    def count(self) -> int:
        return self._one(_COUNT)

    def identity(self) -> bytes:
        (found,) = _IDENTITY.unpack_from(self._body, self.at)
        self.at += _IDENTITY.size
        return bytes(found)

    def field(self) -> bytes | None:
        length = self._one(_LENGTH)
        if length == -1:
            return None
        end = self.at + length
        if length < 0 or end > len(self._body):
            raise Refused("a frame", f"a field of {length:,} bytes is longer than the frame")
        found, self.at = self._body[self.at : end], end
        return found

    def name(self) -> str:
        found = self.field()
        if found is None:
            raise Refused("a frame", "a name in it is null")
        return found.decode()

    def record(self) -> tuple[bytes | None, bytes | None, Headers]:
        key, value = self.field(), self.field()
        return key, value, tuple((self.name(), self.field() or b"") for _ in range(self.count()))

    def rest(self) -> bytes:
        found, self.at = self._body[self.at :], len(self._body)
        return found

"""A record as one string of bytes: lengths, key, value, headers. `log.lua` looks into it for the key."""

from struct import Struct
from zlib import crc32

from penstock.core.errors import Refused
from penstock.core.record import Headers, Record

LIMIT = 16 << 20
"""So many bytes may a record have: while Redis deals with one, everybody else waits."""
_LENGTHS = Struct(">iiI")  # Of the key and the value, -1 for none; the number of headers.
_HEADER = Struct(">II")


def pack(record: Record) -> bytes:
    """Refused when it is too large, or cannot be written."""
    try:
        packed = _packed(record)
    except UnicodeEncodeError as error:
        raise Refused("a record", "a text in its headers cannot be written as UTF-8") from error
    if len(packed) > LIMIT:
        raise Refused("a record", f"with {len(packed):,} bytes it is larger than the {LIMIT:,} that redis:// carries")
    return packed


def _packed(record: Record) -> bytes:
    key, value, headers = record.key, record.value, record.headers()
    parts = [
        _LENGTHS.pack(-1 if key is None else len(key), -1 if value is None else len(value), len(headers)),
        key or b"",
        value or b"",
    ]
    for name, content in headers:
        spelled = name.encode()
        parts += (_HEADER.pack(len(spelled), len(content or b"")), spelled, content or b"")
    return b"".join(parts)


def unpack(packed: bytes, at: int = 0) -> tuple[bytes | None, bytes | None, Headers, int]:
    """Key, value and headers of the record that begins here, and where the next one does."""
    of_key, of_value, count = _LENGTHS.unpack_from(packed, at)
    at += _LENGTHS.size
    key = value = None
    if of_key >= 0:
        key, at = packed[at : at + of_key], at + of_key
    if of_value >= 0:
        value, at = packed[at : at + of_value], at + of_value
    headers = []
    for _ in range(count):
        of_name, of_content = _HEADER.unpack_from(packed, at)
        at += _HEADER.size
        name, at = packed[at : at + of_name].decode(), at + of_name
        headers.append((name, packed[at : at + of_content]))
        at += of_content
    return key, value, tuple(headers), at


def place_of(packed: bytes, partitions: int) -> int | None:
    """The partition of a record's key; None for one that has no key and may lie in any."""
    of_key, _, _ = _LENGTHS.unpack_from(packed)
    if of_key < 0:
        return None
    return crc32(packed[_LENGTHS.size : _LENGTHS.size + of_key]) % partitions

"""Records and topics as Redis holds them.

A record is one string of bytes: lengths, key, value, headers. `log.lua` looks into it for the key.
A topic is the fields of a hash, times in microseconds.
"""

from collections.abc import Mapping
from datetime import timedelta
from struct import Struct
from zlib import crc32

from penstock.channels import checks as shared
from penstock.channels.checks import spelled
from penstock.core.clock import duration
from penstock.core.contracts import Topic
from penstock.core.errors import Misconfigured, Refused
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


WORDS = {"compaction.lag": ("lag", "1 hour"), "deletions.keep": ("deletions", "1 day")}
"""Of a compacted channel: how long a record stays after it was replaced, and how long the deletion of a key does."""


def fields_of(topic: Topic, generation: str) -> dict[str, str]:
    found = {"id": generation}
    if topic.retention is not None:
        found["keep"] = _micros(topic.retention)
    if topic.compacted:
        for word, (name, usual) in WORDS.items():
            try:
                found[name] = _micros(duration(topic.config.get(word, usual)))
            except ValueError as error:
                raise Misconfigured(f"channel {topic.name}, {word}", str(error)) from error
    return found


def topic_of(name: str, held: Mapping[str, bytes]) -> Topic:
    return Topic(
        name,
        int(held["partitions"]),
        1,
        "lag" in held,
        _span(held["keep"]) if "keep" in held else None,
        {word: spelled(_span(held[of_it])) for word, (of_it, _) in WORDS.items() if of_it in held},
    )


def differences(declared: Topic, there: Topic) -> list[str]:
    """How a channel that is there is not what it should be."""
    found = list(shared.differences(there, declared, "Redis", WORDS))
    for word, value in declared.config.items():
        if word in WORDS and there.compacted and declared.compacted and duration(value) != duration(there.config[word]):
            found.append(f"channel {declared.name} has {word}={there.config[word]}, and {value} is declared")
    return found


def _micros(span: timedelta) -> str:
    return str(round(span.total_seconds() * 1e6))


def _span(micros: bytes) -> timedelta:
    return timedelta(microseconds=int(micros))

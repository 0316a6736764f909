"""How records and topics are stored in Redis.

A record is one string of bytes: lengths, key, value, headers. `log.lua` reads the key from it.
A topic is a hash, with times in microseconds.
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
"""Bytes of one record: while Redis handles one, all other clients wait."""
_LENGTHS = Struct(">iiI")  # Of the key and the value, -1 for none; the number of headers.
_HEADER = Struct(">II")


def pack(record: Record) -> bytes:
    """Raises Refused if the record is too large, or a header is not valid text."""
    try:
        packed = _packed(record)
    except UnicodeEncodeError as error:
        raise Refused("a record", "a header cannot be written as UTF-8") from error
    if len(packed) > LIMIT:
        raise Refused("a record", f"it has {len(packed):,} bytes; the limit of redis:// is {LIMIT:,}")
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
    """Key, value and headers of the record at this position, and the position of the next one."""
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


def partition_of(packed: bytes, partitions: int) -> int | None:
    """The partition of a record's key; None without a key: any partition will do."""
    of_key, _, _ = _LENGTHS.unpack_from(packed)
    if of_key < 0:
        return None
    return crc32(packed[_LENGTHS.size : _LENGTHS.size + of_key]) % partitions


SETTINGS = {"compaction.lag": ("lag", "1 hour"), "deletions.keep": ("deletions", "1 day")}
"""Settings of compacted channels: how long a replaced record stays, and how long the deletion of a key does."""


def fields_of(topic: Topic, generation: str) -> dict[str, str]:
    found = {"id": generation}
    if topic.retention is not None:
        found["keep"] = _micros(topic.retention)
    if topic.compacted:
        for setting, (name, usual) in SETTINGS.items():
            try:
                found[name] = _micros(duration(topic.config.get(setting, usual)))
            except ValueError as error:
                raise Misconfigured(f"channel {topic.name}, {setting}", str(error)) from error
    return found


def topic_of(name: str, held: Mapping[str, bytes]) -> Topic:
    return Topic(
        name,
        int(held["partitions"]),
        1,
        "lag" in held,
        _span(held["keep"]) if "keep" in held else None,
        {setting: spelled(_span(held[of_it])) for setting, (of_it, _) in SETTINGS.items() if of_it in held},
    )


def differences(declared: Topic, there: Topic) -> list[str]:
    """The differences between a channel and its declaration."""
    found = list(shared.differences(there, declared, "Redis", SETTINGS))
    for setting, value in declared.config.items():
        if (
            setting in SETTINGS
            and there.compacted
            and declared.compacted
            and duration(value) != duration(there.config[setting])
        ):
            found.append(f"channel {declared.name} has {setting}={there.config[setting]}, and {value} is declared")
    return found


def _micros(span: timedelta) -> str:
    return str(round(span.total_seconds() * 1e6))


def _span(micros: bytes) -> timedelta:
    return timedelta(microseconds=int(micros))

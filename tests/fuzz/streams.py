"""Framing: lines, lengths and events in chunks of any sizes."""

import re
import struct
from collections.abc import Callable, Iterable
from functools import partial

from tests.fuzz.target import Input, chunks_of, limits, result_or_error, target

from penstock.channels.tcp.sender import decode, encode
from penstock.collect import sse
from penstock.collect.sse import LONGEST_RETRY, Event, EventStream, cursor_of, last_id
from penstock.core import framing
from penstock.core.errors import Refused
from penstock.core.framing import FAR, Found, Framing, Lengths, Lines
from penstock.core.record import Record

_KEPT = 16
_ID = 8
_FIRST = 12


@target(
    b"\x05\x02\x01\x03a\r\nbcdefgh\n\nrest\r", b"\x02\x00\r\n\r\r\n\nabc\r\nabcd\nab\r", b"\x13\x01\x05" + b"x" * 40
)
def lines(data: bytes) -> None:
    inputs = Input(data)
    most, sizes, stream = 1 + inputs.byte() % 40, inputs.sized(), inputs.rest()
    with limits(framing, KEPT=_KEPT):
        expected = _lines_of(stream, most)
        assert [found[:2] for found in expected if found[2] is None] == [
            found for found in _ends_of(stream) if 0 < len(found[0]) <= most
        ]
        _check(lambda: Lines(most), stream, sizes, expected, most + 1)
        for number, (_, offset, why) in enumerate(expected[:10]):
            again = Lines(most, offset, skipping=why is not None)
            assert _without_reasons(again.push(stream[offset:]) + again.end()) == _without_reasons(
                expected[number + 1 :]
            )


@target(
    b"\x05\x03\x01\x06\x02\0\0\0\x02ab\0\0\0\0\0\0\0\x09123456789\0\0\0\x01x\0\0",
    b"\x00\x00\0\0\0\x30" + b"x" * 0x30 + b"\0\0\0\x01a",
    b"\x00\x01\x01\0\0\0\x00\xff\xff\xff\xffmore",
)
def lengths(data: bytes) -> None:
    inputs = Input(data)
    most, sizes, stream = 1 + inputs.byte() % 40, inputs.sized(), inputs.rest()
    with limits(framing, KEPT=_KEPT):
        _check(lambda: Lengths(most), stream, sizes, _lengths_of(stream, most), 4 + max(most, _KEPT))


@target(
    b"\0\0\0\x01a\0\0\0\x01\0\0\0\x02\0\0\0\x01kvv\0\0\0\x01\0\0\0\x01h!",
    b"\0\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff\0\0\0\0",
    b"\0\0\0\x01a\0\0\0\x09\xff\xff\xff\xfe\xff\xff\xff\xffk",
)
def channel_record(data: bytes) -> None:
    """A record of a channel over TCP is exactly what its sender encoded, or refused."""
    found = result_or_error(partial(decode, data), Refused)
    if not isinstance(found, Refused):
        channel, key, value, headers = found
        assert encode(channel, Record(value, key=key, extra=headers))[4:] == data


def _check(make: Callable[[], Framing], stream: bytes, sizes: bytes, expected: list[Found], held: int) -> None:
    cuts: list[Iterable[bytes]] = [[stream], chunks_of(stream, sizes), (bytes([one]) for one in stream)]
    for chunks in cuts:
        frames, found = make(), list[Found]()
        for chunk in chunks:
            found += frames.push(chunk)
            assert frames.held <= held
            assert frames.midway or not frames.held
        found += frames.end()
        assert _without_reasons(found) == _without_reasons(expected)
        assert frames.end() == []


def _without_reasons(found: Iterable[Found]) -> list[tuple[bytes, int, bool]]:
    return [(value, offset, why is None) for value, offset, why in found]


def _lines_of(stream: bytes, most: int) -> list[Found]:
    """A simple implementation over the whole stream."""
    found, begin = list[Found](), 0
    for line in re.findall(rb"[^\n]*\n|[^\n]+", stream):
        value = re.sub(rb"\r?\n?\Z", b"", line, count=1)
        if len(value) > most:
            found.append((value[: min(most, _KEPT)], begin + most + 1, "it is too long"))
        elif value:
            found.append((value, begin + len(line), None))
        begin += len(line)
    return found


def _ends_of(stream: bytes) -> list[tuple[bytes, int]]:
    """Each line without its end, and the offset after it."""
    found, begin = [], 0
    for line in stream.split(b"\n"):
        begin += len(line) + 1
        found.append((line.removesuffix(b"\r"), min(begin, len(stream))))
    return found


def _lengths_of(stream: bytes, most: int) -> list[Found]:
    found, at = list[Found](), 0
    while len(stream) - at >= 4:
        (length,) = struct.unpack_from(">I", stream, at)
        if length > FAR * most:
            return [*found, (b"", at + 4, "it is absurd")]
        body = stream[at + 4 : at + 4 + length]
        kept = length if length <= most else min(length, _KEPT)
        if len(body) < kept:
            break
        at += 4 + length
        found.append((body[:kept], at, None if length <= most else "it is too long"))
    if at < len(stream):
        found.append((stream[at + 4 :][:_KEPT], len(stream), "it ends"))
    return found


@target(
    b"\x10\x02\x05\x03\xef\xbb\xbfid: 5\nevent: x\ndata: a\r\ndata:b\r\r: c\nretry: 10\ndata\n\nid\ndata: c\n\n",
    b"\x04\x00\x00data:12345\ndata: 678901234567890\n\nid: 123456789\nid:a\x00b\ndata: x\n\n",
)
def events(data: bytes) -> None:
    inputs = Input(data)
    most, after = 1 + inputs.byte() % 60, inputs.choose((None, b"7", b"5"))
    sizes, stream = inputs.sized(), inputs.rest()
    with limits(sse, LONGEST_ID=_ID, FIRST_BYTES=_FIRST):
        expected, retry = _events_of(stream, most, after)
        cuts: list[Iterable[bytes]] = [[stream], chunks_of(stream, sizes), (bytes([one]) for one in stream)]
        for chunks in cuts:
            reading, found = EventStream(most, after), list[Event]()
            for chunk in chunks:
                found += reading.feed(chunk)
                assert len(reading._line) <= _room(most)
                assert len(reading._data) <= most + 1
            assert found == expected
            assert reading.retry == retry
        for event in expected:
            cursor = cursor_of(event)
            assert (cursor is None) == (event.id is None)
            assert last_id(cursor) == event.id


def _room(most: int) -> int:
    """How much of a line is kept."""
    return max(most, 2 * _ID) + 16


def _events_of(stream: bytes, most: int, after: bytes | None) -> tuple[list[Event], int | None]:
    """The algorithm of the standard, with the differences that `event_stream` documents."""
    found, retry = list[Event](), None
    data, kind, new_id = list[bytes](), b"", list[bytes]()
    last, count = after, 0
    *ended, _ = re.split(rb"\r\n|\r|\n", stream.removeprefix(b"\xef\xbb\xbf"))
    for line in ended:
        field, value = re.fullmatch(rb"([^:]*)(?::[ ]?(.*))?", line, re.DOTALL).groups(b"")  # type: ignore[union-attr]
        whole = len(line) <= _room(most)
        if field == b"data":
            data.append(value)
        elif field == b"event":
            kind = value if whole else value[: _room(most) - len(line)]
        elif field == b"id" and whole:
            value = value.strip(b" \t")
            if len(value) <= _ID and all(sign >= 32 and sign != 127 for sign in value):
                new_id = [value]
        elif field == b"retry" and whole and re.fullmatch(rb"[0-9]+", value):
            retry = min(int(value), LONGEST_RETRY)
        elif not line:
            if new_id and (new_id[0] or None) != last:
                last, count = new_id[0] or None, -1
            if data:
                count += 1
                joined = b"\n".join(data)
                text = joined if len(joined) <= most else joined[: most + 1][:_FIRST]
                found.append(Event(text, kind.decode(errors="replace") or "message", last, count, len(joined)))
            elif count < 0:
                count = 0
            data, kind, new_id = [], b"", []
    return found, retry

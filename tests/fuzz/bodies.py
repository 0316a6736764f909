"""Bodies of requests: lines, and gzip. Files compressed with gzip."""

import asyncio
import gzip
import io
import os
import zlib
from collections.abc import Iterable, MutableMapping
from datetime import timedelta
from typing import Any

from starlette.requests import Request
from tests.fuzz.target import Input, chunks_of, limits, result_or_error, target

from penstock.collect.files import Content, CorruptFile
from penstock.collect.listen import split_lines
from penstock.web import requests as web_requests
from penstock.web.requests import BodyReader
from penstock.web.responses import Problem

_MEMBERS = 4


@target(b"\x05\x03a\nb\r\n\n12345\n", b"\x02\x01a\n\nabcd\n", b"\x05\x00\r\n\n")
def body_lines(data: bytes) -> None:
    inputs = Input(data)
    most, count, body = 1 + inputs.byte() % 40, 1 + inputs.byte() % 8, inputs.rest()
    whole = [line[:-1] if line.endswith(b"\r") else line for line in body.split(b"\n")]
    expected = [line for line in whole if line]
    found = result_or_error(lambda: split_lines(body, most, count), Problem)
    if isinstance(found, Problem):
        assert found.status in (400, 413)
        assert not expected or len(expected) > count or max(map(len, expected)) > most
    else:
        assert found == expected
        assert 0 < len(found) <= count
        assert max(map(len, found)) <= most


@target(
    b"\x20\x02\x05\x03\x00\x02\x05hello\x00\x01\x03abc\x05",
    b"\x0c\x00\x01\x09\x19" + b"a" * 25 + b"\x08\x00",
    b"\x04\x00\x01\x01\x09123456789\x06",
    b"\xff\x01\x04\x00\x00\x03abc\x00\x03\x0a\xff",
)
def gzip_bodies(data: bytes) -> None:
    """Decompression restores the content, with any members and chunks, or refuses the body."""
    inputs = Input(data)
    most, sizes = 1 + 4 * inputs.byte(), inputs.sized()
    stream, intended = _stream(inputs)
    with limits(web_requests, _MAX_MEMBERS=_MEMBERS):
        whole, cut, single = asyncio.run(_read_all(stream, sizes, most))
    assert whole == cut == single
    assert whole is None or len(whole) <= most
    assert whole == _gunzip(stream, most)
    if intended is not None and whole is not None:
        assert whole == intended


@target(b"\x05\x03hello\x07\x02\x05hello\x00\x01\x03abc\x05", b"\x01\x00\x03\x00\x00\x03abc\x00\x03\x0a\xff")
def gzip_files(data: bytes) -> None:
    """A compressed file is read as `gzip` reads it, from any offset, or it is `Spoilt`."""
    inputs = Input(data)
    step, offset = 1 + inputs.byte(), inputs.byte()
    stream, _ = _stream(inputs)
    try:
        expected = gzip.GzipFile(fileobj=io.BytesIO(stream)).read()
    except (OSError, EOFError, zlib.error):
        expected = None
    descriptor = os.memfd_create("gzip_bodies")
    try:
        os.write(descriptor, stream)
        content = Content(descriptor, compressed=True)
        try:
            begins = content.begins(step)
            while not content.seek(offset):
                pass
            found = b"".join(iter(lambda: content.read(step), b""))
        except CorruptFile:
            assert expected is None
        else:
            assert expected is not None
            assert begins == expected[:step]
            assert found == expected[offset:]
        finally:
            content.close()
    finally:
        os.close(descriptor)


def _stream(inputs: Input) -> tuple[bytes, bytes | None]:
    """Gzip members, possibly damaged; and their content if they are not."""
    parts = [
        (inputs.byte() % 10, inputs.sized() * (1 + inputs.byte() % 9)) for _ in range(inputs.byte() % (_MEMBERS + 2))
    ]
    stream = bytearray(b"".join(gzip.compress(part, level, mtime=0) for level, part in parts))
    damage = inputs.byte() % 4
    if damage == 1 and stream:
        stream[inputs.byte() % len(stream)] ^= 1 + inputs.byte() % 255
    elif damage == 2:
        del stream[inputs.byte() :]
    elif damage == 3:
        stream += inputs.rest()
    return bytes(stream), b"".join(part for _, part in parts) if damage == 0 else None


async def _read_all(stream: bytes, sizes: bytes, most: int) -> list[bytes | None]:
    cuts: list[Iterable[bytes]] = [[stream], chunks_of(stream, sizes), (bytes([one]) for one in stream)]
    return [await _read(chunks, most) for chunks in cuts]


async def _read(chunks: Iterable[bytes], most: int) -> bytes | None:
    messages = iter([{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks])

    async def receive() -> MutableMapping[str, Any]:
        return next(messages, {"type": "http.request", "body": b"", "more_body": False})

    scope = {"type": "http", "method": "POST", "headers": [(b"content-encoding", b"gzip")]}
    reader = BodyReader("the source", most, most, timedelta(seconds=60), gzip=True)
    try:
        async with reader.body(Request(scope, receive)) as body:
            assert reader._held == len(body)
            return body
    except Problem as problem:
        if problem.status not in (400, 413):
            raise
        return None
    finally:
        assert reader._held == 0


def _gunzip(stream: bytes, most: int) -> bytes | None:
    """A simple implementation, member by member."""
    found, members = b"", 0
    if len(stream) > most:
        return None
    while stream:
        inflating = zlib.decompressobj(wbits=31)
        try:
            found += inflating.decompress(stream)
        except zlib.error:
            return None
        members += 1
        if not inflating.eof or len(found) > most or members > _MEMBERS:
            return None
        stream = inflating.unused_data
    return found or None

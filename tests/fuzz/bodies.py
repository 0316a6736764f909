"""Bodies of requests: lines, and what is packed by gzip. And files that are."""

import asyncio
import gzip
import io
import os
import zlib
from collections.abc import Iterable, MutableMapping
from datetime import timedelta
from typing import Any

from starlette.requests import Request
from tests.fuzz.target import Given, pieces, small, target, tried

from penstock.collect.files.folder import Compressed, Spoilt
from penstock.collect.listen import split_lines
from penstock.web import bodies as web_bodies
from penstock.web.bodies import BodyReader
from penstock.web.responses import Problem

_MEMBERS = 4


@target(b"\x05\x03a\nb\r\n\n12345\n", b"\x02\x01a\n\nabcd\n", b"\x05\x00\r\n\n")
def body_lines(data: bytes) -> None:
    given = Given(data)
    most, count, body = 1 + given.byte() % 40, 1 + given.byte() % 8, given.rest()
    whole = [line[:-1] if line.endswith(b"\r") else line for line in body.split(b"\n")]
    expected = [line for line in whole if line]
    found = tried(lambda: split_lines(body, most, count), Problem)
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
def packed(data: bytes) -> None:
    """What is packed is what was packed, in whichever parts and pieces it comes; or it is refused."""
    given = Given(data)
    most, sizes = 1 + 4 * given.byte(), given.some()
    stream, intended = _stream(given)
    with small(web_bodies, _MAX_MEMBERS=_MEMBERS, _CHUNK=16):
        whole, cut, single = asyncio.run(_taken_all(stream, sizes, most))
    assert whole == cut == single
    assert whole is None or len(whole) <= most
    assert whole == _unpacked(stream, most)
    if intended is not None and whole is not None:
        assert whole == intended


@target(b"\x05\x03hello\x07\x02\x05hello\x00\x01\x03abc\x05", b"\x01\x00\x03\x00\x00\x03abc\x00\x03\x0a\xff")
def packed_files(data: bytes) -> None:
    """A file that is packed is read as gzip reads it, from any place; or it is told to be damaged, and nothing else."""
    given = Given(data)
    step, offset = 1 + given.byte(), given.byte()
    stream, _ = _stream(given)
    try:
        expected = gzip.GzipFile(fileobj=io.BytesIO(stream)).read()
    except (OSError, EOFError, zlib.error):
        expected = None
    descriptor = os.memfd_create("packed")
    try:
        os.write(descriptor, stream)
        content = Compressed(descriptor)
        try:
            begins = content.begins(step)
            while not content.seek(offset):
                pass
            found = b"".join(iter(lambda: content.read(step), b""))
        except Spoilt:
            assert expected is None
        else:
            assert expected is not None
            assert begins == expected[:step]
            assert found == expected[offset:]
        finally:
            content.close()
    finally:
        os.close(descriptor)


def _stream(given: Given) -> tuple[bytes, bytes | None]:
    """Parts that are packed, then perhaps damaged; and what they hold if they are not."""
    parts = [(given.byte() % 10, given.some() * (1 + given.byte() % 9)) for _ in range(given.byte() % (_MEMBERS + 2))]
    stream = bytearray(b"".join(gzip.compress(part, level, mtime=0) for level, part in parts))
    harm = given.byte() % 4
    if harm == 1 and stream:
        stream[given.byte() % len(stream)] ^= 1 + given.byte() % 255
    elif harm == 2:
        del stream[given.byte() :]
    elif harm == 3:
        stream += given.rest()
    return bytes(stream), b"".join(part for _, part in parts) if harm == 0 else None


async def _taken_all(stream: bytes, sizes: bytes, most: int) -> list[bytes | None]:
    cuts: list[Iterable[bytes]] = [[stream], pieces(stream, sizes), (bytes([one]) for one in stream)]
    return [await _taken(chunks, most) for chunks in cuts]


async def _taken(chunks: Iterable[bytes], most: int) -> bytes | None:
    messages = iter([{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks])

    async def receive() -> MutableMapping[str, Any]:
        return next(messages, {"type": "http.request", "body": b"", "more_body": False})

    scope = {"type": "http", "method": "POST", "headers": [(b"content-encoding", b"gzip")]}
    taking = BodyReader("the source", most, most, timedelta(seconds=60), gzip=True)
    try:
        async with taking.body(Request(scope, receive)) as body:
            assert taking._held == len(body)
            return body
    except Problem as problem:
        if problem.status not in (400, 413):
            raise
        return None
    finally:
        assert taking._held == 0


def _unpacked(stream: bytes, most: int) -> bytes | None:
    """All at once, part by part."""
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

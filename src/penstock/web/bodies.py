"""Request bodies, plain or gzip, read within limits of size and time."""

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta

from starlette.requests import Request

from penstock.core.errors import Unavailable
from penstock.web.responses import Problem

_MAX_MEMBERS = 100
"""Gzip members in a body. A limit, because empty members cost time and hold no data."""
_CHUNK = 64 << 10


class BodyReader:
    """Reads whole bodies.

    `max_size`: bytes of a body; `memory`: bytes of all bodies in memory; `upload`: time for a body to arrive.
    """

    def __init__(
        self, server: str, max_size: int, memory: int, upload: timedelta, gzip: bool = False, allow_empty: bool = False
    ) -> None:
        self._server, self._max_size, self._memory = server, max_size, memory
        self._upload, self._gzip, self._allow_empty = upload.total_seconds(), gzip, allow_empty
        self._held = 0

    @asynccontextmanager
    async def body(self, request: Request, too_large: Problem | None = None) -> AsyncIterator[bytes]:
        """The whole body. It counts towards `memory` while the context is open.

        `too_large`: the error for a body that is larger than the fact `limit` of this error; the default limit is
        `max_size`.
        """
        gunzip = self._decompressor(request)
        refusal = too_large or self._too_large()
        announced, limit = request.headers.get("content-length", "0"), int(str(refusal.facts["limit"]))
        if not announced.isdecimal() or len(announced) > 20 or int(announced) > self._max_sent(limit, gunzip):
            raise refusal
        body = bytearray()
        try:
            await self._fill(body, request, gunzip, refusal, limit)
            if not body and not self._allow_empty:
                raise Problem(400, "the body", "it is empty", "send a record")
            yield bytes(body)
        finally:
            self._held -= len(body)

    def _max_sent(self, limit: int, gunzip: "_Gunzip | None") -> int:
        """The limit of bytes before decompression: data that compresses badly grows."""
        return limit if gunzip is None else max(limit, self._max_size)

    def _decompressor(self, request: Request) -> "_Gunzip | None":
        coding = ", ".join(request.headers.getlist("content-encoding")).strip().lower() or "identity"
        if coding == "identity":
            return None
        if self._gzip and coding in ("gzip", "x-gzip"):
            return _Gunzip()
        fix = "use gzip, or no compression" if self._gzip else "send it without compression"
        raise Problem(415, "the header content-encoding", f'"{coding[:40]}" is not supported', fix)

    async def _fill(
        self, body: bytearray, request: Request, gunzip: "_Gunzip | None", refusal: Problem, limit: int
    ) -> None:
        sent = 0
        try:
            async with asyncio.timeout(self._upload):
                async for chunk in request.stream():
                    if (sent := sent + len(chunk)) > self._max_sent(limit, gunzip):
                        raise refusal
                    for part in (chunk,) if gunzip is None else gunzip.feed(chunk):
                        if len(body) + len(part) > limit:
                            raise refusal
                        self._add(body, part)
        except TimeoutError:
            fix = "send it faster, or fewer records in a request"
            raise Problem(408, "the body", f"it did not arrive within {self._upload:g} s", fix) from None
        if gunzip is not None and not gunzip.complete:
            raise _broken_gzip("the data ends early")

    def _add(self, body: bytearray, part: bytes) -> None:
        if self._held + len(part) > self._memory:
            raise Unavailable(self._server, "its memory for request bodies is full; the request was rejected", 1.0)
        body += part
        self._held += len(part)

    def _too_large(self) -> Problem:
        why, fix = f"it has more than {self._max_size:,} bytes", "send fewer records in a request, or raise body"
        return Problem(413, "the body", why, fix, {"limit": self._max_size, "option": "body"})


class _Gunzip:
    """Decompresses gzip in chunks, so that the caller can stop at its limit."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(wbits=31)
        self._members = 1
        self._started = False

    @property
    def complete(self) -> bool:
        return self._inflate.eof or not self._started

    def feed(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._inflate.eof:
                if self._members == _MAX_MEMBERS:
                    raise _broken_gzip(f"it has more than {_MAX_MEMBERS} members")
                self._members += 1
                self._inflate = zlib.decompressobj(wbits=31)
            self._started = True
            yield from self._decompressed(data)
            data = self._inflate.unused_data

    def _decompressed(self, data: bytes) -> Iterator[bytes]:
        part = b""
        # Without input, there may still be output. At the end of a member, zlib consumes no more input: without the
        # check of `eof`, the loop would never end.
        while not self._inflate.eof and (data or len(part) == _CHUNK):
            try:
                part = self._inflate.decompress(data, _CHUNK)
            except zlib.error as error:
                raise _broken_gzip(str(error)) from error
            data = self._inflate.unconsumed_tail
            yield part


def _broken_gzip(why: str) -> Problem:
    return Problem(400, "the body", f"it is not valid gzip: {why}", "compress it with gzip, once")


def media_type(request: Request, *accepted: str) -> str:
    """The media type of the body; Problem if it is not accepted."""
    kind, *parameters = request.headers.get("content-type", "").split(";")
    found = kind.strip().lower()
    if found not in accepted:
        why = f"{found} is not supported here" if found else "it is missing"
        raise Problem(415, "the header content-type", why, f"send {' or '.join(accepted)}")
    for parameter in parameters:
        name, _, value = parameter.strip().partition("=")
        if name.lower() == "charset" and value.strip('"').lower() not in ("utf-8", "utf8"):
            raise Problem(415, "the header content-type", f"the charset {value} is not supported", "send UTF-8")
    return found

"""Bodies of requests, read within limits of size and time, compressed or not."""

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta

from starlette.requests import Request

from penstock.core.errors import Unavailable
from penstock.web.problems import Problem

_MAX_MEMBERS = 100
"""So many gzip members may follow each other in a body. Empty ones cost time and bring nothing."""
_CHUNK = 64 << 10


class BodyReader:
    """Reads whole bodies.

    `most`: bytes of a body; `memory`: bytes of all bodies that are held; `upload`: time for a body to arrive.
    """

    def __init__(
        self, server: str, most: int, memory: int, upload: timedelta, gzip: bool = False, allow_empty: bool = False
    ) -> None:
        self._server, self._most, self._memory = server, most, memory
        self._upload, self._gzip, self._allow_empty = upload.total_seconds(), gzip, allow_empty
        self._held = 0

    @asynccontextmanager
    async def body(self, request: Request, too_large: Problem | None = None) -> AsyncIterator[bytes]:
        """The whole body. It counts towards `memory` while the context is open.

        `too_large`: what is raised for a body beyond `limit` of its facts; without it, `most` is the limit.
        """
        gunzip = self._decompressor(request)
        refusal = too_large or self._too_large()
        announced, most = request.headers.get("content-length", "0"), int(str(refusal.facts["limit"]))
        if not announced.isdecimal() or len(announced) > 20 or int(announced) > self._max_sent(most, gunzip):
            raise refusal
        taken = bytearray()
        try:
            await self._fill(taken, request, gunzip, refusal, most)
            if not taken and not self._allow_empty:
                raise Problem(400, "the body", "it is empty", "send a record")
            yield bytes(taken)
        finally:
            self._held -= len(taken)

    def _max_sent(self, most: int, gunzip: "_Gunzip | None") -> int:
        """The bytes that may be sent. Data that compresses badly is larger than its content."""
        return most if gunzip is None else max(most, self._most)

    def _decompressor(self, request: Request) -> "_Gunzip | None":
        coding = ", ".join(request.headers.getlist("content-encoding")).strip().lower() or "identity"
        if coding == "identity":
            return None
        if self._gzip and coding in ("gzip", "x-gzip"):
            return _Gunzip()
        fix = "send it as gzip, or as it is" if self._gzip else "send it as it is"
        raise Problem(415, "the header content-encoding", f'"{coding[:40]}" is not taken', fix)

    async def _fill(
        self, taken: bytearray, request: Request, gunzip: "_Gunzip | None", refusal: Problem, most: int
    ) -> None:
        came = 0
        try:
            async with asyncio.timeout(self._upload):
                async for chunk in request.stream():
                    if (came := came + len(chunk)) > self._max_sent(most, gunzip):
                        raise refusal
                    for part in (chunk,) if gunzip is None else gunzip.feed(chunk):
                        if len(taken) + len(part) > most:
                            raise refusal
                        self._add(taken, part)
        except TimeoutError:
            fix = "send it faster, or less at a time"
            raise Problem(408, "the body", f"it did not arrive within {self._upload:g} s", fix) from None
        if gunzip is not None and not gunzip.whole:
            raise _broken_gzip("it ends too early")

    def _add(self, taken: bytearray, part: bytes) -> None:
        if self._held + len(part) > self._memory:
            raise Unavailable(self._server, "more is being sent to it than it holds at a time; nothing was taken", 1.0)
        taken += part
        self._held += len(part)

    def _too_large(self) -> Problem:
        why, fix = f"it has more than {self._most:,} bytes", "send fewer records in a request, or raise body"
        return Problem(413, "the body", why, fix, {"limit": self._most, "option": "body"})


class _Gunzip:
    """Decompresses gzip in chunks, so that the caller can stop at its limit."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(wbits=31)
        self._members = 1
        self._begun = False

    @property
    def whole(self) -> bool:
        return self._inflate.eof or not self._begun

    def feed(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._inflate.eof:
                if self._members == _MAX_MEMBERS:
                    raise _broken_gzip(f"it has more than {_MAX_MEMBERS} parts")
                self._members += 1
                self._inflate = zlib.decompressobj(wbits=31)
            self._begun = True
            yield from self._decompressed(data)
            data = self._inflate.unused_data

    def _decompressed(self, data: bytes) -> Iterator[bytes]:
        found = b""
        # It may have consumed all input and still hold output. At its end it consumes nothing more: what lies behind it
        # would come back for ever.
        while not self._inflate.eof and (data or len(found) == _CHUNK):
            try:
                found = self._inflate.decompress(data, _CHUNK)
            except zlib.error as error:
                raise _broken_gzip(str(error)) from error
            data = self._inflate.unconsumed_tail
            yield found


def _broken_gzip(why: str) -> Problem:
    return Problem(400, "the body", f"it cannot be unpacked: {why}", "pack it by gzip, once")


def media_type(request: Request, *accepted: str) -> str:
    """The type of the body; a problem when it is not accepted."""
    kind, *parameters = request.headers.get("content-type", "").split(";")
    found = kind.strip().lower()
    if found not in accepted:
        why = f"{found} is not taken here" if found else "it is missing"
        raise Problem(415, "the header content-type", why, f"send {' or '.join(accepted)}")
    for parameter in parameters:
        name, _, value = parameter.strip().partition("=")
        if name.lower() == "charset" and value.strip('"').lower() not in ("utf-8", "utf8"):
            raise Problem(415, "the header content-type", f"the charset {value} is not taken", "send UTF-8")
    return found

"""Bodies of requests, taken within bounds: each in size and time, packed and unpacked; all together in size."""

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta

from starlette.requests import Request

from penstock.core.errors import Unavailable
from penstock.web.problems import Problem

_MEMBERS = 100
"""So many packed parts may follow each other in a body. Empty ones would cost much and bring nothing."""
_AT_A_TIME = 64 << 10


class Bodies:
    """`most`: the bytes of a body; `memory`: of all that are held at a time; `packed`: whether gzip is taken."""

    def __init__(self, whose: str, most: int, memory: int, upload: timedelta, packed: bool) -> None:
        self._whose, self._most, self._memory = whose, most, memory
        self._upload, self._packed = upload.total_seconds(), packed
        self._held = 0

    @asynccontextmanager
    async def body(self, request: Request, record: Problem | None = None) -> AsyncIterator[bytes]:
        """The whole body, which counts for as long as it is used. An empty one is refused.

        `record`: what is said of it if it is one record, and a larger one than its `limit`: see `too_large`.
        """
        unpacking = self._unpacking(request)
        refusal = record or self._too_long()
        announced, most = request.headers.get("content-length", "0"), int(str(refusal.facts["limit"]))
        if not announced.isdecimal() or len(announced) > 20 or int(announced) > self._sent(most, unpacking):
            raise refusal
        taken = bytearray()
        try:
            await self._fill(taken, request, unpacking, refusal, most)
            if not taken:
                raise Problem(400, "the body", "it is empty", "send a record")
            yield bytes(taken)
        finally:
            self._held -= len(taken)

    def _sent(self, most: int, unpacking: "_Unpacking | None") -> int:
        """The bytes that may come. What is packed badly is larger than what it holds."""
        return most if unpacking is None else max(most, self._most)

    def _unpacking(self, request: Request) -> "_Unpacking | None":
        coding = ", ".join(request.headers.getlist("content-encoding")).strip().lower() or "identity"
        if coding == "identity":
            return None
        if self._packed and coding in ("gzip", "x-gzip"):
            return _Unpacking()
        way_out = "send it packed by gzip, or as it is" if self._packed else "send it as it is"
        raise Problem(415, "the header content-encoding", f'"{coding[:40]}" is not taken', way_out)

    async def _fill(
        self, taken: bytearray, request: Request, unpacking: "_Unpacking | None", refusal: Problem, most: int
    ) -> None:
        came = 0
        try:
            async with asyncio.timeout(self._upload):
                async for chunk in request.stream():
                    if (came := came + len(chunk)) > self._sent(most, unpacking):
                        raise refusal
                    for part in (chunk,) if unpacking is None else unpacking.feed(chunk):
                        if len(taken) + len(part) > most:
                            raise refusal
                        self._add(taken, part)
        except TimeoutError:
            way_out = "send it faster, or less at a time"
            raise Problem(408, "the body", f"it did not arrive within {self._upload:g} s", way_out) from None
        if unpacking is not None and not unpacking.whole:
            raise _broken("it ends too early")

    def _add(self, taken: bytearray, part: bytes) -> None:
        if self._held + len(part) > self._memory:
            raise Unavailable(self._whose, "more is being sent to it than it holds at a time; nothing was taken", 1.0)
        taken += part
        self._held += len(part)

    def _too_long(self) -> Problem:
        why, way_out = f"it has more than {self._most:,} bytes", "send fewer records in a request, or raise body="
        return Problem(413, "the body", why, way_out, {"limit": self._most, "option": "body"})


class _Unpacking:
    """Unpacks gzip a little at a time: whoever takes it stops when it has become too much."""

    def __init__(self) -> None:
        self._inflating = zlib.decompressobj(wbits=31)
        self._members = 1
        self._begun = False

    @property
    def whole(self) -> bool:
        return self._inflating.eof or not self._begun

    def feed(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._inflating.eof:
                if self._members == _MEMBERS:
                    raise _broken(f"it has more than {_MEMBERS} parts")
                self._members += 1
                self._inflating = zlib.decompressobj(wbits=31)
            self._begun = True
            yield from self._unpacked(data)
            data = self._inflating.unused_data

    def _unpacked(self, data: bytes) -> Iterator[bytes]:
        found = b""
        # It may have taken all, and still have something to give. At its end it takes nothing more: what lies behind
        # that would come back for ever.
        while not self._inflating.eof and (data or len(found) == _AT_A_TIME):
            try:
                found = self._inflating.decompress(data, _AT_A_TIME)
            except zlib.error as error:
                raise _broken(str(error)) from error
            data = self._inflating.unconsumed_tail
            yield found


def _broken(why: str) -> Problem:
    return Problem(400, "the body", f"it cannot be unpacked: {why}", "pack it by gzip, once")


def lines(body: bytes, most: int, count: int) -> list[bytes]:
    """The records of a body that holds one on each line: so many at most, and so large. All, or a Problem."""
    found: list[bytes] = []
    start, number = 0, 0
    # One after the other: a body of line feeds alone would become millions of lines at once.
    while start < len(body):
        end = body.find(b"\n", start)
        end = len(body) if end < 0 else end
        line = body[start:end].removesuffix(b"\r")
        start, number = end + 1, number + 1
        if len(line) > most:
            raise too_large(f"line {number}", most)
        if line:
            found.append(line)
        if len(found) > count:
            why = f"there are more than {count} records; nothing was taken"
            raise Problem(413, f"line {number}", why, "send less in more requests")
    if not found:
        raise Problem(400, "the body", "it is empty", "send a record on each line")
    return found


def too_large(place: str, most: int, lines: bool = False) -> Problem:
    """What the sender of a record beyond `max_size` is told; `lines`: whether a body may hold one on each line."""
    way_out = "a larger one needs a larger max_size= of the source, and on Kafka max.message.bytes of its channel"
    if lines:
        way_out = f"if it holds one record on each line, post it to ?lines; {way_out}"
    why = f"it is larger than the {most:,} bytes that a record may have; nothing was taken"
    return Problem(413, place, why, way_out, {"limit": most, "option": "max_size"})

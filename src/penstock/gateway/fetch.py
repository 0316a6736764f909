"""Reads entries of a channel by offsets, within limits of count, size and time."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request

from penstock.core.contracts import Channels, Entry, Offsets
from penstock.core.errors import Unaccounted, Unavailable
from penstock.gateway.encode import size
from penstock.gateway.settings import GatewaySettings
from penstock.web.query import Query
from penstock.web.responses import Problem

READ_PARAMETERS = ("max", "max_bytes", "wait", "format")
"""The query parameters of a read."""

_USUAL_RECORDS = 500
_USUAL_BYTES = 1 << 20
_STEP = 16
"""Entries are read in steps: no more than this exceed the limit of bytes."""
_LOOK = 0.5
"""A long poll checks so often whether its client is still connected, in seconds."""
_ANSWER = 10.0
"""Entries below the end of a partition have to arrive within so many seconds."""


@dataclass(frozen=True)
class ReadLimits:
    """How much to read, and how long to wait. `ended`: whether the client is gone."""

    most: int
    bytes: int
    wait: float
    ended: Callable[[], bool]


@dataclass(frozen=True)
class Fetched:
    entries: Sequence[Entry]
    positions: Offsets


class Reader(Protocol):
    def read(self, most: int, wait: float) -> Sequence[Entry]: ...


Start = Callable[[Mapping[int, tuple[int, int]]], Offsets]
"""Where to begin, given the bounds of a channel."""


def fetch(channels: Channels, channel: str, start: Start, limits: ReadLimits) -> Fetched:
    """Entries from the start on. 410 when they are not kept any more, 416 beyond the end.

    A start that moves with the bounds, such as the beginning, is followed.
    """
    bounds = channels.bounds(channel)
    positions = start(bounds)
    _check(channel, positions, bounds)
    try:
        with channels.reader({channel: positions}, only={(channel, partition) for partition in positions}) as reader:

            def owed() -> bool:
                now = reader.positions(channel)
                return any(now.get(partition, 0) < bounds[partition][1] for partition in positions)

            found: list[Entry] = []
            read_some(reader, found, limits, owed)
            if not found and owed() and not limits.ended():
                raise Unavailable(f"channel {channel}", "it does not give what it holds")
            return Fetched(found, dict(reader.positions(channel)))
    except Unaccounted:
        # Retention may have been quicker than this call.
        now = channels.bounds(channel)
        if start(now) != positions:
            return fetch(channels, channel, start, limits)
        _check(channel, positions, now)
        raise


def read_some(source: Reader, into: list[Entry], limits: ReadLimits, owed: Callable[[], bool] = lambda: False) -> None:
    """Wait for the first entries, then read what is available, up to the limits.

    While entries are `owed`, which exist for sure, it waits for them beyond `limits.wait`.
    """
    now = time.monotonic()
    until, late = now + limits.wait, now + _ANSWER
    while True:
        left = until - time.monotonic()
        if left <= 0 and owed():
            left = late - time.monotonic()
        into += source.read(min(_STEP, limits.most), max(0.0, min(left, _LOOK)))
        if into or left <= 0 or limits.ended():
            break
    taken = sum(map(size, into))
    while into and len(into) < limits.most and taken < limits.bytes:
        more = source.read(min(_STEP, limits.most - len(into)), 0)
        if not more:
            return
        taken += sum(map(size, more))
        into += more


def _check(channel: str, positions: Offsets, bounds: Mapping[int, tuple[int, int]]) -> None:
    for partition, offset in positions.items():
        if partition not in bounds:
            fix = f"there are 0 to {len(bounds) - 1}"
            raise Problem(404, f"channel {channel}", f"it has no partition {partition}", fix)
        first, end = bounds[partition]
        place, facts = f"channel {channel}, partition {partition}", {"partition": partition, "first": first, "end": end}
        if offset < first:
            why = f"offset {offset} is not kept any more: {first - offset} offsets are gone"
            raise Problem(410, place, why, f"go on from {first}, and account for what is gone", facts)
        if offset > end:
            raise Problem(416, place, f"offset {offset} lies beyond the end", f"the next record gets {end}", facts)


def read_limits(query: Query, settings: GatewaySettings, ended: Callable[[], bool]) -> ReadLimits:
    return ReadLimits(
        query.number("max", min(_USUAL_RECORDS, settings.records), settings.records, 1),
        query.number("max_bytes", min(_USUAL_BYTES, settings.answer), settings.answer, 1),
        query.seconds("wait", settings.wait) or 0.0,
        ended,
    )


@asynccontextmanager
async def watch_disconnect(request: Request, closing: threading.Event) -> AsyncIterator[Callable[[], bool]]:
    """A function that tells whether the client is gone, or the gateway closes."""
    left = threading.Event()

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        left.set()

    watching = asyncio.create_task(watch())
    try:
        yield lambda: left.is_set() or closing.is_set()
    finally:
        left.set()
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching

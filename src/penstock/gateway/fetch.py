"""Reads entries of a channel by offsets, within limits of count, size and time."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.requests import Request

from penstock.core.contracts import Channels, Entry, Offsets
from penstock.core.errors import Unaccounted, Unavailable
from penstock.gateway.records import size
from penstock.gateway.settings import GatewaySettings
from penstock.web.requests import Query
from penstock.web.responses import Problem, disconnected

READ_PARAMETERS = ("max", "max_bytes", "wait", "format")
"""The query parameters of a read."""

_DEFAULT_RECORDS = 500
_DEFAULT_BYTES = 1 << 20
_STEP = 16
"""Entries are read in steps: at most one step exceeds the limit of bytes."""
_POLL = 0.5
"""Seconds between two checks whether the client of a long poll is still connected."""
_READ_TIMEOUT = 10.0
"""Seconds within which entries below the end of a partition must arrive."""

Read = Callable[[int, float], Sequence[Entry]]
"""As `Reader.read`: at most so many entries, within so many seconds."""
Bounds = Mapping[int, tuple[int, int]]
Start = Callable[[Bounds], Offsets]
"""The first offsets to read, given the bounds of a channel."""


@dataclass(frozen=True)
class ReadLimits:
    """How much to read, and how long to wait. `ended`: whether the client has disconnected."""

    records: int
    bytes: int
    wait: float
    ended: Callable[[], bool]

    @classmethod
    def of(cls, query: Query, settings: GatewaySettings, ended: Callable[[], bool]) -> "ReadLimits":
        return cls(
            query.number("max", min(_DEFAULT_RECORDS, settings.records), settings.records, 1),
            query.number("max_bytes", min(_DEFAULT_BYTES, settings.answer), settings.answer, 1),
            query.seconds("wait", settings.wait) or 0.0,
            ended,
        )


def fetch(channels: Channels, channel: str, start: Start, limits: ReadLimits) -> tuple[Sequence[Entry], Offsets]:
    """Read from the start: the entries, and the next offsets. Problem 410 when they are not kept, 416 beyond the end.

    A start that moves with the bounds, such as the beginning, is computed again.
    """
    bounds = channels.bounds(channel)
    offsets = start(bounds)
    _check(channel, offsets, bounds)
    try:
        with channels.reader({channel: offsets}, only={(channel, partition) for partition in offsets}) as reader:

            def is_behind() -> bool:
                now = reader.positions(channel)
                return any(now.get(partition, 0) < bounds[partition][1] for partition in offsets)

            found: list[Entry] = []
            read_some(reader.read, found, limits, is_behind)
            if not found and is_behind() and not limits.ended():
                raise Unavailable(f"channel {channel}", "it does not deliver the records that it holds")
            return found, dict(reader.positions(channel))
    except Unaccounted:
        # Retention may have removed records since the bounds were read.
        now = channels.bounds(channel)
        if start(now) != offsets:
            return fetch(channels, channel, start, limits)
        _check(channel, offsets, now)
        raise


def read_some(read: Read, into: list[Entry], limits: ReadLimits, is_behind: Callable[[], bool] = lambda: False) -> None:
    """Wait for the first entries, then read what is available, up to the limits.

    While `is_behind`, entries certainly exist: it waits for them beyond `limits.wait`.
    """
    now = time.monotonic()
    until, late = now + limits.wait, now + _READ_TIMEOUT
    while True:
        left = until - time.monotonic()
        if left <= 0 and is_behind():
            left = late - time.monotonic()
        into += read(min(_STEP, limits.records), max(0.0, min(left, _POLL)))
        if into or left <= 0 or limits.ended():
            break
    total = sum(map(size, into))
    while into and len(into) < limits.records and total < limits.bytes:
        more = read(min(_STEP, limits.records - len(into)), 0)
        if not more:
            return
        total += sum(map(size, more))
        into += more


def _check(channel: str, offsets: Offsets, bounds: Bounds) -> None:
    for partition, offset in offsets.items():
        if partition not in bounds:
            raise no_partition(channel, partition, len(bounds))
        first, end = bounds[partition]
        where, facts = f"channel {channel}, partition {partition}", {"partition": partition, "first": first, "end": end}
        if offset < first:
            why = f"offset {offset} is no longer kept: {first - offset} offsets are gone"
            raise Problem(410, where, why, f"continue at {first}, and account for the gap", facts)
        if offset > end:
            raise Problem(416, where, f"offset {offset} is beyond the end", f"the next record gets {end}", facts)


def no_partition(channel: str, partition: int, count: int) -> Problem:
    fix = f"use 0 to {count - 1}" if count > 1 else "use 0"
    return Problem(404, f"channel {channel}", f"partition {partition} not found", fix)


@asynccontextmanager
async def watch_disconnect(request: Request, closing: threading.Event) -> AsyncIterator[Callable[[], bool]]:
    """Yield a function: whether the client has disconnected, or the gateway is closing."""
    left = asyncio.create_task(disconnected(request.receive))
    try:
        yield lambda: left.done() or closing.is_set()
    finally:
        left.cancel()
        await asyncio.wait([left])

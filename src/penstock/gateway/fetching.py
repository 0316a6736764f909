"""Out of a channel, by positions: as soon as there is something, and in answers of a bounded size."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.core.contracts import Channels, Entry, Positions
from penstock.core.errors import Unaccounted, Unavailable
from penstock.gateway.giving import size
from penstock.web.problems import Problem

_STEP = 16
"""Entries are taken in steps: of large ones, no more than this come after an answer is full."""
_LOOK = 0.5
"""Who waits looks up so often whether anybody still wants to know, in seconds."""
_ANSWER = 10.0
"""What the channel says that it holds has to come within so many seconds."""


@dataclass(frozen=True)
class Wish:
    """How much is wanted, and for how long it is waited for. `ended` tells that nobody wants it any more."""

    most: int
    bytes: int
    wait: float
    ended: Callable[[], bool]


@dataclass(frozen=True)
class Fetched:
    entries: Sequence[Entry]
    positions: Positions


class Readable(Protocol):
    def read(self, most: int, wait: float) -> Sequence[Entry]: ...


Start = Callable[[Mapping[int, tuple[int, int]]], Positions]
"""Where to begin, given the bounds of a channel."""


def fetch(channels: Channels, channel: str, start: Start, wish: Wish) -> Fetched:
    """The entries from there on. 410 when they are not kept any more, 416 when they cannot be there yet.

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
            gather(reader, found, wish, owed)
            if not found and owed() and not wish.ended():
                raise Unavailable(f"channel {channel}", "it does not give what it holds")
            return Fetched(found, dict(reader.positions(channel)))
    except Unaccounted:
        # Retention may have been quicker than this call.
        now = channels.bounds(channel)
        if start(now) != positions:
            return fetch(channels, channel, start, wish)
        _check(channel, positions, now)
        raise


def gather(source: Readable, into: list[Entry], wish: Wish, owed: Callable[[], bool] = lambda: False) -> None:
    """Wait for the first entries, then take what is there already, up to what is wished for.

    While some are `owed`, which are there for sure, it is waited for them even if that is not wished for.
    """
    now = time.monotonic()
    until, late = now + wish.wait, now + _ANSWER
    while True:
        left = until - time.monotonic()
        if left <= 0 and owed():
            left = late - time.monotonic()
        into += source.read(min(_STEP, wish.most), max(0.0, min(left, _LOOK)))
        if into or left <= 0 or wish.ended():
            break
    taken = sum(map(size, into))
    while into and len(into) < wish.most and taken < wish.bytes:
        more = source.read(min(_STEP, wish.most - len(into)), 0)
        if not more:
            return
        taken += sum(map(size, more))
        into += more


def _check(channel: str, positions: Positions, bounds: Mapping[int, tuple[int, int]]) -> None:
    for partition, offset in positions.items():
        if partition not in bounds:
            way_out = f"there are 0 to {len(bounds) - 1}"
            raise Problem(404, f"channel {channel}", f"it has no partition {partition}", way_out)
        first, end = bounds[partition]
        place, facts = f"channel {channel}, partition {partition}", {"partition": partition, "first": first, "end": end}
        if offset < first:
            why = f"offset {offset} is not kept any more: {first - offset} offsets are gone"
            raise Problem(410, place, why, f"go on from {first}, and account for what is gone", facts)
        if offset > end:
            raise Problem(416, place, f"offset {offset} lies beyond the end", f"the next record gets {end}", facts)

"""A beat that does not drift: each tick is due at the start plus its number times the interval. No I/O."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta

from penstock.core.clock import Clock
from penstock.core.errors import Misconfigured

Sleep = Callable[[float], Awaitable[object]]
Behind = Callable[[int], None]
"""Told how many ticks were given up, each time that some were."""

BURST = 100
"""So many ticks at most are made up for at once, by who has fallen behind."""
_AT_ONCE = 1e-6  # No clock is finer: what is due as soon as this is due now.


async def ticks(
    every: timedelta, clock: Clock, behind: Behind | None = None, sleep: Sleep = asyncio.sleep, burst: int = BURST
) -> AsyncIterator[int]:
    """0, 1, 2, … without end, each when it is due; the first at once.

    Who takes them too slowly gets those that are overdue one right after the other, but `burst` of them at most: the
    rest is given up, `behind` is told how many that were, and the schedule goes on from there. No number is left out.
    """
    interval = every.total_seconds()
    if interval <= 0:
        raise Misconfigured("the pace", f"a tick every {interval:g} s has no end", "give more than 0 ms")
    start, number, given_up = clock.elapsed(), 0, 0
    while True:
        wait = start + (number + given_up) * interval - clock.elapsed()
        if wait > _AT_ONCE:
            await sleep(wait)
            continue  # A sleep may be short; the clock decides.
        if (overdue := int(-wait / interval)) > burst:
            given_up += overdue - burst
            if behind is not None:
                behind(overdue - burst)
        yield number
        number += 1

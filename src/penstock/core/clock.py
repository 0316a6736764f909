"""Time as an argument, so that tests move it by hand; and the spelling of durations."""

import re
import time
from datetime import timedelta
from typing import Annotated, Protocol

from pydantic import BeforeValidator

Micros = int
"""A moment: microseconds since 1970, UTC. All times between processes are of this kind."""


class Clock(Protocol):
    def now(self) -> Micros:
        """The moment, as the outside world tells it. It may jump."""

    def elapsed(self) -> float:
        """Seconds since some fixed point. It never jumps."""


class SystemClock:
    def now(self) -> Micros:
        return time.time_ns() // 1_000

    def elapsed(self) -> float:
        return time.monotonic()


_UNITS = {
    "ms": 0.001,
    "millisecond": 0.001,
    "s": 1,
    "second": 1,
    "m": 60,
    "minute": 60,
    "h": 3600,
    "hour": 3600,
    "d": 86400,
    "day": 86400,
    "week": 604800,
}


def duration(text: str) -> timedelta:
    """`"10 seconds"`, `"250 ms"`, `"1h"` as a timedelta; ValueError with the accepted units otherwise."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text.lower())
    seconds = match and _UNITS.get(match[2], _UNITS.get(match[2].removesuffix("s")))
    try:
        if match and seconds:
            return timedelta(seconds=float(match[1]) * seconds)
    except OverflowError:
        pass
    raise ValueError(f'"{text}" is not a duration; write a number and a unit, such as "10 seconds", "250 ms", "1 day"')


def _parse(value: object) -> object:
    return duration(value) if isinstance(value, str) else value


Duration = Annotated[timedelta, BeforeValidator(_parse)]
"""A timedelta field of a settings class that is written as text in `penstock.toml`."""


SILENT_AFTER: Micros = 10_000_000
"""A process that has not reported for this long is not running."""


def is_alive(reported: object, now: float) -> bool:
    """Whether a process that reported last at that time is running now. One that never reported is not."""
    return isinstance(reported, int | float) and now - reported <= SILENT_AFTER

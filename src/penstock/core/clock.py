"""Clocks, which are passed as arguments so that tests can set them, and durations as text."""

import re
import time
from datetime import timedelta
from typing import Annotated, Protocol

from pydantic import BeforeValidator

Micros = int
"""A timestamp: microseconds since 1970, UTC. All times that processes exchange have this form."""


def micros(span: timedelta) -> Micros:
    return round(span.total_seconds() * 1e6)


class Clock(Protocol):
    def now(self) -> Micros:
        """The time of day. It may jump."""

    def elapsed(self) -> float:
        """Monotonic time in seconds since some fixed point."""


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
    """Parse `"10 seconds"`, `"250 ms"` or `"1h"`; ValueError with examples for any other text."""
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


def is_running(reported: object, now: float) -> bool:
    """Whether a process that last reported at this time is running. `reported` is None if it never did."""
    return isinstance(reported, int | float) and now - reported <= SILENT_AFTER

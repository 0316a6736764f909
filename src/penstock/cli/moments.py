"""Moments and durations, as people write them on the command line."""

from datetime import datetime, timedelta

from penstock.core.clock import Clock, Micros, SystemClock, duration
from penstock.core.errors import Misconfigured


def moment(option: str, text: str, clock: Clock | None = None) -> Micros:
    """`10m`: so long ago; or a date and time such as 2026-11-15T10:00, of this machine's zone where it tells none."""
    try:
        return (clock or SystemClock()).now() - round(duration(text).total_seconds() * 1_000_000)
    except ValueError:
        pass
    try:
        return round(datetime.fromisoformat(text).timestamp() * 1_000_000)
    except (ValueError, OverflowError, OSError):
        way_out = 'write how long ago, such as "10m" or "2 days", or a time such as 2026-11-15T10:00'
        raise Misconfigured(option, f'"{text}" is no moment', way_out) from None


def span(option: str, text: str, way_out: str = "") -> timedelta:
    """A duration such as `5s` or `10 minutes`."""
    try:
        return duration(text)
    except ValueError as error:
        raise Misconfigured(option, str(error), way_out) from error

"""The header Retry-After."""

from email.utils import parsedate_to_datetime

from penstock.core.clock import Clock

LONGEST_PAUSE = 300.0
"""Seconds: longer pauses are cut to this."""


def retry_after(header: str | None, clock: Clock) -> float | None:
    """Its seconds, given as a number or as a date; None when it is missing or not readable."""
    if header is None:
        return None
    try:
        if header.strip().isdecimal():
            seconds = float(header)
        else:
            seconds = parsedate_to_datetime(header).timestamp() - clock.now() / 1e6
    except (ValueError, OverflowError):
        return None
    return min(max(seconds, 0.0), LONGEST_PAUSE)

"""Whether a process is there, by when it spoke last."""

from penstock.clock import Micros

SILENT_AFTER: Micros = 10_000_000


def alive(at: object, now: float) -> bool:
    """Whether one that spoke then is there now; one that never told a time is not."""
    return isinstance(at, int | float) and now - at <= SILENT_AFTER

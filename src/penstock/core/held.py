"""What a channel holds now, from its beginning or another place to its end."""

from collections.abc import Iterator, Mapping

from penstock.core.contracts import Channels, Entry, Offsets
from penstock.core.errors import Unavailable

Bounds = Mapping[int, tuple[int, int]]
"""Per partition, the first offset that is kept and the one that the next record will get."""

_MOST, _WAIT = 5_000, 1.0
_QUIET_READS = 30


def held(
    channels: Channels, channel: str, start: Offsets | None = None, bounds: Bounds | None = None
) -> Iterator[Entry]:
    """What a channel holds from a start up to its end now, or to that of the bounds.

    Raises Unavailable when it does not answer, or answers and does not give all it holds.
    """
    for entries in batches(channels, channel, start, bounds):
        yield from entries


def batches(
    channels: Channels, channel: str, start: Offsets | None = None, bounds: Bounds | None = None, most: int = _MOST
) -> Iterator[list[Entry]]:
    """The same, some at a time."""
    bounds = channels.bounds(channel) if bounds is None else bounds
    told = start or {}
    starts = {partition: min(max(told.get(partition, low), low), end) for partition, (low, end) in bounds.items()}
    left = {partition: end for partition, (_, end) in bounds.items() if starts[partition] < end}
    if not left:
        return
    quiet = 0
    with channels.reader({channel: starts}, only={(channel, partition) for partition in left}) as reader:
        while left:
            entries = reader.read(most, _WAIT)
            if within := [entry for entry in entries if entry.offset < bounds[entry.partition][1]]:
                yield within
            reached = reader.positions(channel)
            left = {partition: end for partition, end in left.items() if reached[partition] < end}
            quiet = 0 if entries else quiet + 1
            if left and quiet:
                channels.bounds(channel)  # Who gives nothing has to answer at least.
            if left and quiet > _QUIET_READS:
                raise withheld(channel)


def withheld(channel: str) -> Unavailable:
    """That a channel answers, and nothing comes of what it holds."""
    return Unavailable(channel, "it does not give all it holds")

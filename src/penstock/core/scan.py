"""Read what a channel holds now, from its beginning or another offset to its end."""

from collections.abc import Iterator, Mapping

from penstock.core.contracts import Channels, Entry, Offsets
from penstock.core.errors import Unavailable

Bounds = Mapping[int, tuple[int, int]]
"""Per partition, the first offset that is kept and the offset of the next record."""

_BATCH, _WAIT = 5_000, 1.0
_EMPTY_READS = 30


def scan(
    channels: Channels, channel: str, start: Offsets | None = None, bounds: Bounds | None = None
) -> Iterator[Entry]:
    """Read a channel from `start` to its current end, or to the end of `bounds`.

    Raises Unavailable if the channel does not answer, or does not return all that it holds.
    """
    for entries in scan_batches(channels, channel, start, bounds):
        yield from entries


def scan_batches(
    channels: Channels, channel: str, start: Offsets | None = None, bounds: Bounds | None = None, most: int = _BATCH
) -> Iterator[list[Entry]]:
    """As `scan`, in batches of at most `most` entries."""
    bounds = channels.bounds(channel) if bounds is None else bounds
    start = start or {}
    starts = {partition: min(max(start.get(partition, low), low), end) for partition, (low, end) in bounds.items()}
    left = {partition: end for partition, (_, end) in bounds.items() if starts[partition] < end}
    if not left:
        return
    empty = 0
    with channels.reader({channel: starts}, only={(channel, partition) for partition in left}) as reader:
        while left:
            entries = reader.read(most, _WAIT)
            if within := [entry for entry in entries if entry.offset < bounds[entry.partition][1]]:
                yield within
            reached = reader.positions(channel)
            left = {partition: end for partition, end in left.items() if reached[partition] < end}
            empty = 0 if entries else empty + 1
            if left and empty:
                channels.bounds(channel)  # Raises Unavailable if the channel does not answer.
            if left and empty > _EMPTY_READS:
                raise Unavailable(channel, "it does not return all records that it holds")

"""What a channel holds now, from its beginning or another place to its end."""

from collections.abc import Iterator, Mapping

from penstock.contracts import Channels, Entry, Positions

Bounds = Mapping[int, tuple[int, int]]

_MOST, _WAIT = 5_000, 1.0


def held(
    channels: Channels, channel: str, start: Positions | None = None, bounds: Bounds | None = None
) -> Iterator[Entry]:
    """What a channel holds from a start up to its end now, or to that of the bounds."""
    bounds = channels.bounds(channel) if bounds is None else bounds
    starts = {partition: max((start or {}).get(partition, low), low) for partition, (low, _) in bounds.items()}
    left = {partition for partition, (_, end) in bounds.items() if starts[partition] < end}
    if not left:
        return
    with channels.reader({channel: starts}) as reader:
        while left:
            entries = reader.read(_MOST, _WAIT)
            yield from (entry for entry in entries if entry.offset < bounds[entry.partition][1])
            positions = reader.positions(channel)
            left = {partition for partition in left if positions[partition] < bounds[partition][1]}
            if left and not entries:
                channels.bounds(channel)  # Who gives nothing has to answer at least.

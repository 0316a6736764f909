"""How a collector knows, after a crash, what its channel holds already.

A bookmark says which numbers were taken, and up to which positions of the channel this is complete. What the channel
holds beyond them is read from the channel itself. So the answer is exact, however old the bookmark is: the channel is
the truth, and a bookmark only saves reading all of it.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import orjson

from penstock.audit.held import Bounds, held
from penstock.clock import Micros
from penstock.collect.numbers import Numbers
from penstock.contracts import Channels, Positions
from penstock.errors import Refused
from penstock.record import Origin, Record

log = logging.getLogger(__name__)


@dataclass
class Bookmark:
    """How far a collector is.

    Every record that lies before `positions` is in `numbers`, and every number in `numbers` survives a crash.
    `incarnation` is the collector's last life that may have numbered records; `heard`, when the last record came that
    survives a crash.
    """

    numbers: Numbers = field(default_factory=Numbers)
    positions: Mapping[str, Positions] = field(default_factory=dict)
    incarnation: int = 0
    heard: Micros | None = None
    duplicates: int = 0
    """How many arrivals were there already, in all lives of the collector."""

    def add(self, source: str, origin: Origin | None) -> None:
        """A record of this origin is safe; the collector has the name of its source where it numbers itself."""
        if origin is None:
            return
        if origin.sender == source:
            self.incarnation = max(self.incarnation, origin.epoch)
            self.heard = max(self.heard or 0, origin.time)
        else:
            self.numbers.add(origin.sender, origin.epoch, origin.seq)

    def record(self, source: str) -> Record:
        """As it lies in the bookmarks channel."""
        runs: dict[str, dict[str, list[tuple[int, int]]]] = {}
        for sender, epoch, found in self.numbers:
            runs.setdefault(sender, {})[str(epoch)] = list(found)
        document = {
            "incarnation": self.incarnation,
            "heard": self.heard,
            "duplicates": self.duplicates,
            "positions": {
                channel: {str(partition): offset for partition, offset in positions.items()}
                for channel, positions in self.positions.items()
            },
            "runs": runs,
        }
        return Record(orjson.dumps(document), key=source.encode())

    @classmethod
    def of(cls, value: bytes) -> "Bookmark":
        """Refused when it cannot be read."""
        try:
            document = orjson.loads(value)
            numbers = Numbers()
            for sender, epochs in document["runs"].items():
                for epoch, runs in epochs.items():
                    for first, last in runs:
                        numbers.add(sender, int(epoch), first, last)
            positions = {
                channel: {int(partition): int(offset) for partition, offset in offsets.items()}
                for channel, offsets in document["positions"].items()
            }
            heard = document["heard"]
            return cls(
                numbers,
                positions,
                int(document["incarnation"]),
                None if heard is None else int(heard),
                int(document.get("duplicates", 0)),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Refused("a bookmark", f"it cannot be read: {error!r}") from error


def recover(
    channels: Channels,
    bookmarks: str,
    source: str,
    watched: Sequence[str],
    waiting: Iterable[tuple[str, Record]] = (),
) -> Bookmark:
    """The last bookmark of the source, brought up to the end of the channels that it fills. It blocks.

    `waiting` are records that are safe elsewhere, on their way into channels.

    A bookmark that cannot be read, or that claims more than a channel holds (it was made anew, or lost its end), is not
    believed: then the whole channels are read.
    """
    bookmark = _last(channels, bookmarks, source)
    bounds = {channel: channels.bounds(channel) for channel in watched}
    if not _fits(bookmark.positions, bounds):
        log.warning("the bookmark of %s claims more than its channel holds: reading the whole channel", source)
        bookmark = Bookmark(incarnation=bookmark.incarnation, heard=bookmark.heard, duplicates=bookmark.duplicates)
    for channel in watched:
        for entry in held(channels, channel, bookmark.positions.get(channel), bounds[channel]):
            bookmark.add(source, Origin.read(entry.headers))
    for channel, record in waiting:
        if channel in watched:
            bookmark.add(source, record.origin)
    bookmark.positions = {
        channel: {partition: end for partition, (_, end) in partitions.items()}
        for channel, partitions in bounds.items()
    }
    return bookmark


def _last(channels: Channels, bookmarks: str, source: str) -> Bookmark:
    value: bytes | None = None
    for entry in held(channels, bookmarks):
        if entry.key == source.encode():
            value = entry.value
    if value is None:
        return Bookmark()
    try:
        return Bookmark.of(value)
    except Refused as refused:
        log.warning("the bookmark of %s is not used, the whole channel is read: %s", source, refused)
        return Bookmark()


def _fits(positions: Mapping[str, Positions], bounds: Mapping[str, Bounds]) -> bool:
    return all(
        offset <= bounds[channel].get(partition, (0, 0))[1]
        for channel, offsets in positions.items()
        if channel in bounds
        for partition, offset in offsets.items()
    )

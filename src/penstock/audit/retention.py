"""Readers and the time that channels keep their records: who is about to be overtaken, and who was."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from penstock.core.clock import Clock
from penstock.core.contracts import Channels, Group, Offsets
from penstock.core.errors import PenstockError, Unaccounted

Readers = Mapping[str, Mapping[str, Offsets]]
"""Per reader and channel, how far it has read."""

log = logging.getLogger(__name__)

EVERY = 10.0
"""Seconds between two looks: what is kept for minutes is endangered for longer than that."""


@dataclass(frozen=True, slots=True)
class Endangered:
    """A reader, and what it has not read of a channel and is about to lose, or has lost."""

    reader: str
    channel: str
    unread: int
    """Offsets that are kept, unread, and older than the share of their time that was set."""
    left: float | None
    """Seconds until the oldest of them goes; None when nobody can tell."""
    lost: int
    """Offsets that are gone unread."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Retention:
    """Looks at the channels every few seconds."""

    def __init__(self, channels: Channels, clock: Clock, share: float) -> None:
        self._channels, self._clock, self._share = channels, clock, share
        self._looked: float | None = None
        self._found: list[Endangered] = []

    def look(self, readers: Callable[[], Readers]) -> list[Endangered]:
        """Who is endangered, as of the last look. When the channels do not answer, it is as it was before."""
        if self._looked is None or self._clock.elapsed() - self._looked >= EVERY:
            try:
                self._found = list(self._look(readers()))
            except PenstockError as error:
                # That they are away is another alarm, and must not wait for each of them to be asked.
                log.warning("nobody knows what retention is about to take: %s", error)
            self._looked = self._clock.elapsed()
        return self._found

    def _look(self, readers: Readers) -> Iterator[Endangered]:
        for channel in sorted({name for read in readers.values() for name in read}):
            keep, bounds = self._channels.topic(channel).retention, self._channels.bounds(channel)
            young: Offsets = {}
            if keep is not None:
                old = self._clock.now() - round(keep.total_seconds() * self._share * 1e6)
                young = self._channels.since(channel, old)
            for reader, read in readers.items():
                if channel in read:
                    yield from self._judged(reader, channel, read[channel], bounds, young, keep)

    def _judged(
        self,
        reader: str,
        channel: str,
        positions: Offsets,
        bounds: Mapping[int, tuple[int, int]],
        young: Offsets,
        keep: timedelta | None,
    ) -> Iterator[Endangered]:
        lost = sum(gone(positions, bounds).values())
        unread = {
            partition: young[partition] - max(low, positions.get(partition, low))
            for partition, (low, _) in bounds.items()
            if partition in young and max(low, positions.get(partition, low)) < young[partition]
        }
        if not lost and not unread:
            return
        left = None
        if unread and keep is not None:
            starts = {partition: max(bounds[partition][0], positions.get(partition, 0)) for partition in unread}
            left = self._left(channel, starts, keep)
        yield Endangered(reader, channel, sum(unread.values()), left, lost)

    def _left(self, channel: str, starts: Offsets, keep: timedelta) -> float | None:
        oldest = None
        for partition, offset in starts.items():
            try:
                with self._channels.reader({channel: {partition: offset}}, only={(channel, partition)}) as reader:
                    entries = reader.read(1, 1.0)
            except Unaccounted:
                return 0.0  # It went while we looked.
            if entries:
                oldest = min(entries[0].appended, oldest or entries[0].appended)
        return None if oldest is None else max(0.0, keep.total_seconds() - (self._clock.now() - oldest) / 1e6)


def committed(group: Group, names: Collection[str]) -> dict[str, Offsets]:
    """How far a group has read these channels."""
    found: dict[str, dict[int, int]] = {}
    for (channel, partition), offset in group.committed.items():
        if channel in names:
            found.setdefault(channel, {})[partition] = offset
    return dict(found)


def gone(positions: Offsets, bounds: Mapping[int, tuple[int, int]]) -> dict[int, int]:
    """Per partition, how many offsets a reader has not read that are kept no more."""
    return {
        partition: low - positions[partition]
        for partition, (low, _) in bounds.items()
        if partition in positions and positions[partition] < low
    }


def from_what_is_kept(positions: Offsets, bounds: Mapping[int, tuple[int, int]]) -> dict[int, int]:
    """The positions, moved to where the channel begins where that is later."""
    return {partition: max(offset, bounds.get(partition, (0, 0))[0]) for partition, offset in positions.items()}

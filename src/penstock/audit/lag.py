"""How far readers are behind in their channels, and whether retention removes records before they are read."""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from penstock.audit.judge import Doubt
from penstock.core.clock import Clock
from penstock.core.contracts import ChannelPartition, Channels, Group, Offsets
from penstock.core.errors import PenstockError, Unaccounted

Readers = Mapping[str, Mapping[str, Offsets]]
"""Per reader and channel, how far it has read."""

log = logging.getLogger(__name__)

EVERY = 10.0
"""Seconds between two checks: even a retention of minutes is longer."""


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """The lag of a group in one partition."""

    location: ChannelPartition
    committed: int | None
    member: str | None
    first: int | None
    """First and end are None if the channel no longer exists."""
    end: int | None

    @property
    def lag(self) -> int | None:
        """Offsets that are not committed; None without a commit, because it is not known where reading starts."""
        return None if self.committed is None or self.end is None else max(0, self.end - self.committed)

    def to_json(self) -> dict[str, object]:
        channel, partition = self.location
        return {
            "channel": channel,
            "partition": partition,
            "member": self.member,
            "committed": self.committed,
            "first": self.first,
            "end": self.end,
            "lag": self.lag,
        }


@dataclass(frozen=True, slots=True)
class GroupLag:
    """The lag of a group in all its channels."""

    group: Group
    rows: Sequence[PartitionLag]

    @classmethod
    def of(cls, channels: Channels, group: Group, only: Collection[str] | None = None) -> "GroupLag":
        """`only`: these channels alone."""
        holder = {partition: member for member, partitions in group.members.items() for partition in partitions}
        partitions = {*holder, *group.committed}
        bounds = {
            (name, partition): both
            for name in {channel for channel, _ in partitions}.intersection(channels.names())
            for partition, both in channels.bounds(name).items()
        }
        rows = [
            PartitionLag(
                partition,
                group.committed.get(partition),
                holder.get(partition),
                *bounds.get(partition, (None, None)),
            )
            for partition in sorted({*partitions, *bounds})
            if not only or partition[0] in only
        ]
        return cls(group, rows)

    @property
    def lag(self) -> int:
        return sum(row.lag or 0 for row in self.rows)


@dataclass(frozen=True, slots=True)
class Endangered:
    """A reader, and the unread records of a channel that it is about to lose, or has lost."""

    reader: str
    channel: str
    unread: int
    """Offsets that are unread and older than the configured share of their retention."""
    left: float | None
    """Seconds until the oldest of them is removed; None if it is not known."""
    lost: int
    """Offsets that were removed unread."""


class Retention:
    """Checks the channels every few seconds."""

    def __init__(self, channels: Channels, clock: Clock, share: float) -> None:
        self._channels, self._clock, self._share = channels, clock, share
        self._looked: float | None = None
        self._found: list[Endangered] = []

    def look(self, readers: Callable[[], Readers]) -> list[Endangered]:
        """Return the endangered readers as of the last check that the channels answered."""
        if self._looked is None or self._clock.elapsed() - self._looked >= EVERY:
            try:
                self._found = list(self._look(readers()))
            except PenstockError as error:
                # That they are unavailable is another alarm, and must not wait for each channel.
                log.warning("retention cannot be checked: %s", error)
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
                if channel not in read:
                    continue
                lost = sum(gone(read[channel], bounds).values())
                starts = {at: max(low, read[channel].get(at, low)) for at, (low, _) in bounds.items()}
                expiring = {at: start for at, start in starts.items() if start < young.get(at, 0)}
                if lost or expiring:
                    unread = sum(young[at] - start for at, start in expiring.items())
                    left = self._left(channel, expiring, keep) if expiring and keep is not None else None
                    yield Endangered(reader, channel, unread, left, lost)

    def _left(self, channel: str, starts: Offsets, keep: timedelta) -> float | None:
        oldest = None
        for partition, offset in starts.items():
            try:
                with self._channels.reader({channel: {partition: offset}}, only={(channel, partition)}) as reader:
                    entries = reader.read(1, 1.0)
            except Unaccounted:
                return 0.0  # It was removed during the check.
            if entries:
                oldest = min(entries[0].appended, oldest or entries[0].appended)
        return None if oldest is None else max(0.0, keep.total_seconds() - (self._clock.now() - oldest) / 1e6)


def committed(group: Group, names: Collection[str]) -> dict[str, dict[int, int]]:
    """Return the committed offsets of a group in these channels."""
    found: dict[str, dict[int, int]] = {}
    for (channel, partition), offset in group.committed.items():
        if channel in names:
            found.setdefault(channel, {})[partition] = offset
    return found


def gone(positions: Offsets, bounds: Mapping[int, tuple[int, int]]) -> dict[int, int]:
    """Return per partition how many offsets were removed unread."""
    return {
        partition: low - positions[partition]
        for partition, (low, _) in bounds.items()
        if partition in positions and positions[partition] < low
    }


def from_what_is_kept(positions: Offsets, bounds: Mapping[int, tuple[int, int]]) -> dict[int, int]:
    """Return the offsets, but none before the first offset that the channel holds."""
    return {partition: max(offset, bounds.get(partition, (0, 0))[0]) for partition, offset in positions.items()}


class OpenTransactions:
    """Reports transactions that stay open: nothing behind their first offset can be read until they end."""

    def __init__(self, find: Callable[[], Mapping[ChannelPartition, tuple[int, int]]], after: float) -> None:
        """`find`: by partition with an open transaction, its first offset and the end. `after`: seconds."""
        self._find, self._after = find, after
        self._since: dict[tuple[ChannelPartition, int], float] = {}

    def look(self, now: float) -> list[Doubt]:
        """The transactions that have been open for long enough, at a time in seconds."""
        found = self._find()
        self._since = {(at, first): self._since.get((at, first), now) for at, (first, _) in found.items()}
        return [
            Doubt(
                "channel",
                channel,
                f"{channel}, partition {partition}: a transaction is open since offset {first}, so {end - first:,}"
                " entries cannot be read; end its producer, or wait until its transaction times out",
            )
            for (channel, partition), (first, end) in found.items()
            if now - self._since[(channel, partition), first] >= self._after
        ]

    def wait(self, seconds: float) -> list[Doubt]:
        """Wait until those that are open now have ended; the ones that are still open after some seconds."""
        until = time.monotonic() + seconds
        doubts = self.look(time.monotonic())
        first = set(self._since)
        while first & self._since.keys() and time.monotonic() < until:
            time.sleep(0.2)
            doubts = self.look(time.monotonic())
        return doubts

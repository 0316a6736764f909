"""Reads channels in SQLite: polls for commits, often while records come and seldom while none do."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from penstock.channels.common import beyond
from penstock.channels.sqlite.database import Database, Removed
from penstock.core.contracts import ChannelPartition, Entry, Offsets
from penstock.core.errors import PenstockError, Unavailable

_SHORTEST, _LONGEST = 0.001, 0.02
"""Seconds between two polls."""


class SqliteReader:
    def __init__(
        self,
        open: Callable[[str], Database],
        start: Mapping[str, Offsets],
        linger: float,
        only: Collection[ChannelPartition] | None,
    ) -> None:
        self._start, self._linger, self._only = start, linger, only
        self._databases: dict[str, Database] = {}
        self._positions: dict[ChannelPartition, int] = {}
        self._ends: dict[ChannelPartition, int] = {}
        self._ended: dict[ChannelPartition, float] = {}
        """When the end of a partition was last reached."""
        self._turn = 0
        try:
            for channel in start:
                self._databases[channel] = open(channel)
            self._refresh()
        except BaseException:
            self.close()
            raise

    def read(self, most: int, wait: float) -> Sequence[Entry]:
        until = time.monotonic() + wait
        if self._linger:
            self._let_gather(most, until)
        pause = _SHORTEST
        while True:
            if found := self._take(most):
                return found
            if (left := until - time.monotonic()) <= 0:
                return []
            time.sleep(min(left, pause))
            pause = min(2 * pause, _LONGEST)

    def positions(self, channel: str) -> Offsets:
        return {partition: offset for (name, partition), offset in self._positions.items() if name == channel}

    def age(self) -> float:
        self._refresh()
        now = time.monotonic()
        self._ended |= {
            topic_partition: now
            for topic_partition, offset in self._positions.items()
            if offset >= self._ends[topic_partition]
        }
        return max(
            (now - self._ended.get(topic_partition, float("-inf")) for topic_partition in self._positions), default=0.0
        )

    def close(self) -> None:
        for database in self._databases.values():
            database.close()

    def _take(self, most: int) -> list[Entry]:
        self._refresh()
        found: list[Entry] = []
        partitions = list(self._positions)
        # Each call begins with another partition, so that none waits until the others are at their end.
        self._turn += 1
        for turn in range(len(partitions)):
            topic_partition = partitions[(turn + self._turn) % len(partitions)]
            if self._positions[topic_partition] != self._ends[topic_partition]:
                try:
                    entries, self._positions[topic_partition] = self._databases[topic_partition[0]].read(
                        topic_partition[1], self._positions[topic_partition], most - len(found)
                    )
                except PenstockError:
                    if found:
                        break  # It is raised when this partition is the first.
                    raise
                found += entries
            if len(found) >= most:
                break
            self._ended[topic_partition] = time.monotonic()
        return found

    def _let_gather(self, most: int, until: float) -> None:
        """Wait until there are `most` entries, or the first of them has waited for `linger` seconds."""
        pause, seen = min(_LONGEST, self._linger / 4), None
        while (now := time.monotonic()) < until:
            self._refresh()
            waiting = sum(self._ends[topic_partition] - offset for topic_partition, offset in self._positions.items())
            if waiting and seen is None:
                seen = now
            if waiting >= most or (seen is not None and now - seen >= self._linger):
                return
            time.sleep(min(pause, until - now))

    def _refresh(self) -> None:
        """Learn what was written since the last call: new ends, and new partitions, which are read from the start."""
        for channel, database in self._databases.items():
            if not database.changed():
                continue
            try:
                database.topic()
            except Removed as error:
                raise Unavailable(f"channel {channel}", "it was removed while it was read") from error
            bounds, start = database.bounds(), self._start[channel]
            for partition, (first, end) in bounds.items():
                if self._only is None or (channel, partition) in self._only:
                    self._positions.setdefault((channel, partition), start.get(partition, first))
                    self._ends[channel, partition] = end
            for partition, offset in start.items():
                wanted = self._only is None or (channel, partition) in self._only
                if partition not in bounds and offset > 0 and wanted:
                    raise beyond(channel, partition, offset, 0)

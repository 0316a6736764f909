"""The reader of all binders that poll: memory://, file:// and redis://."""

import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from penstock.channels.common import another, beyond
from penstock.core.contracts import ChannelPartition, Entry, Offsets
from penstock.core.errors import PenstockError
from penstock.core.scan import Bounds


class Log(Protocol):
    """The part of a binder that a reader needs."""

    def state(self, channel: str) -> tuple[str, Bounds] | None:
        """The id and the bounds of a channel; None if nothing was written since the last call."""

    def read(self, channel: str, partition: int, offset: int | None, most: int) -> tuple[str, Sequence[Entry], int]:
        """The id of the channel, entries from an offset or from the beginning, and the offset to read next.

        Raises Unaccounted if the offset is not kept, or beyond the end.
        """

    def wait(self, positions: Mapping[ChannelPartition, int], seconds: float) -> None:
        """Wait until there may be more at these offsets, at most for `seconds`."""


class LogReader:
    """Reads from `start`; a partition without an offset there, such as an added one, is read from its beginning."""

    def __init__(self, log: Log, start: Mapping[str, Offsets], only: Collection[ChannelPartition] | None) -> None:
        self._log, self._start, self._only = log, start, only
        self._ids: dict[str, str] = {}
        self._next: dict[ChannelPartition, int] = {}
        self._ends: dict[ChannelPartition, int] = {}
        self._ended: dict[ChannelPartition, float] = {}
        """When the end of a partition was last reached."""
        self._unread: set[ChannelPartition] = set()
        """Partitions to read from their beginning, which retention can move until then."""
        self._turn = 0
        self._refresh()

    def read(self, most: int, wait: float) -> Sequence[Entry]:
        until = time.monotonic() + wait
        while True:
            self._refresh()
            if most and (found := self._take(most)):
                return found
            if (left := until - time.monotonic()) <= 0:
                return []
            self._log.wait(self._next, left)

    def positions(self, channel: str) -> Offsets:
        return {partition: offset for (name, partition), offset in self._next.items() if name == channel}

    def age(self) -> float:
        self._refresh()
        now = time.monotonic()
        self._ended |= {one: now for one, offset in self._next.items() if offset == self._ends[one]}
        return max((now - self._ended.get(one, -math.inf) for one in self._next), default=0.0)

    def _take(self, most: int) -> list[Entry]:
        found: list[Entry] = []
        if most == 0:
            return found
        partitions = list(self._next)
        # Each call begins with another partition, so that none waits until the others are at their end.
        self._turn += 1
        for turn in range(len(partitions)):
            one = partitions[(turn + self._turn) % len(partitions)]
            if self._next[one] != self._ends[one]:
                try:
                    found += self._read(one, most - len(found))
                except PenstockError:
                    if found:
                        break  # It is raised when this partition is the first.
                    raise
            if len(found) >= most or self._next[one] < self._ends[one]:
                break  # The log has limited the size of the answer.
            self._ended[one] = time.monotonic()
        return found

    def _read(self, one: ChannelPartition, most: int) -> Sequence[Entry]:
        offset = None if one in self._unread else self._next[one]
        id, entries, self._next[one] = self._log.read(*one, offset, most)
        self._require(one[0], id)
        if entries:
            self._unread.discard(one)
        return entries

    def _refresh(self) -> None:
        """Learn of new ends and new partitions."""
        for channel, start in self._start.items():
            if (state := self._log.state(channel)) is None:
                continue
            id, bounds = state
            self._require(channel, id)
            for partition, offset in start.items():
                if partition not in bounds and offset > 0 and self._wanted((channel, partition)):
                    raise beyond(channel, partition, offset, 0)
            for partition, (low, end) in bounds.items():
                if not self._wanted(one := (channel, partition)):
                    continue
                if one not in self._next and partition not in start:
                    self._unread.add(one)
                if one in self._unread:
                    self._next[one] = low
                self._next.setdefault(one, start.get(partition, low))
                self._ends[one] = end
                if self._next[one] == end:
                    self._unread.discard(one)

    def _require(self, channel: str, id: str) -> None:
        if self._ids.setdefault(channel, id) != id:
            raise another(channel)

    def _wanted(self, one: ChannelPartition) -> bool:
        return self._only is None or one in self._only

"""A stretch of a channel in the order in which it came, over all its partitions, by one reader."""

import heapq
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack

from penstock.core.clock import Micros
from penstock.core.contracts import Channels, Entry, Reader
from penstock.core.held import withheld

Stretch = Mapping[int, tuple[int, int]]
"""Per partition, from where and up to where."""

_MOST, _WAIT = 1_000, 1.0
_QUIET_READS = 30
_SHARE = 2 << 20
"""The bytes of a partition that are held while others lag behind: more than a broker gives of one at once."""
_ENTRY = 500
"""What an entry takes beside its content."""


class Merged:
    """The entries of a stretch by the time of their coming; those of a partition as they lie there.

    An entry is told when every partition that is not at its end has one, for that may be older. Until then those of the
    others are held: of each partition `share` bytes, and a read. One that has more is not read on while others lag.
    """

    def __init__(self, channels: Channels, channel: str, chosen: Stretch, share: int = _SHARE) -> None:
        self._channels, self._channel, self._share = channels, channel, share
        self._next = {partition: start for partition, (start, _) in chosen.items()}
        self._ends = {partition: end for partition, (_, end) in chosen.items()}
        self._held: dict[int, deque[Entry]] = {partition: deque() for partition in chosen}
        self._bytes = dict.fromkeys(chosen, 0)
        self._open = ExitStack()
        self._reader: Reader | None = None
        self._read: set[int] = set()
        self._quiet = 0

    def __enter__(self) -> Iterator[Entry]:
        return self._entries()

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _entries(self) -> Iterator[Entry]:
        heads: list[tuple[Micros, int]] = []
        lagging = set(self._held)
        while True:
            while lagging:
                self._read_on(lagging)
                for partition in [one for one in lagging if self._held[one]]:
                    heapq.heappush(heads, (self._held[partition][0].appended, partition))
                lagging = {one for one in lagging if not self._held[one] and not self._ended(one)}
            if not heads:
                return
            _, partition = heapq.heappop(heads)
            held = self._held[partition]
            entry = held.popleft()
            self._bytes[partition] -= _size(entry)
            yield entry
            if held:
                heapq.heappush(heads, (held[0].appended, partition))
            elif not self._ended(partition):
                lagging.add(partition)

    def _read_on(self, lagging: set[int]) -> None:
        reader = self._fitting(lagging)
        for entry in reader.read(_MOST, _WAIT):
            if entry.offset < self._ends[entry.partition]:
                self._held[entry.partition].append(entry)
                self._bytes[entry.partition] += _size(entry)
        reached = reader.positions(self._channel)
        moved = any(reached[one] > self._next[one] for one in self._read if not self._ended(one))
        self._next |= {one: reached[one] for one in self._read}
        self._quiet = 0 if moved else self._quiet + 1
        if self._quiet:
            self._channels.bounds(self._channel)  # Who gives nothing has to answer at least.
        if self._quiet > _QUIET_READS:
            raise withheld(self._channel)

    def _fitting(self, lagging: set[int]) -> Reader:
        """A reader of all that lag, and of none that has more than its share; the one that is open, if it is so."""
        crowded = any(self._bytes[one] > self._share for one in self._read)
        if self._reader is None or crowded or not lagging <= self._read:
            self._open.close()
            self._read = {one for one, size in self._bytes.items() if size <= self._share and not self._ended(one)}
            start = {self._channel: {one: self._next[one] for one in self._read}}
            places = {(self._channel, one) for one in self._read}
            self._reader = self._open.enter_context(self._channels.reader(start, only=places))
        return self._reader

    def _ended(self, partition: int) -> bool:
        return self._next[partition] >= self._ends[partition]


def _size(entry: Entry) -> int:
    content = len(entry.key or b"") + len(entry.value or b"")
    return _ENTRY + content + sum(len(name) + len(value) for name, value in entry.headers)

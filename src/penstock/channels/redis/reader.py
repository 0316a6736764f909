"""Reads from Redis by offsets of our own. Raises when records are lost."""

import math
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from penstock.channels.checks import beyond, overtaken
from penstock.channels.redis.client import Arguments, Server, key_of
from penstock.channels.redis.codec import unpack
from penstock.core.contracts import ChannelPartition, Entry, Offsets
from penstock.core.errors import Unaccounted, Unavailable

_MOST = 2_000
_BYTES = 1 << 20
"""Records and bytes of one fetch; it can have one record more."""
_PLENTY = 1 << 19
"""Bytes from which on lingering entries are fetched at once."""
_SLICE = 1.0
"""Seconds after which a waiting reader checks for new partitions."""


class RedisReader:
    def __init__(
        self,
        server: Server,
        start: Mapping[str, dict[int, int]],
        linger: float,
        only: Collection[ChannelPartition] | None,
        beginning: Collection[ChannelPartition] = (),
    ) -> None:
        self._server, self._linger, self._only = server, linger, only
        self._next = {channel: dict(positions) for channel, positions in start.items()}
        self._ready: deque[Entry] = deque()
        # The offset of the next fetch: behind the ready entries and empty offsets.
        self._fetched = {channel: dict(positions) for channel, positions in start.items()}
        # Partitions to read from their beginning: retention can move it before the first read.
        self._beginning = set(beginning)
        self._generations: dict[str, bytes] = {}
        self._turn = 0
        self._earliest = -math.inf
        # The time of the last fetch, if it returned all entries; the time when all were read.
        self._whole = -math.inf
        self._caught_up = -math.inf

    def read(self, most: int, wait: float) -> Sequence[Entry]:
        until = time.monotonic() + wait
        while not self._ready:
            if (early := self._earliest - time.monotonic()) > 0:
                time.sleep(max(0.0, min(early, until - time.monotonic())))
                if time.monotonic() < self._earliest:
                    return []
            self._fetch()
            left = until - time.monotonic()
            if not self._ready:
                if left <= 0:
                    return []
                self._wait(min(left, _SLICE))
        return self._hand_out(most)

    def positions(self, channel: str) -> Offsets:
        return dict(self._next[channel])

    def age(self) -> float:
        return time.monotonic() - self._caught_up

    def _hand_out(self, most: int) -> list[Entry]:
        found = [self._ready.popleft() for _ in range(min(most, len(self._ready)))]
        for entry in found:
            self._next[entry.channel][entry.partition] = entry.offset + 1
        self._all_handed_out()
        return found

    def _all_handed_out(self) -> None:
        if not self._ready:
            self._next = {channel: dict(positions) for channel, positions in self._fetched.items()}
            self._caught_up = max(self._caught_up, self._whole)

    def _wait(self, seconds: float) -> None:
        wanted = [
            (channel, partition, position)
            for channel, positions in self._fetched.items()
            for partition, position in positions.items()
        ]
        if wanted:
            self._server.ring(wanted, seconds)
        else:
            time.sleep(seconds)

    def _fetch(self) -> None:
        began = time.monotonic()
        self._turn += 1
        channels = list(self._fetched)
        share = _BYTES // max(1, len(channels))
        calls: list[tuple[list[str], Arguments]] = [
            ([key_of(channel)], ["fetch", _MOST, share, *self._in_turn(self._fetched[channel])]) for channel in channels
        ]
        whole, moved, size = True, False, 0
        for channel, answer in zip(channels, self._server.run(calls), strict=True):
            if answer is None:
                raise Unavailable(f"channel {channel}", f"{self._server.server_name} has no such channel")
            generation, count, *parts = answer
            if self._generations.setdefault(channel, generation) != generation:
                raise Unaccounted(channel, (), "it was removed while it was read, and created again")
            for partition, low, end, reached, ids, packed in parts:
                if (channel, partition) in self._beginning and self._fetched[channel][partition] < low:
                    self._fetched[channel][partition] = self._next[channel][partition] = low
                    moved = True
                    continue
                self._beginning.discard((channel, partition))
                self._require(channel, partition, low, end)
                self._ready.extend(_entries(channel, partition, ids, packed))
                self._fetched[channel][partition] = reached
                whole, size = whole and reached == end, size + len(packed)
            if self._only is None:
                for partition in range(count):
                    if partition not in self._fetched[channel]:
                        self._fetched[channel][partition] = self._next[channel][partition] = 0
                        whole = False
        self._whole = began if whole and not moved else -math.inf
        self._earliest = began + self._linger if size < _PLENTY else -math.inf
        self._all_handed_out()
        if moved and not self._ready:
            self._fetch()

    def _in_turn(self, positions: Offsets) -> list[int]:
        """Partitions and offsets. Each call begins with another partition, so that none waits for the others."""
        flat = sorted(positions.items())
        first = self._turn % max(1, len(flat))
        return [number for pair in flat[first:] + flat[:first] for number in pair]

    def _require(self, channel: str, partition: int, low: int, end: int) -> None:
        stands = self._fetched[channel][partition]
        if stands < low:
            raise overtaken(channel, partition, stands, low)
        if stands > end:
            raise beyond(channel, partition, stands, end)


def _entries(channel: str, partition: int, ids: bytes, packed: Any) -> Iterator[Entry]:
    at = 0
    for one in ids.split():
        first, _, timestamp = one.partition(b"-")
        key, value, headers, at = unpack(packed, at)
        yield Entry(channel, partition, int(first) - 1, int(timestamp), key, value, headers)

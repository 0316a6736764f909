"""Channels on Redis: a stream for each partition, with offsets of our own.

Appends delete what retention does not keep, some at a time: a partition without appends keeps its records.
"""

import math
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, closing, contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from penstock.channels.common import another, beyond, differences, overtaken, posting, spelled, unpack
from penstock.channels.leases import LEASE, GroupState, LeasedGroups
from penstock.channels.redis.client import GROUPS, NAMES, Address, Arguments, Server, key_of
from penstock.channels.redis.sender import RedisSender
from penstock.core.clock import Micros, duration, micros
from penstock.core.contracts import (
    ChannelPartition,
    EnsureResult,
    Entry,
    Offsets,
    Promise,
    Topic,
)
from penstock.core.errors import Misconfigured, Unavailable

Answer = TypeVar("Answer")

_MOST = 2_000
_BYTES = 1 << 20
"""Records and bytes of one fetch; it can have one record more."""
_SLICE = 1.0
"""Seconds after which a waiting reader checks for new partitions."""

_DURABLE = Promise(
    durable=True,
    replay=True,
    description="a record is acknowledged once it is in the append-only file of one Redis: it survives a kill -9 of "
    "Redis, and a power cut only with appendfsync always; all records are in memory",
)
_VOLATILE = Promise(
    durable=False,
    replay=True,
    description="records are lost when Redis ends, unless its append-only file is on; all records are in memory",
)


def at(address: str, _: object = None) -> "RedisChannels":
    """`redis://host:port/db`, or `rediss://` with TLS. `?volatile=yes` accepts a Redis without an append-only file."""
    return RedisChannels(address)


class RedisChannels(LeasedGroups):
    """Channels as streams of one server."""

    def __init__(self, url: str, lease: timedelta = LEASE) -> None:
        self._url, self.lease = url, lease
        self._address = Address(url)
        self._lock = threading.Lock()
        self._connection: Server | None = None

    def __reduce__(self) -> tuple[type["RedisChannels"], tuple[str, timedelta]]:
        return RedisChannels, (self._url, self.lease)

    @property
    def promise(self) -> Promise:
        return _VOLATILE if self._address.volatile else _DURABLE

    @property
    def where(self) -> str:
        return self._address.where

    # --- topics

    def ensure(self, topics: Sequence[Topic]) -> EnsureResult:
        self._server().check()
        made, extended, differences = [], [], []
        for topic in topics:
            fields = _fields_of(topic, uuid.uuid4().hex)
            flat = [part for pair in fields.items() for part in pair]
            done = self._server().one("ensure", [key_of(topic.name), NAMES], topic.partitions, *flat)
            if done == b"made":
                made.append(topic.name)
            elif done == b"extended":
                extended.append(topic.name)
            differences += _differences(topic, self.topic(topic.name))
        return EnsureResult(tuple(made), tuple(extended), tuple(differences))

    def names(self) -> list[str]:
        return self._server().members(NAMES)

    def topic(self, channel: str) -> Topic:
        return _topic_of(channel, self._held(channel))

    def topic_id(self, channel: str) -> str:
        return self._held(channel)["id"].decode()

    def remove(self, channel: str) -> None:
        if self._server().one("remove", [key_of(channel), NAMES]) is None:
            raise self._absent(channel)
        self.forget_channel(channel)

    def _held(self, channel: str) -> dict[str, bytes]:
        if held := self._server().hash(key_of(channel)):
            return held
        raise self._absent(channel)

    def _absent(self, channel: str) -> Unavailable:
        return Unavailable(f"channel {channel}", f"{self._address.server_name} has no such channel")

    # --- in

    @asynccontextmanager
    async def sender(self) -> AsyncIterator[RedisSender]:
        sender = RedisSender(Server(self._address))
        try:
            yield sender
        finally:
            await sender.close()

    def poster(self) -> AbstractContextManager[Callable[[str, bytes, bytes], None]]:
        return posting(self.sender)

    # --- out

    @contextmanager
    def reader(
        self, start: Mapping[str, Offsets], only: Collection[ChannelPartition] | None = None
    ) -> Iterator["RedisReader"]:
        begin = {channel: self._from(channel, positions, only) for channel, positions in start.items()}
        beginning = {(channel, one) for channel, found in begin.items() for one in found if one not in start[channel]}
        with closing(Server(self._address)) as server:
            yield RedisReader(server, begin, only, beginning)

    def _from(self, channel: str, positions: Offsets, only: Collection[ChannelPartition] | None) -> dict[int, int]:
        """The first offset to read of each partition; by default its beginning."""
        starts = {partition: low for partition, (low, _) in self.bounds(channel).items()} | dict(positions)
        return {
            partition: offset for partition, offset in starts.items() if only is None or (channel, partition) in only
        }

    def bounds(self, channel: str) -> Mapping[int, tuple[int, int]]:
        held = self._held(channel)
        return {
            partition: (int(held.get(f"low:{partition}", 0)), int(held.get(f"next:{partition}", 0)))
            for partition in range(int(held["partitions"]))
        }

    def since(self, channel: str, timestamp: Micros) -> Offsets:
        found = self._server().one("since", [key_of(channel)], timestamp)
        if found is None:
            raise self._absent(channel)
        return dict(enumerate(found))

    # --- groups

    def group_states(self) -> tuple[Mapping[str, GroupState], Micros]:
        documents, now = self._server().groups()
        return {name: GroupState.loads(document) for name, document in documents.items()}, now

    def change(self, group: str, change: Callable[[GroupState, Micros], Answer]) -> Answer:
        """Change the state of a group; retry when another process has changed it."""
        server = self._server()
        while True:
            documents, now = server.groups(group)
            before = documents.get(group, b"")
            state = GroupState.loads(before)
            answer = change(state, now)
            after = state.dumps() if state.exists(now) else b""
            if after == before or server.one("swap", [GROUPS], group, before, after):
                return answer

    # --- the client

    def _server(self) -> Server:
        """One connection for all queries."""
        with self._lock:
            if self._connection is None:
                self._connection = Server(self._address)
            return self._connection


# --- topics: a hash for each, with times in microseconds

_SETTINGS = {"compaction.lag": ("lag", "1 hour"), "deletions.keep": ("deletions", "1 day")}
"""Settings of compacted channels: how long a replaced record stays, and how long the deletion of a key does."""


def _fields_of(topic: Topic, generation: str) -> dict[str, str]:
    found = {"id": generation}
    if topic.retention is not None:
        found["keep"] = str(micros(topic.retention))
    if topic.compacted:
        for setting, (name, usual) in _SETTINGS.items():
            try:
                found[name] = str(micros(duration(topic.config.get(setting, usual))))
            except ValueError as error:
                raise Misconfigured(f"channel {topic.name}, {setting}", str(error)) from error
    return found


def _topic_of(name: str, held: Mapping[str, bytes]) -> Topic:
    return Topic(
        name,
        int(held["partitions"]),
        1,
        "lag" in held,
        _span(held["keep"]) if "keep" in held else None,
        {setting: spelled(_span(held[of_it])) for setting, (of_it, _) in _SETTINGS.items() if of_it in held},
    )


def _differences(declared: Topic, there: Topic) -> list[str]:
    """The differences between a channel and its declaration."""
    found = list(differences(there, declared, "Redis", _SETTINGS))
    for setting, value in declared.config.items():
        if (
            setting in _SETTINGS
            and there.compacted
            and declared.compacted
            and duration(value) != duration(there.config[setting])
        ):
            found.append(f"channel {declared.name} has {setting}={there.config[setting]}, and {value} is declared")
    return found


def _span(micros: bytes) -> timedelta:
    return timedelta(microseconds=int(micros))


# --- reading


class RedisReader:
    def __init__(
        self,
        server: Server,
        start: Mapping[str, dict[int, int]],
        only: Collection[ChannelPartition] | None,
        beginning: Collection[ChannelPartition] = (),
    ) -> None:
        self._server, self._only = server, only
        self._next = {channel: dict(positions) for channel, positions in start.items()}
        self._ready: deque[Entry] = deque()
        # The offset of the next fetch: behind the ready entries and empty offsets.
        self._fetched = {channel: dict(positions) for channel, positions in start.items()}
        # Partitions to read from their beginning: retention can move it before the first read.
        self._beginning = set(beginning)
        self._generations: dict[str, bytes] = {}
        self._turn = 0
        # The time of the last fetch, if it returned all entries; the time when all were read.
        self._whole = -math.inf
        self._caught_up = -math.inf

    def read(self, most: int, wait: float) -> Sequence[Entry]:
        until = time.monotonic() + wait
        while not self._ready:
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
        whole, moved = True, False
        for channel, answer in zip(channels, self._server.run(calls), strict=True):
            if answer is None:
                raise Unavailable(f"channel {channel}", f"{self._server.server_name} has no such channel")
            generation, count, *parts = answer
            if self._generations.setdefault(channel, generation) != generation:
                raise another(channel)
            for partition, low, end, reached, ids, packed in parts:
                if (channel, partition) in self._beginning and self._fetched[channel][partition] < low:
                    self._fetched[channel][partition] = self._next[channel][partition] = low
                    moved = True
                    continue
                self._beginning.discard((channel, partition))
                self._require(channel, partition, low, end)
                self._ready.extend(_entries(channel, partition, ids, packed))
                self._fetched[channel][partition] = reached
                whole = whole and reached == end
            if self._only is None:
                for partition in range(count):
                    if partition not in self._fetched[channel]:
                        self._fetched[channel][partition] = self._next[channel][partition] = 0
                        whole = False
        self._whole = began if whole and not moved else -math.inf
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

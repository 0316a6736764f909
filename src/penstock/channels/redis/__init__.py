"""Channels on Redis: a stream for each partition, with offsets of our own.

Appends delete what retention does not keep, some at a time: a partition without appends keeps its records.
"""

import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, closing, contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from penstock.channels.common import beyond, differences, durations, overtaken, spelled, unpack
from penstock.channels.leases import LEASE, GroupState, LeasedGroups
from penstock.channels.log_reader import LogReader
from penstock.channels.redis.client import GROUPS, NAMES, Address, Server, key_of
from penstock.channels.redis.sender import RedisSender
from penstock.core.clock import Micros, micros
from penstock.core.contracts import ChannelPartition, EnsureResult, Entry, Offsets, Promise, Topic
from penstock.core.errors import Unavailable
from penstock.core.scan import Bounds

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
        self.where, self.promise = self._address.where, _VOLATILE if self._address.volatile else _DURABLE
        self._server = Server(self._address)
        """For all queries."""

    def __reduce__(self) -> tuple[type["RedisChannels"], tuple[str, timedelta]]:
        return RedisChannels, (self._url, self.lease)

    # --- topics

    def ensure(self, topics: Sequence[Topic]) -> EnsureResult:
        self._server.check()
        made, extended, different = [], [], list[str]()
        for topic in topics:
            fields = _fields_of(topic, uuid.uuid4().hex)
            flat = [part for pair in fields.items() for part in pair]
            done = self._server.one("ensure", [key_of(topic.name), NAMES], topic.partitions, *flat)
            if done == b"made":
                made.append(topic.name)
            elif done == b"extended":
                extended.append(topic.name)
            different += differences(self.topic(topic.name), topic, "Redis", _SETTINGS)
        return EnsureResult(tuple(made), tuple(extended), tuple(different))

    def names(self) -> list[str]:
        return self._server.members(NAMES)

    def topic(self, channel: str) -> Topic:
        return _topic_of(channel, _held(self._server, channel))

    def topic_id(self, channel: str) -> str:
        return _held(self._server, channel)["id"].decode()

    def remove(self, channel: str) -> None:
        if self._server.one("remove", [key_of(channel), NAMES]) is None:
            raise _absent(self._server, channel)
        self.forget_channel(channel)

    # --- in

    def sender(self) -> AbstractAsyncContextManager[RedisSender]:
        return aclosing(RedisSender(Server(self._address)))

    # --- out

    @contextmanager
    def reader(
        self, start: Mapping[str, Offsets], only: Collection[ChannelPartition] | None = None
    ) -> Iterator[LogReader]:
        with closing(Server(self._address)) as server:
            yield LogReader(RedisLog(server), start, only)

    def bounds(self, channel: str) -> Mapping[int, tuple[int, int]]:
        return _bounds_of(_held(self._server, channel))

    def since(self, channel: str, timestamp: Micros) -> Offsets:
        found = self._server.one("since", [key_of(channel)], timestamp)
        if found is None:
            raise _absent(self._server, channel)
        return dict(enumerate(found))

    # --- groups

    def group_states(self) -> tuple[Mapping[str, GroupState], Micros]:
        documents, now = self._server.groups()
        return {name: GroupState.loads(document) for name, document in documents.items()}, now

    def change(self, group: str, change: Callable[[GroupState, Micros], Answer]) -> Answer:
        """Change the state of a group; retry when another process has changed it."""
        while True:
            documents, now = self._server.groups(group)
            before = documents.get(group, b"")
            state = GroupState.loads(before)
            answer = change(state, now)
            after = state.dumps() if state.exists(now) else b""
            if after == before or self._server.one("swap", [GROUPS], group, before, after):
                return answer


def _held(server: Server, channel: str) -> dict[str, bytes]:
    if held := server.hash(key_of(channel)):
        return held
    raise _absent(server, channel)


def _absent(server: Server, channel: str) -> Unavailable:
    return Unavailable(f"channel {channel}", f"{server.server_name} has no such channel")


def _bounds_of(held: Mapping[str, bytes]) -> Bounds:
    return {
        partition: (int(held.get(f"low:{partition}", 0)), int(held.get(f"next:{partition}", 0)))
        for partition in range(int(held["partitions"]))
    }


# --- topics: a hash for each, with times in microseconds

_SETTINGS = {"compaction.lag": "1 hour", "deletions.keep": "1 day"}
"""Settings of compacted channels: how long a replaced record stays, and how long the deletion of a key does."""
_FIELDS = {"compaction.lag": "lag", "deletions.keep": "deletions"}


def _fields_of(topic: Topic, generation: str) -> dict[str, str]:
    found = {"id": generation}
    if topic.retention is not None:
        found["keep"] = str(micros(topic.retention))
    if topic.compacted:
        found |= {_FIELDS[setting]: str(micros(span)) for setting, span in durations(topic, _SETTINGS).items()}
    return found


def _topic_of(name: str, held: Mapping[str, bytes]) -> Topic:
    return Topic(
        name,
        int(held["partitions"]),
        1,
        "lag" in held,
        _span(held["keep"]) if "keep" in held else None,
        {setting: spelled(_span(held[field])) for setting, field in _FIELDS.items() if field in held},
    )


def _span(micros: bytes) -> timedelta:
    return timedelta(microseconds=int(micros))


# --- reading


class RedisLog:
    def __init__(self, server: Server) -> None:
        self._server = server

    def state(self, channel: str) -> tuple[str, Bounds]:
        held = _held(self._server, channel)
        return held["id"].decode(), _bounds_of(held)

    def read(self, channel: str, partition: int, offset: int | None, most: int) -> tuple[str, Sequence[Entry], int]:
        begin = -1 if offset is None else offset
        answer = self._server.one("fetch", [key_of(channel)], partition, begin, min(most, _MOST), _BYTES)
        if answer is None:
            raise _absent(self._server, channel)
        id, low, end, reached, ids, packed = answer
        if 0 <= begin < low:
            raise overtaken(channel, partition, begin, low)
        if begin > end:
            raise beyond(channel, partition, begin, end)
        return id.decode(), list(_entries(channel, partition, ids, packed)), reached

    def wait(self, positions: Mapping[ChannelPartition, int], seconds: float) -> None:
        if positions:
            self._server.ring(positions, min(seconds, _SLICE))
        else:
            time.sleep(min(seconds, _SLICE))


def _entries(channel: str, partition: int, ids: bytes, packed: Any) -> Iterator[Entry]:
    at = 0
    for one in ids.split():
        first, _, timestamp = one.partition(b"-")
        key, value, headers, at = unpack(packed, at)
        yield Entry(channel, partition, int(first) - 1, int(timestamp), key, value, headers)

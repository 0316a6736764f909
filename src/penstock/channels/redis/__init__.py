"""Channels on Redis: a stream for each partition, with offsets of our own.

Appends delete what retention does not keep, some at a time: a partition without appends keeps its records.
"""

import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from datetime import timedelta
from typing import TypeVar

from penstock.channels.leases import LEASE, GroupState, LeasedConsumer, describe_group, membership, move_offsets
from penstock.channels.redis import codec
from penstock.channels.redis.client import GROUPS, NAMES, Address, Server, key_of
from penstock.channels.redis.codec import pack
from penstock.channels.redis.reader import RedisReader
from penstock.channels.redis.sender import Courier, Delivery, Parcel, RedisSender
from penstock.core.clock import Micros
from penstock.core.contracts import ChannelPartition, EnsureResult, Group, Offsets, Promise, RebalanceListener, Topic
from penstock.core.errors import PenstockError, Unavailable
from penstock.core.record import Record

Answer = TypeVar("Answer")

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


class RedisChannels:
    """Channels as streams of one server."""

    def __init__(self, url: str, lease: timedelta = LEASE) -> None:
        self._url, self._lease = url, lease
        self._address = Address(url)
        self._lock = threading.Lock()
        self._connection: Server | None = None

    def __reduce__(self) -> tuple[type["RedisChannels"], tuple[str, timedelta]]:
        return RedisChannels, (self._url, self._lease)

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
            fields = codec.fields_of(topic, uuid.uuid4().hex)
            flat = [part for pair in fields.items() for part in pair]
            done = self._server().one("ensure", [key_of(topic.name), NAMES], topic.partitions, *flat)
            if done == b"made":
                made.append(topic.name)
            elif done == b"extended":
                extended.append(topic.name)
            differences += codec.differences(topic, self.topic(topic.name))
        return EnsureResult(tuple(made), tuple(extended), tuple(differences))

    def names(self) -> list[str]:
        return self._server().members(NAMES)

    def topic(self, channel: str) -> Topic:
        return codec.topic_of(channel, self._held(channel))

    def topic_id(self, channel: str) -> str:
        return self._held(channel)["id"].decode()

    def remove(self, channel: str) -> None:
        if self._server().one("remove", [key_of(channel), NAMES]) is None:
            raise self._absent(channel)
        for group in self.groups():
            self.change(group, lambda state, _: state.forget(channel))

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

    @contextmanager
    def poster(self) -> Iterator[Callable[[str, bytes, bytes], None]]:
        courier = Courier(Server(self._address), lambda: None)

        def post(channel: str, key: bytes, value: bytes) -> None:
            packed = pack(Record(value, None, key))
            courier.take(Parcel(channel, [packed], len(packed), Delivery(1, _ignore)))

        try:
            yield post
        finally:
            courier.close(2)

    # --- out

    @contextmanager
    def reader(
        self, start: Mapping[str, Offsets], linger: float = 0.0, only: Collection[ChannelPartition] | None = None
    ) -> Iterator[RedisReader]:
        begin = {channel: self._from(channel, positions, only) for channel, positions in start.items()}
        beginning = {(channel, one) for channel, found in begin.items() for one in found if one not in start[channel]}
        with closing(Server(self._address)) as server:
            yield RedisReader(server, begin, linger, only, beginning)

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

    @contextmanager
    def join(
        self, group: str, channels: Sequence[str], listener: RebalanceListener, *, beginning: bool = True
    ) -> Iterator[LeasedConsumer]:
        member = LeasedConsumer(self, self, group, channels, listener, beginning, time.monotonic, self._lease)
        with membership(member, listener):
            yield member

    def groups(self) -> list[str]:
        documents, now = self._server().groups()
        return sorted(name for name, document in documents.items() if GroupState.loads(document).exists(now))

    def group(self, name: str) -> Group:
        return self.change(name, lambda state, now: describe_group(name, state, now))

    def move(self, group: str, positions: Mapping[str, Offsets]) -> None:
        self.change(group, lambda state, now: move_offsets(state, now, group, positions))

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


def _ignore(_: PenstockError | None) -> None: ...

"""Writes to Redis: a thread sends the waiting records in order, batch after batch."""

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from zlib import crc32

from penstock.channels.common import pack, packed_key, settle
from penstock.channels.redis.client import Server, key_of
from penstock.core.contracts import ChannelPartition
from penstock.core.errors import PenstockError, Unavailable
from penstock.core.record import Record

LIMIT = 16 << 20
"""Bytes of one record: while Redis handles one, all other clients wait."""
_PARCEL = 1 << 18
_BATCH = 1 << 20
_ROOM = 1 << 24
"""Bytes that can wait; then `send` waits."""


def encode(record: Record) -> bytes:
    """As `pack`. `log.lua` reads the key from it."""
    return pack(record, LIMIT, "redis://")


def partition_of(packed: bytes, partitions: int) -> int | None:
    """The partition of a record's key; None without a key: any partition will do."""
    key = packed_key(packed)
    return None if key is None else crc32(key) % partitions


class Delivery:
    """The result of one call to `send`: all its records are safe, or an error."""

    def __init__(self, count: int, done: Callable[[PenstockError | None], None]) -> None:
        self._left, self._done = count, done
        self.failed = False

    def safe(self, count: int) -> None:
        self._left -= count
        if not self._left and not self.failed:
            self._done(None)

    def fail(self, error: PenstockError) -> None:
        if not self.failed:
            self.failed = True
            self._done(error)


@dataclass(frozen=True, slots=True)
class Parcel:
    """Some records of a call, packed."""

    channel: str
    packed: Sequence[bytes]
    size: int
    delivery: Delivery


def parcels(channel: str, records: Sequence[Record], delivery: Delivery) -> Iterator[Parcel]:
    """Pack the records in parcels, one when it is needed."""
    some: list[bytes] = []
    size = 0
    for record in records:
        some.append(encode(record))
        size += len(some[-1])
        if size >= _PARCEL:
            yield Parcel(channel, some, size, delivery)
            some, size = [], 0
    if some:
        yield Parcel(channel, some, size, delivery)


class Courier:
    """Sends parcels in a thread; calls `freed` after each batch."""

    def __init__(self, server: Server, freed: Callable[[], None]) -> None:
        self._server, self._freed = server, freed
        self._waiting: deque[Parcel] = deque()
        self._carried: list[Parcel] = []
        self._held = 0
        self._changed = threading.Condition()
        self._closing = False
        self._partitions: dict[str, int] = {}
        self._turn = 0
        self._thread = threading.Thread(target=self._work, name="redis-courier", daemon=True)
        self._thread.start()

    def take(self, parcel: Parcel) -> bool:
        """Queue a parcel; False if there is no room."""
        with self._changed:
            if self._closing:
                raise self._closed()
            if self._held and self._held + parcel.size > _ROOM:
                return False
            self._held += parcel.size
            self._waiting.append(parcel)
            self._changed.notify()
        return True

    def close(self, timeout: float) -> None:
        """Send the waiting parcels; after `timeout` seconds, fail the rest."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        # A thread that waits for an answer cannot be stopped; it ends with the timeout of the connection.
        self._thread.join(timeout)
        self._give_up()

    def _work(self) -> None:
        try:
            while batch := self._next():
                try:
                    self._carry(batch)
                except PenstockError as error:
                    if isinstance(error, Unavailable):
                        self._fail_waiting()
                    for parcel in self._carried:
                        parcel.delivery.fail(error)
                with self._changed:
                    self._held -= sum(parcel.size for parcel in self._carried)
                    self._carried = []
                self._freed()
        finally:
            self._give_up()
            self._server.close()

    def _fail_waiting(self) -> None:
        """Fail the waiting parcels, too: they would overtake those that are sent again."""
        with self._changed:
            self._carried += self._waiting
            self._waiting.clear()

    def _give_up(self) -> None:
        with self._changed:
            self._closing = True
            for parcel in (*self._carried, *self._waiting):
                parcel.delivery.fail(self._closed())
            self._waiting.clear()
        self._freed()

    def _closed(self) -> Unavailable:
        return Unavailable(self._server.server_name, "the sender was closed before it answered")

    def _next(self) -> list[Parcel]:
        """Waiting parcels, up to the size of a batch; none when the courier is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            size = 0
            while self._waiting and size < _BATCH:
                self._carried.append(self._waiting.popleft())
                size += self._carried[-1].size
            return self._carried

    def _carry(self, batch: Sequence[Parcel]) -> None:
        left = {
            channel: [(one, parcel.delivery) for parcel in of_it for one in parcel.packed]
            for channel, of_it in _by_channel(batch).items()
        }
        while left:
            assigned = self._assign(left)
            left = {}
            answers = self._server.run(
                [
                    (
                        [key_of(channel)],
                        ["append", partition, self._partitions.get(channel, 1), *(packed for packed, _ in some)],
                    )
                    for (channel, partition), some in assigned.items()
                ]
            )
            for ((channel, _), some), answer in zip(assigned.items(), answers, strict=True):
                if answer is None:
                    error = Unavailable(f"channel {channel}", f"{self._server.server_name} has no such channel")
                    for _, delivery in some:
                        delivery.fail(error)
                elif answer[0]:
                    for _, delivery in some:
                        delivery.safe(1)
                else:
                    # The channel has more partitions now: nothing was appended, and the records are assigned again.
                    left.setdefault(channel, []).extend(some)
                    self._partitions[channel] = answer[1]

    def _assign(
        self, left: "dict[str, list[tuple[bytes, Delivery]]]"
    ) -> "dict[ChannelPartition, list[tuple[bytes, Delivery]]]":
        assigned: dict[ChannelPartition, list[tuple[bytes, Delivery]]] = defaultdict(list)
        for channel, some in left.items():
            partitions = self._partitions.get(channel, 1)
            for one in some:
                partition = partition_of(one[0], partitions)
                if partition is None:
                    self._turn += 1
                    partition = self._turn % partitions
                assigned[channel, partition].append(one)
        return assigned


class RedisSender:
    def __init__(self, server: Server) -> None:
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Event()
        self._courier = Courier(server, lambda: self._call(self._room.set))
        self._order = asyncio.Lock()

    async def send(self, channel: str, records: Sequence[Record]) -> None:
        if not records:
            return
        done: asyncio.Future[None] = self._loop.create_future()
        delivery = Delivery(len(records), lambda error: self._call(lambda: settle(done, error)))
        # Otherwise, two calls that wait for room could overtake each other.
        try:
            async with self._order:
                for parcel in parcels(channel, records, delivery):
                    while not delivery.failed and not self._courier.take(parcel):
                        self._room.clear()
                        await self._room.wait()
                    if delivery.failed:
                        break
            await done
        finally:
            done.cancel()  # A result that comes later is ignored.

    async def close(self) -> None:
        await asyncio.to_thread(self._courier.close, 5)

    def _call(self, what: Callable[[], None]) -> None:
        """Call a function in the loop, from the thread of the courier."""
        with suppress(RuntimeError):  # The loop is closed.
            self._loop.call_soon_threadsafe(what)


def _by_channel(batch: Sequence[Parcel]) -> dict[str, list[Parcel]]:
    found: dict[str, list[Parcel]] = defaultdict(list)
    for parcel in batch:
        # The caller retries the whole call: nothing may follow a failed part of it.
        if not parcel.delivery.failed:
            found[parcel.channel].append(parcel)
    return found

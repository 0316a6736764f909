"""Writes to Redis: all records that wait while a batch is written go into the next one."""

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from zlib import crc32

from penstock.channels.common import pack, settle
from penstock.channels.redis.client import Server, key_of
from penstock.core.errors import Refused, Unavailable
from penstock.core.record import Record

LIMIT = 16 << 20
"""Bytes of one record: while Redis handles one, all other clients wait."""
_BATCH = 1 << 20
_CLOSE = 5.0
"""Seconds to write what waits when a sender is closed."""


def encode(record: Record) -> bytes:
    """As `pack`. `log.lua` reads the key from it."""
    return pack(record, LIMIT, "redis://")


@dataclass(eq=False, slots=True)
class _Call:
    """A call to `send`, and its records that are not packed yet."""

    channel: str
    left: Iterator[Record]
    unwritten: int
    done: "asyncio.Future[None]"


_Packed = tuple[_Call, bytes | None, bytes]
"""The call, the key and the packed record."""


class RedisSender:
    def __init__(self, server: Server) -> None:
        self._server = server
        self._pool = ThreadPoolExecutor(1, "redis-sender")
        self._waiting: deque[_Call] = deque()
        self._batch: list[_Packed] = []
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._partitions: dict[str, int] = defaultdict(lambda: 1)
        self._turn = 0

    async def send(self, channel: str, records: Sequence[Record]) -> None:
        if self._closed:
            raise self._was_closed()
        if not records:
            return
        loop = asyncio.get_running_loop()
        call = _Call(channel, iter(records), len(records), loop.create_future())
        self._waiting.append(call)
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._write_waiting())
        await call.done

    async def aclose(self, within: float = _CLOSE) -> None:
        """Write what waits; after `within` seconds, fail the rest."""
        self._closed = True
        if self._task is not None:
            await asyncio.wait([self._task], timeout=within)
            self._task.cancel()
        self._fail(self._was_closed())
        self._server.close()  # Ends a command that is not answered.
        self._pool.shutdown(wait=False)

    def _was_closed(self) -> Unavailable:
        return Unavailable(self._server.server_name, "the sender was closed before it answered")

    async def _write_waiting(self) -> None:
        loop = asyncio.get_running_loop()
        while batch := self._next():
            self._batch = batch
            try:
                missing = await loop.run_in_executor(self._pool, self._write, batch)
            except Exception as error:  # noqa: BLE001 - the waiting calls raise it
                self._fail(error)
                continue
            for call, _, _ in batch:
                call.unwritten -= 1
                if call.channel in missing:
                    reason = f"{self._server.server_name} has no such channel"
                    settle(call.done, Unavailable(f"channel {call.channel}", reason))
                elif not call.unwritten:
                    settle(call.done, None)

    def _fail(self, error: Exception) -> None:
        """Fail the calls of the batch, and those that wait: they would overtake what is sent again."""
        for call in (*(call for call, _, _ in self._batch), *self._waiting):
            settle(call.done, error)

    def _next(self) -> list[_Packed]:
        """Records of the waiting calls, up to the size of a batch."""
        batch: list[_Packed] = []
        size = 0
        while self._waiting and size < _BATCH:
            call = self._waiting[0]
            # The caller retries the whole call: nothing may follow a failed part of it.
            record = None if call.done.done() else next(call.left, None)
            if record is None:
                self._waiting.popleft()
                continue
            try:
                batch.append((call, record.key, encode(record)))
                size += len(batch[-1][-1])
            except Refused as error:
                settle(call.done, error)
        return batch

    def _write(self, batch: list[_Packed]) -> set[str]:
        """Append the records; return the channels that do not exist. It runs in the thread."""
        missing = set[str]()
        left = batch
        while left:
            assigned: dict[tuple[str, int], list[_Packed]] = defaultdict(list)
            for call, key, packed in left:
                assigned[call.channel, self._partition(call.channel, key)].append((call, key, packed))
            left = []
            answers = self._server.run(
                [
                    (
                        [key_of(channel)],
                        ["append", partition, self._partitions[channel], *(packed for _, _, packed in some)],
                    )
                    for (channel, partition), some in assigned.items()
                ]
            )
            for ((channel, _), some), answer in zip(assigned.items(), answers, strict=True):
                if answer is None:
                    missing.add(channel)
                elif not answer[0]:
                    # The channel has more partitions now: nothing was appended, and the records are assigned again.
                    left += some
                    self._partitions[channel] = answer[1]
        return missing

    def _partition(self, channel: str, key: bytes | None) -> int:
        if key is None:
            self._turn += 1
        return (self._turn if key is None else crc32(key)) % self._partitions[channel]

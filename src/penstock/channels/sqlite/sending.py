"""Writes channels in SQLite: all batches that wait while one is committed go into the next transaction."""

import asyncio
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

from penstock.channels.sqlite.database import Database, Removed, Row, compact_after, encode
from penstock.core.clock import Clock
from penstock.core.contracts import Topic
from penstock.core.errors import PenstockError
from penstock.core.record import Record

Open = Callable[[str], Database]
"""Opens the database of a channel; Unavailable when there is no such channel."""


class Writer:
    """Appends to one channel. Opens its database again when the channel was removed and created again."""

    def __init__(self, channel: str, open: Open, clock: Clock) -> None:
        self._channel, self._open, self._clock = channel, open, clock
        self._database: Database | None = None
        self._cleaning: threading.Thread | None = None
        self._clean_at = 0.0

    def append(self, rows: Sequence[Row]) -> None:
        try:
            topic = self._opened().append(rows, self._clock.now())
        except Removed:
            self.close()
            topic = self._opened().append(rows, self._clock.now())
        self._clean_if_due(topic)

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    def _opened(self) -> Database:
        if self._database is None:
            self._database = self._open(self._channel)
        return self._database

    def _clean_if_due(self, topic: Topic) -> None:
        ages = [] if topic.retention is None else [topic.retention / 8]
        if topic.compacted:
            ages.append(compact_after(topic))
        idle = self._cleaning is None or not self._cleaning.is_alive()
        if ages and idle and time.monotonic() >= self._clean_at:
            self._clean_at = time.monotonic() + min(ages).total_seconds()
            self._cleaning = threading.Thread(target=self._clean, name="sqlite-cleaning", daemon=True)
            self._cleaning.start()

    def _clean(self) -> None:
        # What prevents cleaning also prevents reading or writing, which report it.
        with suppress(PenstockError), closing(self._open(self._channel)) as database:
            database.clean(self._clock.now())


class SqliteSender:
    def __init__(self, open: Open, clock: Clock) -> None:
        self._open, self._clock = open, clock
        self._pool = ThreadPoolExecutor(8, "sqlite-sender")
        self._queues: dict[str, _Queue] = {}

    async def send(self, channel: str, records: Sequence[Record]) -> None:
        if not records:
            return
        rows = [encode(record) for record in records]
        if channel not in self._queues:
            self._queues[channel] = _Queue(Writer(channel, self._open, self._clock), self._pool)
        # Queued before anything is awaited: two calls keep their order.
        await self._queues[channel].put(rows)

    async def close(self) -> None:
        for one in self._queues.values():
            await one.close()
        await asyncio.to_thread(self._pool.shutdown)


class _Queue:
    """The batches that wait for one channel."""

    def __init__(self, writer: Writer, pool: ThreadPoolExecutor) -> None:
        self._writer, self._pool = writer, pool
        self._waiting: list[tuple[Sequence[Row], asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    def put(self, rows: Sequence[Row]) -> "asyncio.Future[None]":
        loop = asyncio.get_running_loop()
        self._waiting.append((rows, future := loop.create_future()))
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._drain())
        return future

    async def close(self) -> None:
        if self._task is not None:
            await self._task
        await asyncio.get_running_loop().run_in_executor(self._pool, self._writer.close)

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batches, self._waiting = self._waiting, []
            rows = [row for some, _ in batches for row in some] if len(batches) > 1 else batches[0][0]
            failure: Exception | None = None
            try:
                await loop.run_in_executor(self._pool, self._writer.append, rows)
            except Exception as error:  # noqa: BLE001 - the waiting calls raise it
                failure = error
            for _, future in batches:
                if future.done():
                    continue
                if failure is None:
                    future.set_result(None)
                else:
                    future.set_exception(failure)


class Poster:
    """Appends figures in a thread of its own. If there are too many, some are dropped: later ones replace them."""

    def __init__(self, open: Open, clock: Clock) -> None:
        self._open, self._clock = open, clock
        self._queue: queue.Queue[tuple[str, Record] | None] = queue.Queue(10_000)
        self._thread = threading.Thread(target=self._run, name="sqlite-poster", daemon=True)
        self._thread.start()

    def post(self, channel: str, key: bytes, value: bytes) -> None:
        with suppress(queue.Full):
            self._queue.put_nowait((channel, Record(value, key=key)))

    def close(self) -> None:
        with suppress(queue.Full):
            self._queue.put(None, timeout=2)
        self._thread.join(2)

    def _run(self) -> None:
        writers: dict[str, Writer] = {}
        ended = False
        while not ended:
            batches: dict[str, list[Row]] = defaultdict(list)
            posted = self._queue.get()
            while posted is not None:
                batches[posted[0]].append(encode(posted[1]))
                try:
                    posted = self._queue.get_nowait()
                except queue.Empty:
                    break
            ended = posted is None
            for channel, rows in batches.items():
                writer = writers.setdefault(channel, Writer(channel, self._open, self._clock))
                with suppress(PenstockError):
                    writer.append(rows)
        for writer in writers.values():
            writer.close()

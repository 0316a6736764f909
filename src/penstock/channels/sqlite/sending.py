"""Writes channels in SQLite: all batches that wait while one is committed go into the next transaction."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

from penstock.channels.common import settle
from penstock.channels.sqlite.database import Database, Removed, Row, compact_after, encode
from penstock.core.clock import Clock
from penstock.core.contracts import Topic
from penstock.core.errors import PenstockError
from penstock.core.record import Record

Open = Callable[[str], Database]
"""Opens the database of a channel; Unavailable when there is no such channel."""


class SqliteSender:
    def __init__(self, open: Open, clock: Clock) -> None:
        self._open, self._clock = open, clock
        self._pool = ThreadPoolExecutor(8, "sqlite-sender")
        self._writers: dict[str, _Writer] = {}

    async def send(self, channel: str, records: Sequence[Record]) -> None:
        if not records:
            return
        rows = [encode(record) for record in records]
        if channel not in self._writers:
            self._writers[channel] = _Writer(channel, self._open, self._clock, self._pool)
        # Queued before anything is awaited: two calls keep their order.
        await self._writers[channel].put(rows)

    async def aclose(self) -> None:
        for writer in self._writers.values():
            await writer.close()
        await asyncio.to_thread(self._pool.shutdown)


class _Writer:
    """Appends to one channel. Opens its database again when the channel was removed and created again."""

    def __init__(self, channel: str, open: Open, clock: Clock, pool: ThreadPoolExecutor) -> None:
        self._channel, self._open, self._clock, self._pool = channel, open, clock, pool
        self._waiting: list[tuple[Sequence[Row], asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None
        self._database: Database | None = None
        self._cleaning: threading.Thread | None = None
        self._clean_at = 0.0

    def put(self, rows: Sequence[Row]) -> "asyncio.Future[None]":
        loop = asyncio.get_running_loop()
        self._waiting.append((rows, future := loop.create_future()))
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._append_waiting())
        return future

    async def close(self) -> None:
        if self._task is not None:
            await self._task
        await asyncio.get_running_loop().run_in_executor(self._pool, self._close)

    async def _append_waiting(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batches, self._waiting = self._waiting, []
            rows = [row for some, _ in batches for row in some] if len(batches) > 1 else batches[0][0]
            failure: Exception | None = None
            try:
                await loop.run_in_executor(self._pool, self._append, rows)
            except Exception as error:  # noqa: BLE001 - the waiting calls raise it
                failure = error
            for _, future in batches:
                settle(future, failure)

    # --- in a thread of the pool

    def _append(self, rows: Sequence[Row]) -> None:
        try:
            topic = self._opened().append(rows, self._clock.now())
        except Removed:
            self._close()
            topic = self._opened().append(rows, self._clock.now())
        self._clean_if_due(topic)

    def _close(self) -> None:
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

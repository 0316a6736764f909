"""Into files: one write and one sync for all that waits, acknowledged after it."""

import asyncio
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from zlib import crc32

from penstock.channels.files import topics
from penstock.channels.files.cleaning import clean
from penstock.channels.files.folder import answering
from penstock.channels.files.frames import Damaged
from penstock.channels.files.log import Log
from penstock.channels.files.topics import Known
from penstock.core.clock import Clock
from penstock.core.errors import PenstockError, Refused
from penstock.core.record import Record

Opener = Callable[[Path, Known], Log]
Waiting = tuple[Sequence[Record], "asyncio.Future[None]"]


def split(records: Sequence[Record], partitions: int) -> dict[int, list[Record]]:
    """Per partition, its records in order."""
    found: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        found[_partition(record, partitions)].append(record)
    return found


def _partition(record: Record, partitions: int) -> int:
    """The same for the same key; without one, for the same sender, so that its order is kept."""
    if record.key is not None:
        return crc32(record.key) % partitions
    return crc32(record.origin.sender.encode()) % partitions if record.origin else 0


class Writers:
    """The logs that somebody appends to, opened when they are needed. Notices when a channel changes.

    `gone` closes a writer of a channel that is no more, as soon as nobody uses it.
    """

    def __init__(self, root: Path, opener: Opener, clock: Clock) -> None:
        self._root, self._opener, self._clock = root, opener, clock
        self._known: dict[str, tuple[tuple[int, int] | None, Known]] = {}
        self._writers: dict[tuple[str, str, int], Writer] = {}
        self.gone: Callable[[Writer], None] = lambda writer: writer.log.close()

    def known(self, channel: str) -> Known:
        stamp = topics.stamp(self._root, channel)
        before, here = self._known.pop(channel, (None, None))
        if here is None or stamp is None or stamp != before:
            here = None
            try:
                here = topics.known(self._root, channel)
            finally:
                self._let_go(channel, here.id if here else "")
        self._known[channel] = stamp, here
        return here

    def _let_go(self, channel: str, generation: str) -> None:
        """Close the writers of a channel that had this name, and another life."""
        for place in [place for place in self._writers if place[0] == channel and place[1] != generation]:
            self.gone(self._writers.pop(place))

    def writer(self, known: Known, partition: int) -> "Writer":
        # By the id, too: a channel that was removed and made again is another one.
        place = known.topic.name, known.id, partition
        if place not in self._writers:
            log = self._opener(topics.partition(self._root, known.topic.name, partition), known)
            self._writers[place] = Writer(log, known, self._clock)
        return self._writers[place]

    def close(self) -> None:
        for writer in self._writers.values():
            writer.log.close()


class Writer:
    def __init__(self, log: Log, known: Known, clock: Clock) -> None:
        self.log = log
        self._keep, self._clock = known.topic.retention, clock
        self._compact_after = topics.compact_after(known.topic) if known.topic.compacted else None
        self._due = True

    def append(self, records: Sequence[Record]) -> None:
        self.log.append(records)
        if (self._due or self.log.rolled) and (self._keep is not None or self._compact_after is not None):
            # It can take its time, and be broken off at any moment.
            threading.Thread(target=self._clean, name="files-cleaning", daemon=True).start()
        self._due = self.log.rolled = False

    def _clean(self) -> None:
        # What stands in its way is in the way of readers too, who say it.
        with suppress(OSError, Damaged):
            clean(self.log.folder, self._clock.now(), self._keep, self._compact_after)


class FilesSender:
    def __init__(self, root: Path, writers: Writers) -> None:
        self._root, self._writers = root, writers
        self._pool = ThreadPoolExecutor(8, "files-sender")
        self._lanes: dict[Writer, _Lane] = {}
        writers.gone = lambda writer: self._lanes[writer].end()

    async def send(self, channel: str, records: Sequence[Record]) -> None:
        if not records:
            return
        with answering(self._root):
            known = self._writers.known(channel)
            count = known.topic.partitions
            parts = split(records, count) if count > 1 else {0: records}
            lanes = [(self._lane(known, partition), some) for partition, some in parts.items()]
        # Put in line before anything is awaited: two calls keep their order.
        waiting = [lane.put(some) for lane, some in lanes]
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            if outcome is not None:
                raise outcome

    def _lane(self, known: Known, partition: int) -> "_Lane":
        writer = self._writers.writer(known, partition)
        if writer not in self._lanes:
            self._lanes[writer] = _Lane(writer, self._pool)
        return self._lanes[writer]

    async def close(self) -> None:
        for lane in self._lanes.values():
            await lane.done()
        await asyncio.to_thread(self._pool.shutdown)
        self._writers.close()


class _Lane:
    """The way into one log: while one batch is being synced, all that comes gathers for the next."""

    def __init__(self, writer: Writer, pool: ThreadPoolExecutor) -> None:
        self._writer, self._pool = writer, pool
        self._waiting: list[Waiting] = []
        self._task: asyncio.Task[None] | None = None
        self._ends = False

    def put(self, records: Sequence[Record]) -> "asyncio.Future[None]":
        loop = asyncio.get_running_loop()
        self._waiting.append((records, future := loop.create_future()))
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._drain())
        return future

    async def done(self) -> None:
        if self._task is not None:
            await self._task

    def end(self) -> None:
        """Close the log, once all that waits is told."""
        self._ends = True
        if self._task is None or self._task.done():
            self._writer.log.close()

    async def _drain(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            await self._append(batch)
        if self._ends:
            self._writer.log.close()

    async def _append(self, batch: Sequence[Waiting]) -> None:
        records = [record for some, _ in batch for record in some] if len(batch) > 1 else batch[0][0]
        try:
            await asyncio.get_running_loop().run_in_executor(self._pool, self._writer.append, records)
        except Refused as error:
            if len(batch) == 1:
                _tell(batch, error)
                return
            for one in batch:  # Nobody pays for the record of somebody else.
                await self._append([one])
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait are told
            _tell(batch, error)
        else:
            _tell(batch, None)


def _tell(batch: Sequence[Waiting], error: Exception | None) -> None:
    for _, future in batch:
        if future.done():
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


class Poster:
    """For figures: appended by a thread of its own. When there are too many they are let go: the next replace them."""

    def __init__(self, writers: Writers) -> None:
        self._writers = writers
        self._queue: queue.Queue[tuple[str, Record] | None] = queue.Queue(10_000)
        self._thread = threading.Thread(target=self._run, name="files-poster", daemon=True)
        self._thread.start()

    def post(self, channel: str, key: bytes, value: bytes) -> None:
        with suppress(queue.Full):
            self._queue.put_nowait((channel, Record(value, key=key)))

    def close(self) -> None:
        with suppress(queue.Full):
            self._queue.put(None, timeout=2)
        self._thread.join(2)

    def _run(self) -> None:
        ended = False
        while not ended:
            gathered: dict[str, list[Record]] = defaultdict(list)
            posted = self._queue.get()
            while posted is not None:
                gathered[posted[0]].append(posted[1])
                try:
                    posted = self._queue.get_nowait()
                except queue.Empty:
                    break
            ended = posted is None
            for channel, records in gathered.items():
                with suppress(PenstockError, OSError):
                    self._append(channel, records)
        self._writers.close()

    def _append(self, channel: str, records: Sequence[Record]) -> None:
        known = self._writers.known(channel)
        for partition, some in split(records, known.topic.partitions).items():
            self._writers.writer(known, partition).append(some)

"""Deliveries with an id, on their way: numbered on disk first, then gathered, then known to be safe."""

import asyncio
import hashlib
import logging
import sqlite3
from bisect import bisect
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from penstock.collect.ingest import IngestQueue
from penstock.core.clock import Clock, Micros
from penstock.core.contracts import Arrival
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.record import Origin
from penstock.web.responses import Problem

log = logging.getLogger(__name__)

_FORGET_AT_A_TIME = 10_000
_MAKE = """
create table if not exists epochs (first integer primary key, epoch integer not null);
create table if not exists deliveries (
    seq integer primary key autoincrement,
    id text not null unique,
    digest blob not null,
    time integer not null,
    body blob
);
create index if not exists by_time on deliveries (time) where body is null;
create index if not exists not_safe on deliveries (seq) where body is not null;
"""


@dataclass(frozen=True, slots=True)
class Delivery:
    id: str
    body: bytes
    time: Micros

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.body).digest()


@dataclass(frozen=True, slots=True)
class Row:
    """What is known of an id: its number, when it came first, whether with this very body, whether it is safe."""

    seq: int
    time: Micros
    same: bool
    safe: bool


@dataclass(frozen=True, slots=True)
class Left:
    """A delivery that was not known to be safe."""

    seq: int
    time: Micros
    body: bytes
    damaged: bool


class Deliveries:
    """A file. Every method blocks, and they are called one at a time.

    `highest`: the epoch and the highest number that somebody else knows to be in use.
    """

    def __init__(self, folder: Path, name: str, now: Micros, highest: tuple[int, int] = (0, 0)) -> None:
        self.path = folder / f"{quote(name, safe='')}.sqlite"
        self._whose = f"source {name}, {self.path}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(self.path, timeout=1, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            fix = "let it be written, or choose another folder"
            raise Misconfigured(f"source {name}, folder {folder}", str(error), fix) from error
        try:
            self._epochs = self._begin(now, highest)
        except BaseException:
            self._file.close()
            raise

    def _begin(self, now: Micros, highest: tuple[int, int]) -> list[tuple[int, int]]:
        """The first number of each epoch, and the epoch."""
        try:
            # Nobody else may number at the same time.
            self._file.execute("pragma locking_mode = exclusive")
            self._file.execute("pragma journal_mode = wal")
            self._file.execute("pragma synchronous = full")
            (verdict,) = self._file.execute("pragma quick_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
            self._file.executescript(_MAKE)
            epochs = self._file.execute("select first, epoch from epochs order by first").fetchall()
            (last,) = self._file.execute("select coalesce(max(seq), 0) from sqlite_sequence").fetchone()
            # Behind the last epoch that can be written there is none: somebody made that up.
            in_use = highest if highest[0] < 2**63 - 1 else (0, 0)
            if not epochs or in_use > (epochs[-1][1], last):
                if epochs:
                    log.warning(
                        "%s is older than what was taken: what came since is taken again if repeated", self._whose
                    )
                epochs.append((last + 1, max(now, in_use[0] + 1)))
                self._file.execute("insert or replace into epochs values (?, ?)", epochs[-1])
            return epochs
        except sqlite3.OperationalError as error:
            raise Unavailable(self._whose, str(error)) from error
        except sqlite3.DatabaseError as error:
            fix = "move it away; what comes again of the ids that it holds is then taken again"
            raise Misconfigured(self._whose, f"the file is damaged: {error}", fix) from error

    def epoch(self, seq: int) -> int:
        """In which epoch a number was given."""
        return self._epochs[bisect(self._epochs, seq, key=lambda one: one[0]) - 1][1]

    def note(self, came: Sequence[Delivery], safe: Sequence[int], before: Micros | None) -> list[Row]:
        """Write down these deliveries, those that are safe, and forget what came before a moment; all, or nothing.

        Returns when it is synced. Unavailable when it cannot be written.
        """
        try:
            self._file.execute("begin immediate")
            try:
                self._file.executemany("update deliveries set body = null where seq = ?", ((seq,) for seq in safe))
                if before is not None:
                    oldest = "select seq from deliveries where body is null and time < ? order by time limit ?"
                    self._file.execute(f"delete from deliveries where seq in ({oldest})", (before, _FORGET_AT_A_TIME))
                rows = [self._row(one) for one in came]
                self._file.execute("commit")
            except BaseException:
                if self._file.in_transaction:
                    self._file.execute("rollback")
                raise
        except sqlite3.Error as error:
            raise Unavailable(self._whose, str(error), 1.0) from error
        return rows

    def _row(self, one: Delivery) -> Row:
        known = self._file.execute(
            "select seq, time, digest = ?, body is null from deliveries where id = ?", (one.digest, one.id)
        ).fetchone()
        if known is not None:
            seq, time, same, safe = known
            return Row(seq, time, bool(same), bool(safe))
        made = self._file.execute(
            "insert into deliveries (id, digest, time, body) values (?, ?, ?, ?)",
            (one.id, one.digest, one.time, one.body),
        )
        return Row(int(made.lastrowid or 0), one.time, True, False)

    def left(self, after: int, most: int) -> list[Left]:
        """Some of those after a number that were not known to be safe, in their order."""
        try:
            not_safe = "from deliveries where body is not null and seq > ? order by seq limit ?"
            found = self._file.execute(f"select seq, time, body, digest {not_safe}", (after, most)).fetchall()
        except sqlite3.Error as error:
            raise Unavailable(self._whose, str(error)) from error
        return [Left(seq, time, body, hashlib.sha256(body).digest() != digest) for seq, time, body, digest in found]

    def count(self) -> int:
        """How many ids are remembered."""
        (count,) = self._file.execute("select count(*) from deliveries").fetchone()
        return int(count)

    def close(self) -> None:
        self._file.close()


log = logging.getLogger(__name__)

BATCH_RECORDS, BATCH_BYTES = 500, 4 << 20
"""So much is synced at once."""
AGAIN = 20
"""Bodies that are read from the disk at a time, when those that were left are given again."""
_MARK_WITHIN = 0.5
"""Seconds that what is safe may wait to be marked: until then it is given again after a crash, and dropped."""
_FORGET_EVERY = 60.0
_LETTERS = 1_000
"""So many of the last that were refused are known: the same once more needs no further letter."""

Answer = TypeVar("Answer")


@dataclass(eq=False, slots=True)
class _Asked:
    delivery: Delivery
    safe: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Numbered:
    """One opening. A single task writes and hands over, so that what comes later never overtakes.

    `highest`: the epoch and the highest number that were taken already.
    """

    def __init__(
        self, name: str, sender: str, folder: Path, remember: timedelta, clock: Clock, highest: tuple[int, int]
    ) -> None:
        self.queue = IngestQueue(name)
        self._name, self._sender, self._folder, self._clock = name, sender, folder, clock
        self._highest = highest
        self._remember = round(remember.total_seconds() * 1e6)
        self._asked: deque[_Asked] = deque()
        self._came = asyncio.Event()
        self._under_way: dict[int, asyncio.Future[None]] = {}
        self._unmarked: set[int] = set()
        self._letters: dict[tuple[str, bytes], None] = {}
        self._forgot = clock.elapsed() - _FORGET_EVERY
        self._disk = ThreadPoolExecutor(1, f"deliveries of {name}")
        self._working: asyncio.Task[None] | None = None
        self._closed = False

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        try:
            await self._on_disk(self._open)
            try:
                self._working = asyncio.create_task(self._work())
                yield
            finally:
                await self.stop()
        finally:
            # In the same thread: whatever is being written is finished first.
            self._disk.submit(self._close)
            await asyncio.shield(asyncio.to_thread(self._disk.shutdown))

    def room(self) -> None:
        """Unavailable when there is none."""
        if self.queue.full or self._closed:
            raise Unavailable(f"the source {self._name}", "it has no room; nothing was taken", 1.0)

    async def take(self, delivery: Delivery, within: float) -> bool:
        """Whether it is safe after so many seconds. Problem when its id came with another body before."""
        self.room()
        asked = _Asked(delivery)
        asked.safe.add_done_callback(lambda safe: safe.cancelled() or safe.exception())
        self._asked.append(asked)
        self._came.set()
        await asyncio.wait([asked.safe], timeout=within)
        if asked.safe.done():
            asked.safe.result()
            return True
        # Nobody waits for it any more, and it would be held for nobody.
        with suppress(ValueError):
            self._asked.remove(asked)
        return False

    async def stop(self) -> None:
        """Take nothing more. What is on its way may still arrive, for a while. It may be called again."""
        self._closed = True
        await self.queue.close()
        if (working := self._working) is not None:
            working.cancel()
            await asyncio.wait([working])
            if not working.cancelled() and (error := working.exception()) is not None:
                log.error("the source %s has a fault of its own", self._name, exc_info=error)
        self._tell_all(self._asked, Unavailable(f"the source {self._name}", "it is being closed"))
        with suppress(Unavailable):
            await self._note([])

    # --- the task -----------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        some: list[_Asked] = []
        try:
            await self._again()
            while True:
                await self._wait()
                some = self._next()
                rows = await self._noted(some)
                for asked, row in zip(some, rows, strict=False):
                    await self._hand_over(asked, row)
        except Unavailable:
            # The gathering is closed.
            if not self._closed:
                raise
        finally:
            self._tell_all(some, Unavailable(f"the source {self._name}", "it is being closed"))

    async def _again(self) -> None:
        """Give once more what was not known to be safe. What is there is dropped by its number."""
        last = 0
        while True:
            try:
                left = await self._on_disk(partial(self._file.left, last, AGAIN))
            except Unavailable as error:
                await self._troubled(error)
                continue
            if not left:
                return
            for one in left:
                await self._put(one.seq, self._restored(one))
            last = left[-1].seq

    async def _noted(self, some: list[_Asked]) -> list[Row]:
        try:
            return await self._note(some)
        except Unavailable as error:
            self._tell_all(some, error)
            await self._troubled(error)
            return []

    async def _troubled(self, error: Unavailable) -> None:
        """What is to be marked waits: it must not turn this into a loop without a pause."""
        log.warning("%s", error)
        await asyncio.sleep(_MARK_WITHIN)

    def _restored(self, one: Left) -> Arrival:
        refused = f"its body in {self._file.path.name} is damaged" if one.damaged else None
        return Arrival(one.body, self._origin(one.seq, one.time), refused=refused)

    async def _wait(self) -> None:
        if self._asked:
            return
        self._came.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._came.wait(), _MARK_WITHIN if self._unmarked else _FORGET_EVERY)

    def _next(self) -> list[_Asked]:
        some: list[_Asked] = []
        size = 0
        while self._asked and len(some) < BATCH_RECORDS and size < BATCH_BYTES:
            some.append(self._asked.popleft())
            size += len(some[-1].delivery.body)
        return some

    async def _note(self, some: list[_Asked]) -> list[Row]:
        marked = tuple(self._unmarked)
        now = self._clock.elapsed()
        before = self._clock.now() - self._remember if now - self._forgot >= _FORGET_EVERY else None
        if not some and not marked and before is None:
            return []
        rows = await self._on_disk(partial(self._file.note, [one.delivery for one in some], marked, before))
        self._unmarked.difference_update(marked)
        if before is not None:
            self._forgot = now
        return rows

    async def _hand_over(self, asked: _Asked, row: Row) -> None:
        if not row.same:
            await self._refuse(asked)
            return
        if row.safe or row.seq in self._unmarked:
            self._tell(asked, None)
            return
        safe = self._under_way.get(row.seq)
        if safe is None:
            safe = await self._put(row.seq, Arrival(asked.delivery.body, self._origin(row.seq, row.time)))
        safe.add_done_callback(partial(self._settled, asked, None))

    async def _refuse(self, asked: _Asked) -> None:
        """It may be a mistake of the provider, or of whoever has the secret: its letter tells."""
        message = asked.delivery.id
        fix = "give each message an id of its own"
        said = Problem(409, "the header webhook-id", "it came before with another body", fix)
        if (message, asked.delivery.digest) in self._letters:
            self._tell(asked, said)
            return
        letter = Arrival(asked.delivery.body, refused=f"the webhook-id {message} came before with another body")
        safe = await self.queue.put([letter])
        safe.add_done_callback(partial(self._settled, asked, said))

    async def _put(self, seq: int, arrival: Arrival) -> "asyncio.Future[None]":
        safe = await self.queue.put([arrival])
        self._under_way[seq] = safe
        safe.add_done_callback(partial(self._arrived, seq))
        return safe

    def _arrived(self, seq: int, safe: "asyncio.Future[None]") -> None:
        self._under_way.pop(seq, None)
        if not safe.cancelled() and safe.exception() is None:
            self._unmarked.add(seq)

    def _settled(self, asked: _Asked, said: Problem | None, safe: "asyncio.Future[None]") -> None:
        error = Unavailable(f"the source {self._name}", "it was cut off") if safe.cancelled() else safe.exception()
        if error is None and said is not None:
            self._letters[asked.delivery.id, asked.delivery.digest] = None
            if len(self._letters) > _LETTERS:
                del self._letters[next(iter(self._letters))]
        self._tell(asked, error or said)

    def _tell_all(self, some: Iterable[_Asked], said: Unavailable) -> None:
        for asked in some:
            self._tell(asked, said)

    def _tell(self, asked: _Asked, said: BaseException | None) -> None:
        if asked.safe.done():
            return
        if said is None:
            asked.safe.set_result(None)
        else:
            asked.safe.set_exception(said)

    def _origin(self, seq: int, time: int) -> Origin:
        return Origin(self._sender, self._file.epoch(seq), seq, time)

    async def _on_disk(self, work: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)

    def _open(self) -> None:
        self._file = Deliveries(self._folder, self._name, self._clock.now(), self._highest)

    def _close(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

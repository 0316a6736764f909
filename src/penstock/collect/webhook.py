"""Webhooks: a provider posts events, signed as Standard Webhooks defines it, until the response is 202.

Headers `webhook-id`, `webhook-timestamp` (seconds), `webhook-signature` (`v1,BASE64`, several separated by spaces):
HMAC-SHA256 over `id.timestamp.body`. Each id is stored once.
"""

import asyncio
import hashlib
import logging
import re
import sqlite3
from bisect import bisect
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar
from urllib.parse import quote, unquote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from penstock.collect.listen import IngestQueue, endpoint, http_server, too_large
from penstock.collect.numbers import WEBHOOK_SUFFIX
from penstock.core.clock import Clock, Micros, SystemClock
from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState, SourceContext
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.record import Origin
from penstock.core.signatures import parse_secrets, verify
from penstock.web.requests import BodyReader, OriginCheck
from penstock.web.responses import Problem, reply
from penstock.web.server import run_server

log = logging.getLogger(__name__)

P = ParamSpec("P")
Result = TypeVar("Result")

MAX_ID = 256
MAX_CHALLENGE = 1_000
REPLAY_BATCH = 20
"""Bodies that are read at a time after a restart."""
_MARK_TIMEOUT = 0.5
"""Seconds after which durable deliveries are marked. Before that, a crash repeats them, and they are dropped."""
_FORGET_EVERY = 60.0
_FORGET_AT_A_TIME = 10_000
_MAX_REFUSED = 1_000
"""How many refused deliveries are remembered: a repeated one makes no further dead letter."""
_SIGN_FIX = "sign it as Standard Webhooks defines it, with the secret of this source"
_SCHEMA = """
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
    """An id: its number, when it first arrived, whether the body is the same, whether it is durable."""

    seq: int
    time: Micros
    same: bool
    durable: bool


@dataclass(frozen=True, slots=True)
class Pending:
    """A delivery that is not marked as durable."""

    seq: int
    time: Micros
    body: bytes
    damaged: bool


class Deliveries:
    """The SQLite file. Every method blocks, and calls must not overlap.

    `highest`: the epoch and the highest number that are in use.
    """

    def __init__(self, folder: Path, name: str, now: Micros, highest: tuple[int, int] = (0, 0)) -> None:
        self.path = folder / f"{quote(name, safe='')}.sqlite"
        self._location = f"source {name}, {self.path}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(self.path, timeout=1, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            fix = "make it writable, or choose another folder"
            raise Misconfigured(f"source {name}, folder {folder}", str(error), fix) from error
        try:
            self._epochs = self._begin(now, highest)
        except BaseException:
            self._file.close()
            raise

    def _begin(self, now: Micros, highest: tuple[int, int]) -> list[tuple[int, int]]:
        """Open the file; return the first number of each epoch, and the epoch."""
        try:
            # No other process may number at the same time.
            self._file.execute("pragma locking_mode = exclusive")
            self._file.execute("pragma journal_mode = wal")
            self._file.execute("pragma synchronous = full")
            (verdict,) = self._file.execute("pragma quick_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
            self._file.executescript(_SCHEMA)
            epochs = self._file.execute("select first, epoch from epochs order by first").fetchall()
            (last,) = self._file.execute("select coalesce(max(seq), 0) from sqlite_sequence").fetchone()
            self.last = last
            # Ignore the largest epoch: no epoch could follow it.
            in_use = highest if highest[0] < 2**63 - 1 else (0, 0)
            if not epochs or in_use > (epochs[-1][1], last):
                if epochs:
                    log.warning(
                        "%s is older than the channel: deliveries that are repeated may be stored twice", self._location
                    )
                epochs.append((last + 1, max(now, in_use[0] + 1)))
                self._file.execute("insert or replace into epochs values (?, ?)", epochs[-1])
            return epochs
        except sqlite3.OperationalError as error:
            raise Unavailable(self._location, str(error)) from error
        except sqlite3.DatabaseError as error:
            fix = "move it away; repeated deliveries with its ids are then stored twice"
            raise Misconfigured(self._location, f"the file is damaged: {error}", fix) from error

    def epoch(self, seq: int) -> int:
        """The epoch of a number."""
        return self._epochs[bisect(self._epochs, seq, key=lambda one: one[0]) - 1][1]

    def write(self, deliveries: Sequence[Delivery], durable: Sequence[int], before: Micros | None) -> list[Row]:
        """In one transaction: add these deliveries, mark durable ones, and forget those that are older than a time.

        Returns when it is synced. Raises Unavailable if it cannot be written.
        """
        try:
            self._file.execute("begin immediate")
            try:
                self._file.executemany("update deliveries set body = null where seq = ?", ((seq,) for seq in durable))
                if before is not None:
                    oldest = "select seq from deliveries where body is null and time < ? order by time limit ?"
                    self._file.execute(f"delete from deliveries where seq in ({oldest})", (before, _FORGET_AT_A_TIME))
                rows = [self._row(one) for one in deliveries]
                self._file.execute("commit")
            except BaseException:
                if self._file.in_transaction:
                    self._file.execute("rollback")
                raise
        except sqlite3.Error as error:
            raise Unavailable(self._location, str(error), 1.0) from error
        return rows

    def _row(self, one: Delivery) -> Row:
        row = self._file.execute(
            "select seq, time, digest = ?, body is null from deliveries where id = ?", (one.digest, one.id)
        ).fetchone()
        if row is not None:
            seq, time, same, durable = row
            return Row(seq, time, bool(same), bool(durable))
        made = self._file.execute(
            "insert into deliveries (id, digest, time, body) values (?, ?, ?, ?)",
            (one.id, one.digest, one.time, one.body),
        )
        return Row(int(made.lastrowid or 0), one.time, True, False)

    def pending(self, after: int, until: int, most: int) -> list[Pending]:
        """Deliveries with a number above `after`, up to `until`, that are not marked as durable, in order."""
        try:
            not_safe = "from deliveries where body is not null and seq > ? and seq <= ? order by seq limit ?"
            found = self._file.execute(f"select seq, time, body, digest {not_safe}", (after, until, most)).fetchall()
        except sqlite3.Error as error:
            raise Unavailable(self._location, str(error)) from error
        return [Pending(seq, time, body, hashlib.sha256(body).digest() != digest) for seq, time, body, digest in found]

    def close(self) -> None:
        self._file.close()


@dataclass(eq=False)
class _Batch:
    """Deliveries that are written and synced together."""

    deliveries: list[Delivery] = field(default_factory=list)
    rows: "asyncio.Task[list[Row]] | None" = None


class DeliveryQueue:
    """The deliveries of one opening: each is written to disk, then put into the queue.

    `highest`: the epoch and the highest number that are durable.
    """

    def __init__(self, source: "WebhookSource", highest: tuple[int, int]) -> None:
        self.queue = IngestQueue(source.name)
        self._source, self._highest = source, highest
        self._batch = _Batch()
        self._order = asyncio.Lock()
        self._accepting: set[asyncio.Task[None]] = set()
        self._in_flight: dict[int, asyncio.Future[None]] = {}
        self._unmarked: set[int] = set()
        self._recently_refused: dict[tuple[str, bytes], None] = {}
        self._last_forget = source.clock.elapsed() - _FORGET_EVERY
        self._disk = ThreadPoolExecutor(1, f"deliveries of {source.name}")
        self._closed = False

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        folder, now = Path(self._source.folder), self._source.clock.now()
        try:
            self._file = await self._on_disk(Deliveries, folder, self._source.name, now, self._highest)
            tasks = [asyncio.create_task(task()) for task in (self._replay, self._mark)]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await self.stop()
                # In the same thread: a write in progress is finished first.
                self._disk.submit(self._file.close)
        finally:
            await asyncio.shield(asyncio.to_thread(self._disk.shutdown))

    def check_space(self) -> None:
        """Raise Unavailable if the queue is full."""
        if self.queue.full or self._closed:
            raise self._unavailable("its queue is full; nothing was accepted")

    async def put(self, delivery: Delivery, within: float) -> bool:
        """Whether it is durable within some seconds. Raises Problem if its id was used with another body."""
        self.check_space()
        # A task: a number that was given must get its record, although no request waits for it any more.
        accepting = asyncio.create_task(self._accept(delivery))
        self._accepting.add(accepting)
        accepting.add_done_callback(self._accepting.discard)
        accepting.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait([accepting], timeout=within)
        if not accepting.done():
            return False
        accepting.result()
        return True

    async def stop(self) -> None:
        """Accept nothing more. Deliveries in flight have some seconds. Can be called twice."""
        self._closed = True
        await self.queue.close()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        with suppress(Unavailable):
            await self._write([])

    async def _accept(self, delivery: Delivery) -> None:
        row = await self._row(delivery)
        if not row.same:
            await self._refuse(delivery)
        elif not row.durable and row.seq not in self._unmarked:
            await (self._in_flight.get(row.seq) or await self._put(row, Arrival(delivery.body, self._origin(row))))

    async def _row(self, delivery: Delivery) -> Row:
        batch, at = self._batch, len(self._batch.deliveries)
        batch.deliveries.append(delivery)
        if batch.rows is None:
            batch.rows = asyncio.create_task(self._write_batch(batch))
        return (await batch.rows)[at]

    async def _write_batch(self, batch: _Batch) -> list[Row]:
        # What arrives while the batch before is synced belongs to this one.
        async with self._order:
            self._batch = _Batch()
            return await self._write(batch.deliveries)

    async def _refuse(self, delivery: Delivery) -> None:
        """Write a dead letter: the provider, or another holder of the secret, has made a mistake."""
        if (delivery.id, delivery.digest) not in self._recently_refused:
            reason = f"the webhook-id {delivery.id} was used with another body"
            await (await self.queue.put([Arrival(delivery.body, refused=reason)]))
            self._recently_refused[delivery.id, delivery.digest] = None
            if len(self._recently_refused) > _MAX_REFUSED:
                del self._recently_refused[next(iter(self._recently_refused))]
        fix = "give each message a different id"
        raise Problem(409, "the header webhook-id", "it was used with another body", fix)

    async def _put(self, row: "Row | Pending", arrival: Arrival) -> "asyncio.Future[None]":
        durable = await self.queue.put([arrival])
        self._in_flight[row.seq] = durable
        durable.add_done_callback(partial(self._stored, row.seq))
        return durable

    def _stored(self, seq: int, durable: "asyncio.Future[None]") -> None:
        self._in_flight.pop(seq, None)
        if not durable.cancelled() and durable.exception() is None:
            self._unmarked.add(seq)

    async def _replay(self) -> None:
        """Repeat what an earlier process did not mark as durable. Dedup drops what the channel holds."""
        last, until = 0, self._file.last
        while last < until:
            try:
                pending = await self._on_disk(self._file.pending, last, until, REPLAY_BATCH)
            except Unavailable as error:
                log.warning("%s", error)
                await asyncio.sleep(_MARK_TIMEOUT)
                continue
            for one in pending:
                if one.seq not in self._in_flight:
                    refused = f"its body in {self._file.path.name} is damaged" if one.damaged else None
                    await self._put(one, Arrival(one.body, self._origin(one), refused=refused))
            last = pending[-1].seq if pending else until

    async def _mark(self) -> None:
        while True:
            await asyncio.sleep(_MARK_TIMEOUT)
            try:
                await self._write([])
            except Unavailable as error:
                log.warning("%s", error)

    async def _write(self, deliveries: Sequence[Delivery]) -> list[Row]:
        """Add deliveries. Mark those that became durable, and from time to time forget old ones."""
        marked, now = tuple(self._unmarked), self._source.clock.elapsed()
        before = None
        if now - self._last_forget >= _FORGET_EVERY:
            before = self._source.clock.now() - round(self._source.remember.total_seconds() * 1e6)
        if not deliveries and not marked and before is None:
            return []
        rows = await self._on_disk(self._file.write, deliveries, marked, before)
        self._unmarked.difference_update(marked)
        if before is not None:
            self._last_forget = now
        return rows

    def _origin(self, row: "Row | Pending") -> Origin:
        return Origin(self._source.sender, self._file.epoch(row.seq), row.seq, row.time)

    def _unavailable(self, reason: str) -> Unavailable:
        return Unavailable(f"source {self._source.name}", reason, 1.0)

    async def _on_disk(self, work: Callable[P, Result], *args: P.args, **named: P.kwargs) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._disk, partial(work, *args, **named))


@dataclass(frozen=True)
class WebhookSource:
    """Listens at `listen+webhook://host:port/path`.

    `secret`: `whsec_` and base64, or any text; several during a rotation. `unsigned`: accept messages without a
    signature. `window`: the maximum difference between the signed time and the local time. `remember`: how long an id
    is known; a message that is repeated later is stored twice. `folder`: keeps ids, and bodies until they are durable.
    `challenge`: the query parameter that some providers expect back when the address is registered.
    """

    url: str
    name: str
    secret: str | Sequence[str] = field(default="", repr=False)
    unsigned: bool = False
    window: timedelta = timedelta(minutes=5)
    remember: timedelta = timedelta(hours=76)
    folder: Path | str = ".penstock/webhooks"
    challenge: str | None = None
    max_size: int = 900_000
    memory: int = 64 << 20
    connections: int = 1_000
    within: timedelta = timedelta(seconds=10)
    upload: timedelta = timedelta(seconds=30)
    idle_timeout: timedelta = timedelta(seconds=10)
    clock: Clock = field(default_factory=SystemClock)

    def __post_init__(self) -> None:
        path = unquote(endpoint(self.url, self.name).path)
        if "{" in path or "}" in path:
            raise Misconfigured(f"source {self.name}", f'the path "{path}" is not allowed', "remove the braces")
        secrets = self._keys()
        if not secrets and not self.unsigned:
            fix = "set secret= from the provider, or unsigned=True to accept messages without a signature"
            raise Misconfigured(f"source {self.name}, secret", "it is missing", fix)
        if secrets and self.unsigned:
            raise Misconfigured(
                f"source {self.name}, unsigned", "it cannot be combined with secret=", "remove one of them"
            )
        if self.remember < 2 * self.window:
            # A copy of a message has a valid signature for this time.
            raise Misconfigured(f"source {self.name}, remember", "it is shorter than two windows")

    def _keys(self) -> list[bytes]:
        return parse_secrets(f"source {self.name}, secret", self.secret)

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee.EXACTLY_ONCE

    @property
    def description(self) -> str:
        hours = self.remember.total_seconds() / 3600
        return f"the provider repeats events without a response, and each id is stored once within {hours:g} hours"

    @property
    def sender(self) -> str:
        """The sender name of the messages."""
        return f"{self.name}{WEBHOOK_SUFFIX}"

    def with_context(self, context: SourceContext) -> "WebhookSource":
        """The same source, with its ids in the folder of its pipeline."""
        return replace(self, folder=context.folder / "webhooks")

    @asynccontextmanager
    async def open(self, resume: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        at = endpoint(self.url, self.name)
        async with AsyncExitStack() as stack:
            listener = stack.enter_context(at.listen(self.name))
            highest = resume.highest.get(self.sender, (0, 0))
            queue = DeliveryQueue(self, highest)
            await stack.enter_async_context(queue.opened())
            messages = _Messages(self, queue, self._keys())
            routes = [Route(unquote(at.path), messages.answer, methods=["GET", "POST"])]
            # Providers connect through proxies and tunnels, which forward the host name.
            check = OriginCheck(listener, at.host, proxied=True)
            server = http_server(routes, check, self.connections, self.idle_timeout)
            await stack.enter_async_context(run_server(server, listener))
            intakes = await stack.enter_async_context(aclosing(queue.queue.intakes()))
            try:
                yield intakes
            finally:
                # Acknowledge what is durable, so that providers need not repeat it.
                await queue.stop()


class _Messages:
    """The requests of one opening."""

    def __init__(self, source: WebhookSource, queue: DeliveryQueue, secrets: Sequence[bytes]) -> None:
        self._source, self._queue, self._keys = source, queue, secrets
        # No gzip: the signature covers the bytes as they were sent.
        self._bodies = BodyReader(f"the source {source.name}", source.max_size, source.memory, source.upload)

    async def answer(self, request: Request) -> Response:
        return await (self._take(request) if request.method == "POST" else self._challenge(request))

    async def _take(self, request: Request) -> Response:
        message = self._id(request)
        self._queue.check_space()
        async with self._bodies.body(request, too_large("the body", self._source.max_size)) as body:
            if not self._source.unsigned:
                self._verify(request, message, body)
            delivery = Delivery(message, body, self._source.clock.now())
            durable = await self._queue.put(delivery, self._source.within.total_seconds())
        if not durable:
            raise Problem(503, "the message", "it is not durable yet", "send it again, with the same id")
        return reply({"id": message}, 202)

    def _id(self, request: Request) -> str:
        message = _single(request, "webhook-id", 400)
        if not 0 < len(message) <= MAX_ID or not (message.isascii() and message.isprintable()):
            reason = f"an id has 1 to {MAX_ID} printable ASCII characters"
            raise Problem(400, "the header webhook-id", reason, "choose another id")
        return message

    def _verify(self, request: Request, message: str, body: bytes) -> None:
        seconds, signature = _single(request, "webhook-timestamp", 400), _single(request, "webhook-signature", 401)
        if not re.fullmatch(r"[0-9]{1,15}", seconds):
            raise Problem(400, "the header webhook-timestamp", "it is not a number", "send the seconds since 1970")
        if not verify(self._keys, signature, message, seconds, body):
            raise Problem(401, "the header webhook-signature", "it does not match the message", _SIGN_FIX)
        if abs(self._source.clock.now() - int(seconds) * 1_000_000) > self._source.window.total_seconds() * 1e6:
            window = f"{self._source.window.total_seconds():g} s"
            reason = f"it is more than {window} from now"
            raise Problem(401, "the header webhook-timestamp", reason, "sign it again now, with the same id")

    async def _challenge(self, request: Request) -> Response:
        name = self._source.challenge
        if name is None:
            raise HTTPException(405, headers={"Allow": "POST"})
        values = request.query_params.getlist(name)
        if len(values) != 1 or not 0 < len(values[0]) <= MAX_CHALLENGE:
            raise Problem(400, f"?{name}", f"it must be set once, with 1 to {MAX_CHALLENGE} characters")
        return PlainTextResponse(values[0], headers={"cache-control": "no-store"})


def _single(request: Request, header: str, status: int) -> str:
    values = request.headers.getlist(header)
    if len(values) != 1:
        reason = "it is set twice" if values else "it is missing"
        raise Problem(status, f"the header {header}", reason, _SIGN_FIX)
    return values[0]

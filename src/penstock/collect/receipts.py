"""Receipts: where the records of a request are, and the rows that a query made of them.

A receipt names the origins of records and carries an HMAC, so that no table of receipts is needed.
"""

import asyncio
import base64
import hmac
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import astuple, dataclass, field
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

import orjson

from penstock.audit.account import Account, is_account
from penstock.audit.findings import IN_CHANNEL
from penstock.core.clock import Clock, Micros
from penstock.core.contracts import Entry, Offsets, SourceContext
from penstock.core.errors import Misconfigured, Refused, Unaccounted, Unavailable
from penstock.core.record import Origin
from penstock.core.scan import scan_batches
from penstock.web.responses import Problem

log = logging.getLogger(__name__)

_KEY_BYTES, _HMAC_BYTES = 32, 16
MAX_LENGTH = 3_000
"""Characters of a receipt."""

CLOCK_SKEW = 5_000_000
"""Microseconds by which the clock of a channel may be behind."""
MAX_ENTRIES, MAX_SECONDS = 200_000, 3.0
"""Limits of a search."""
MAX_OFFSETS = 100
"""How many offsets a response lists."""
_CONCURRENT, _QUEUED = 2, 16
_MAX_STAGES = 1_000

MAX_ANSWERS, MAX_ANSWER_BYTES = 10_000, 32 << 20
"""How many of the last answers are kept for later requests."""
SENDERS = 20_000
"""Recent senders. The channel may have rows of other senders, for which no request waits here."""
_BATCH, _AHEAD = 1_000, 4
"""Entries in a batch; batches that are read ahead of the event loop."""
_REASON = 1_000
"""Characters of a reason in a response."""
_POLL = 0.2
_RETRY = 1.0

Key = tuple[str, int, int]
"""Sender, epoch and number."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """The origins of the records of one request, and the opening of the source that received it."""

    sender: str
    epoch: int
    first: int
    count: int
    time: Micros
    opening: int

    @property
    def key(self) -> Key:
        return self.sender, self.epoch, self.first

    def origins(self) -> list[Origin]:
        return [Origin(self.sender, self.epoch, self.first + index, self.time) for index in range(self.count)]

    def __contains__(self, origin: Origin) -> bool:
        same = (origin.sender, origin.epoch) == (self.sender, self.epoch)
        return same and self.first <= origin.seq < self.first + self.count


class ReceiptSigner:
    """Encodes receipts as signed text."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def encode(self, receipt: Receipt) -> str:
        text = orjson.dumps(astuple(receipt))
        return base64.urlsafe_b64encode(self._hmac(text) + text).decode().rstrip("=")

    def decode(self, text: str) -> Receipt | None:
        """None if the signature is invalid."""
        if len(text) > MAX_LENGTH:
            return None
        try:
            signed = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        except ValueError:
            return None
        if not hmac.compare_digest(signed[:_HMAC_BYTES], self._hmac(signed[_HMAC_BYTES:])):
            return None
        receipt = Receipt(*orjson.loads(signed[_HMAC_BYTES:]))
        # base64 has several spellings of the same bytes.
        return receipt if self.encode(receipt) == text else None

    def _hmac(self, text: bytes) -> bytes:
        return hmac.digest(self._key, text, "sha256")[:_HMAC_BYTES]


def receipt_signer(folder: Path, name: str) -> ReceiptSigner:
    """With the key of this source from the folder. It is created there once, so receipts survive a restart."""
    path = folder / f"{quote(name, safe='')}.key"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            temporary = path.with_name(f"{path.name}.{os.getpid()}")
            try:
                temporary.touch(0o600)
                temporary.write_bytes(os.urandom(_KEY_BYTES))
                # Atomic: of several processes, one creates it.
                os.link(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
        key = path.read_bytes()
    except OSError as error:
        fix = "make it writable, or choose another folder"
        raise Misconfigured(f"source {name}, folder {folder}", error.strerror or str(error), fix) from error
    if len(key) != _KEY_BYTES:
        fix = "remove the file; existing receipts then become invalid"
        raise Misconfigured(f"source {name}, {path}", "not a valid key", fix)
    return ReceiptSigner(key)


# --- where records are ------------------------------------------------------------------------------------------------


@dataclass
class Location:
    """What was found of the records of a receipt."""

    into: list[Entry] = field(default_factory=list)
    dead: list[Entry] = field(default_factory=list)
    stages: list[tuple[str, bool]] = field(default_factory=list)
    """Each stage, and whether it has read all of them."""
    complete: bool = True
    """Whether the search reached the end."""

    def document(self, context: SourceContext) -> dict[str, object]:
        document: dict[str, object] = {
            "channel": context.into,
            "found": len(self.into),
            "offsets": [_offset(entry) for entry in self.into[:MAX_OFFSETS]],
            "refused": len(self.dead),
            "stages": [{"stage": stage, "read": read} for stage, read in self.stages],
        }
        if self.dead:
            document["dead"] = [
                {"channel": context.dead, **_offset(one), "reason": dead_reason(one)} for one in self.dead[:MAX_OFFSETS]
            ]
        if not self.complete:
            document["searched"] = "in part"
        return document


class Locator:
    """Finds records in the channels of the source. The number of concurrent searches is bounded, and so is each."""

    def __init__(self, context: SourceContext) -> None:
        self._context = context
        self._accounts: dict[str, Account] = {}
        self._offsets: dict[int, int] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._slots = asyncio.Semaphore(_CONCURRENT)
        self._queued = 0

    async def find(self, receipt: Receipt) -> Location:
        """Raises Unavailable if the channels are not available, or too many searches wait."""
        if self._queued >= _QUEUED:
            raise Unavailable("the search for records", "too many requests", 1.0)
        self._queued += 1
        try:
            async with self._slots:
                return await asyncio.to_thread(self._find, receipt)
        finally:
            self._queued -= 1

    def stop(self) -> None:
        self._stop.set()

    def _find(self, receipt: Receipt) -> Location:
        location, until = Location(), time.monotonic() + MAX_SECONDS
        location.into = self._search(self._context.into, receipt, until, location)
        # A record that does not fit the schema is in its channel, too. A record that was redriven has a dead letter.
        dead = self._search(self._context.dead, receipt, until, location)
        redriven = {_seq(entry) for entry in location.into if _header(entry, "redriven") is not None}
        location.dead = [one for one in dead if _seq(one) not in redriven]
        if location.into:
            location.stages = self._stages(location, until)
        return location

    def _search(self, channel: str, receipt: Receipt, until: float, location: Location) -> list[Entry]:
        channels, into = self._context.channels, self._context.into
        bounds = channels.bounds(channel)
        scanned, found = 0, dict[int, Entry]()
        for entries in scan_batches(channels, channel, channels.since(channel, receipt.time - CLOCK_SKEW), bounds):
            for entry in entries:
                origin = Origin.read(entry.headers)
                if origin is not None and origin in receipt and (channel == into or dead_reason(entry) is not None):
                    # Of two with the same number, the first one counts.
                    found.setdefault(origin.seq, entry)
            scanned += len(entries)
            if len(found) >= receipt.count:
                break
            if self._limit_reached(scanned, until):
                location.complete = False
                break
        return [found[seq] for seq in sorted(found)]

    def _stages(self, location: Location, until: float) -> list[tuple[str, bool]]:
        with self._lock:
            self._read_accounts(location, until)
            return [
                (stage, all(_was_read(entry, account.shares[self._context.into].until) for entry in location.into))
                for stage, account in sorted(self._accounts.items())
            ]

    def _read_accounts(self, location: Location, until: float) -> None:
        """Read what stages have reported since the last search."""
        channels, channel = self._context.channels, self._context.bookmarks
        bounds = channels.bounds(channel)
        scanned = 0
        for entries in scan_batches(channels, channel, self._offsets, bounds):
            for entry in entries:
                self._note(entry)
                self._offsets[entry.partition] = entry.offset + 1
            scanned += len(entries)
            if self._limit_reached(scanned, until):
                location.complete = False
                return
        self._offsets = {partition: end for partition, (_, end) in bounds.items()}

    def _note(self, entry: Entry) -> None:
        if not is_account(entry.key):
            return
        assert entry.key is not None
        self._accounts.pop(entry.key.decode(errors="replace"), None)
        try:
            account = Account.of(entry.key, entry.value or b"")
        except Refused:
            return
        # The account of a source counts duplicates before the channel; a source does not read the channel.
        reads = self._context.into in account.shares and not account.stage.startswith("source:")
        if reads and len(self._accounts) < _MAX_STAGES:
            self._accounts[account.stage] = account

    def _limit_reached(self, scanned: int, until: float) -> bool:
        return scanned >= MAX_ENTRIES or time.monotonic() > until or self._stop.is_set()


def _was_read(entry: Entry, until: Mapping[int, int]) -> bool:
    return entry.offset < until.get(entry.partition, 0)


def _offset(entry: Entry) -> dict[str, object]:
    return {"seq": _seq(entry), "partition": entry.partition, "offset": entry.offset}


def _seq(entry: Entry) -> int | None:
    origin = Origin.read(entry.headers)
    return origin.seq if origin else None


def dead_reason(entry: Entry) -> str | None:
    """Why a record was refused; None if only one query refused it and the record is in its channel."""
    reason = _header(entry, "reason") or ""
    return None if reason.startswith(IN_CHANNEL) else reason


def _header(entry: Entry, name: str) -> str | None:
    """The last header of that name: the record itself may have had one."""
    values = (value.decode(errors="replace") for header, value in reversed(entry.headers) if header == name)
    return next(values, None)


# --- answers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """The row that a query made of a record, or the reason why it was refused."""

    row: bytes
    refused: str | None = None


class Answers:
    """Reads results and dead letters in a thread, and hands them to the requests that wait for them.

    `lookback`: it starts to read this long before the opening: senders repeat requests that a crash interrupted.
    `is_own`: whether a sender name is used by this source, in this or in another process at the same port.
    """

    def __init__(
        self,
        context: SourceContext,
        channel: str,
        is_own: Callable[[str], bool],
        max_waiting: int,
        lookback: timedelta,
        clock: Clock,
    ) -> None:
        self._context, self._channel, self._is_own, self._clock = context, channel, is_own, clock
        self._max_waiting = max_waiting
        self._lookback = round(lookback.total_seconds() * 1_000_000)
        self._opened: Micros = clock.now()
        self._recent: OrderedDict[Key, Answer] = OrderedDict()
        self._bytes = 0
        self._senders: dict[str, None] = {}
        self._waiting: dict[Key, set[asyncio.Future[Answer]]] = {}
        self.waiting = 0
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        self._ahead = threading.Semaphore(_AHEAD)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        thread = threading.Thread(target=self._read, name=f"answers in {self._channel}")
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            await asyncio.shield(asyncio.to_thread(thread.join))

    @contextmanager
    def awaited(self, key: Key) -> Iterator["asyncio.Future[Answer]"]:
        """A future of the answer. Raises Problem if too many requests wait."""
        if self.waiting >= self._max_waiting:
            raise Problem(503, "the source", f"{self._max_waiting} requests wait for answers", "try again later")
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self.expect(key[0])
        if (previous := self._recent.get(key)) is not None:
            answer.set_result(previous)
        self._waiting.setdefault(key, set()).add(answer)
        self.waiting += 1
        try:
            yield answer
        finally:
            answer.cancel()
            self.waiting -= 1
            self._waiting[key].discard(answer)
            if not self._waiting[key]:
                del self._waiting[key]

    def expect(self, sender: str) -> None:
        """Keep answers to this sender from now on."""
        if not self._is_own(sender):
            self._senders.pop(sender, None)
            self._senders[sender] = None
            if len(self._senders) > SENDERS:
                del self._senders[next(iter(self._senders))]

    def _add(self, found: Sequence[tuple[Key, Answer]]) -> None:
        self._ahead.release()
        for key, answer in found:
            previous = self._recent.get(key)
            # The first row of a record is the answer. A refused record can be redriven, and then has a row.
            if previous is not None and (previous.refused is None or answer.refused is not None):
                continue
            self._recent[key] = answer
            self._bytes += len(answer.row) - (len(previous.row) if previous else 0)
            for future in self._waiting.get(key, ()):
                if not future.done():
                    future.set_result(answer)
        while len(self._recent) > MAX_ANSWERS or self._bytes > MAX_ANSWER_BYTES:
            self._bytes -= len(self._recent.popitem(last=False)[1].row)

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        channels, names = self._context.channels, (self._channel, self._context.dead)
        offsets: Mapping[str, Offsets] | None = None
        since, logged = self._opened - self._lookback, False
        while not self._stop.is_set():
            try:
                if offsets is None:
                    offsets = {name: channels.since(name, since) for name in names}
                with channels.reader(offsets) as reader:
                    while not self._stop.is_set():
                        self._hand_over(reader.read(_BATCH, _POLL))
                        offsets, logged = {name: reader.positions(name) for name in names}, False
            except Unaccounted as error:
                log.warning("some answers in %s were missed: %s", self._channel, error)
                offsets, since = None, self._clock.now()
            except Unavailable as error:
                # A warning once per outage.
                log.log(logging.DEBUG if logged else logging.WARNING, "no answers: %s", error)
                logged = True
                self._stop.wait(_RETRY)

    def _hand_over(self, entries: Sequence[Entry]) -> None:
        found = [one for entry in entries if (one := self._answer(entry)) is not None]
        if not found:
            return
        while not self._ahead.acquire(timeout=_POLL):
            if self._stop.is_set():
                return
        self._loop.call_soon_threadsafe(self._add, found)

    def _answer(self, entry: Entry) -> tuple[Key, Answer] | None:
        origin = Origin.read(entry.headers)
        if origin is None or not self._is_wanted(origin.sender, entry.appended):
            return None
        key = origin.sender, origin.epoch, origin.seq
        if entry.channel == self._channel:
            return key, Answer(entry.value or b"")
        reason = dead_reason(entry)
        return None if reason is None else (key, Answer(b"", reason[:_REASON]))

    def _is_wanted(self, sender: str, appended: Micros) -> bool:
        # The senders of a former process are not known: any of them may repeat its request.
        return self._is_own(sender) or sender in self._senders or appended < self._opened

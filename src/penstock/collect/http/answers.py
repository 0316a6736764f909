"""Answers: the rows that a query makes of records, handed to those who sent the records and wait.

A record that does not fit its channel never becomes a row: its dead letter is the answer.
"""

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import timedelta

from penstock.collect.http.receipts import Key
from penstock.collect.http.whereabouts import reason_of
from penstock.core.clock import Clock, Micros
from penstock.core.contracts import Entry, Offsets, SourceContext
from penstock.core.errors import Unaccounted, Unavailable
from penstock.core.record import Origin
from penstock.web.responses import Problem

log = logging.getLogger(__name__)

REMEMBERED, REMEMBERED_BYTES = 10_000, 32 << 20
"""So much of the last answers is kept for who asks later."""
SENDERS = 20_000
"""Those who were last heard here. The channel may hold rows of others, and nobody here asks for them."""
_TOGETHER, _AHEAD = 1_000, 4
"""Entries in a batch; and batches that may be read before the loop has taken them."""
_REASON = 1_000
"""Characters of a reason that are told."""
_MOMENT = 0.2
_PAUSE = 1.0


@dataclass(frozen=True, slots=True)
class Answer:
    """The row of a record; or why there is none."""

    row: bytes
    refused: str | None = None


Found = Sequence[tuple[Key, Answer]]


class Answers:
    """Reads results and dead letters in a thread, from some time before it is opened.

    `back`: how long before. Who lost a former life of the source while waiting comes again, and is answered.
    `own`: whether a sender is this source, in this process or in another behind the same port.
    """

    def __init__(
        self, home: SourceContext, channel: str, own: Callable[[str], bool], most: int, back: timedelta, clock: Clock
    ) -> None:
        self._home, self._channel, self._own, self._most, self._clock = home, channel, own, most, clock
        self._back = round(back.total_seconds() * 1_000_000)
        self._opened: Micros = clock.now()
        self._known: OrderedDict[Key, Answer] = OrderedDict()
        self._bytes = 0
        self._senders: dict[str, None] = {}
        self._waiting: dict[Key, set[asyncio.Future[Answer]]] = {}
        self.waiting = 0
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        self._ahead = threading.Semaphore(_AHEAD)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        thread = threading.Thread(target=self._follow, name=f"answers in {self._channel}")
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            await asyncio.shield(asyncio.to_thread(thread.join))

    @contextmanager
    def awaited(self, key: Key) -> Iterator["asyncio.Future[Answer]"]:
        """The answer, which may be there already. Problem when too many wait."""
        if self.waiting >= self._most:
            raise Problem(503, "the source", f"{self._most} wait for answers already", "ask again later")
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self.expect(key[0])
        if (known := self._known.get(key)) is not None:
            answer.set_result(known)
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
        """There may be answers for this sender: they are kept."""
        if not self._own(sender):
            self._senders.pop(sender, None)
            self._senders[sender] = None
            if len(self._senders) > SENDERS:
                del self._senders[next(iter(self._senders))]

    def _came(self, found: Found) -> None:
        self._ahead.release()
        for key, given in found:
            known = self._known.get(key)
            # Of several rows of a record, the first is the answer. One that was refused may be redriven, and have one.
            if known is not None and (known.refused is None or given.refused is not None):
                continue
            self._known[key] = given
            self._bytes += len(given.row) - (len(known.row) if known else 0)
            for answer in self._waiting.get(key, ()):
                if not answer.done():
                    answer.set_result(given)
        while len(self._known) > REMEMBERED or self._bytes > REMEMBERED_BYTES:
            self._bytes -= len(self._known.popitem(last=False)[1].row)

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        channels, followed = self._home.channels, (self._channel, self._home.dead)
        positions: Mapping[str, Offsets] | None = None
        since, troubled = self._opened - self._back, False
        while not self._stop.is_set():
            try:
                if positions is None:
                    positions = {name: channels.since(name, since) for name in followed}
                with channels.reader(positions) as reader:
                    while not self._stop.is_set():
                        self._hand(reader.read(_TOGETHER, _MOMENT))
                        positions, troubled = {name: reader.positions(name) for name in followed}, False
            except Unaccounted as error:
                log.warning("some answers in %s were not seen: %s", self._channel, error)
                positions, since = None, self._clock.now()
            except Unavailable as error:
                # Once for each time that it is away: that may be long.
                log.log(logging.DEBUG if troubled else logging.WARNING, "no answers: %s", error)
                troubled = True
                self._stop.wait(_PAUSE)

    def _hand(self, entries: Sequence[Entry]) -> None:
        found = [one for entry in entries if (one := self._found(entry)) is not None]
        if not found:
            return
        while not self._ahead.acquire(timeout=_MOMENT):
            if self._stop.is_set():
                return
        self._loop.call_soon_threadsafe(self._came, found)

    def _found(self, entry: Entry) -> tuple[Key, Answer] | None:
        origin = Origin.read(entry.headers)
        if origin is None or not self._wanted(origin.sender, entry.appended):
            return None
        key = origin.sender, origin.epoch, origin.seq
        if entry.channel == self._channel:
            return key, Answer(entry.value or b"")
        reason = reason_of(entry)
        return None if reason is None else (key, Answer(b"", reason[:_REASON]))

    def _wanted(self, sender: str, appended: Micros) -> bool:
        # Who was heard by a former life is not known: any of them may come again.
        return self._own(sender) or sender in self._senders or appended < self._opened

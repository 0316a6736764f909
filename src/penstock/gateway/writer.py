"""Writes to a channel: requests that wait are sent as one batch, and each is answered for its own records.

Only one batch of a channel is on its way at a time, and it is sent again under the same numbers until it is
acknowledged. So the numbers that the gateway gives have no gap, except for what the channel itself has refused.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from penstock.core.clock import Clock, Micros
from penstock.core.contracts import Sender
from penstock.core.errors import PenstockError, Refused, Unavailable
from penstock.core.record import Origin, Record

log = logging.getLogger(__name__)

_TOGETHER = 10_000
"""A batch is no longer than this, unless a request is."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0


@dataclass(eq=False)
class _Waiting:
    records: Sequence[Record]
    came: Micros
    done: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class ChannelWriter:
    """`again`: whether to send again what is not acknowledged. A line without partitions has no gaps but at its end."""

    def __init__(
        self, channel: str, sender: Sender, name: str, clock: Clock, patience: float, again: bool = True
    ) -> None:
        self._channel, self._sender, self._clock, self._patience = channel, sender, clock, patience
        self._again = again
        self._name, self._epoch, self._last = name, clock.now(), 0
        self._waiting: deque[_Waiting] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._since: float | None = None
        self._trouble = ""
        self.held = 0
        """The bytes that are on their way."""

    async def write(self, records: Sequence[Record]) -> None:
        """Return once all are acknowledged. Unavailable otherwise, with the word whether they may be there yet."""
        if not records:
            return
        if self._since is not None and self._clock.elapsed() - self._since > self._patience:
            raise self._not_sent()
        waiting = _Waiting(records, self._clock.now())
        self._waiting.append(waiting)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        try:
            async with asyncio.timeout(self._patience):
                await waiting.done
        except TimeoutError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                raise self._not_sent() from None
            why = f"it has not acknowledged in time; the records may be there, or come to be{self._trouble}"
            raise Unavailable(f"channel {self._channel}", why) from None

    @property
    def idle(self) -> bool:
        return self._sending is None

    async def close(self, patience: float) -> None:
        """Let what is on its way arrive, for so long."""
        if self._sending is None:
            return
        _, late = await asyncio.wait([self._sending], timeout=patience)
        for task in late:
            task.cancel()
            await asyncio.wait([task])

    def _not_sent(self) -> Unavailable:
        why = f"it does not acknowledge; these records were not sent{self._trouble}"
        return Unavailable(f"channel {self._channel}", why)

    async def _send(self) -> None:
        # Never broken off: what a request no longer waits for may still arrive, and nothing overtakes it.
        try:
            while self._waiting:
                batch, whole = self._next(), False
                self._since = self._clock.elapsed()
                self.held = sum(_size(record) for some in batch for record in some.records)
                try:
                    await self._deliver(batch)
                    whole = True
                finally:
                    if not whole:
                        self._settle(batch, Unavailable(f"channel {self._channel}", "the sending was broken off"))
        finally:
            self._sending, self._since, self._trouble, self.held = None, None, "", 0

    def _next(self) -> list[_Waiting]:
        batch, count = [self._waiting.popleft()], 0
        while self._waiting and (count := count + len(batch[-1].records)) < _TOGETHER:
            batch.append(self._waiting.popleft())
        for some in batch:
            some.records = list(self._numbered(some))
        return batch

    async def _deliver(self, batch: Sequence[_Waiting]) -> None:
        """Return once each of these requests has heard what became of its records."""
        try:
            await self._acknowledged([record for some in batch for record in some.records])
        except PenstockError as error:
            if not isinstance(error, Refused) or len(batch) == 1:
                self._settle(batch, error)
                return
        else:
            self._settle(batch, None)
            return
        # It is the record of one, perhaps, and the others need not hear of it.
        for some in batch:
            await self._deliver([some])

    async def _acknowledged(self, records: Sequence[Record]) -> None:
        pause = _FIRST_PAUSE
        while True:
            try:
                await self._sender.send(self._channel, records)
                self._trouble = ""
                return
            except Unavailable as error:
                if not self._again:
                    raise
                # Some may be there. The others would be a gap, if those that come later were sent before them.
                self._trouble = f" ({error})"
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _settle(self, batch: Sequence[_Waiting], failure: PenstockError | None) -> None:
        if failure is not None:
            self._epoch, self._last = max(self._epoch + 1, self._clock.now()), 0
            self._log_failure(batch, failure)
        for waiting in batch:
            if waiting.done.done():
                continue  # Its request has given up.
            if failure is None:
                waiting.done.set_result(None)
            else:
                waiting.done.set_exception(failure)

    def _log_failure(self, batch: Sequence[_Waiting], failure: PenstockError) -> None:
        own = [one.origin for some in batch for one in some.records if one.origin and one.origin.sender == self._name]
        if own:
            numbers = f"{self._name}/{own[0].epoch}: {own[0].seq}–{own[-1].seq}"
            log.warning("channel %s has not taken all of %s: %s", self._channel, numbers, failure)

    def _numbered(self, some: _Waiting) -> Iterator[Record]:
        for record in some.records:
            if record.origin is None:
                self._last += 1
                yield replace(record, origin=Origin(self._name, self._epoch, self._last, some.came))
            else:
                yield record


def _size(record: Record) -> int:
    return len(record.key or b"") + len(record.value or b"") + sum(len(name) + len(told) for name, told in record.extra)

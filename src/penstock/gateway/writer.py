"""Writes to a channel: requests that wait are sent as one batch, and each gets the result of its own records.

One batch of a channel is in flight at a time. It is sent again under the same numbers until it is acknowledged. So
the numbers that the gateway assigns have no gap, except for records that the channel rejected.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from penstock.core.clock import Clock, Micros
from penstock.core.contracts import Sender
from penstock.core.errors import PenstockError, Refused, Unavailable, backoff
from penstock.core.record import Origin, Record
from penstock.gateway.records import size

log = logging.getLogger(__name__)

_BATCH = 10_000
"""The most records in a batch, unless a single request has more."""


@dataclass(eq=False)
class _Request:
    records: Sequence[Record]
    received: Micros
    done: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class ChannelWriter:
    """`retry`: whether a batch is sent again until it is acknowledged. A binder without replay needs no retry."""

    def __init__(
        self, channel: str, sender: Sender, name: str, clock: Clock, timeout: float, retry: bool = True
    ) -> None:
        self._channel, self._sender, self._clock, self._timeout = channel, sender, clock, timeout
        self._retry = retry
        self._name, self._epoch, self._last = name, clock.now(), 0
        self._waiting: deque[_Request] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._since: float | None = None
        self._last_error = ""
        self.in_flight_bytes = 0

    async def write(self, records: Sequence[Record]) -> None:
        """Return once all are acknowledged; otherwise Unavailable, which states whether they may be in the channel."""
        if not records:
            return
        if self._since is not None and self._clock.elapsed() - self._since > self._timeout:
            raise self._not_sent()
        request = _Request(records, self._clock.now())
        self._waiting.append(request)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        try:
            async with asyncio.timeout(self._timeout):
                await request.done
        except TimeoutError:
            if request in self._waiting:
                self._waiting.remove(request)
                raise self._not_sent() from None
            why = f"acknowledgement timed out; the records may be there, or may arrive later{self._last_error}"
            raise Unavailable(f"channel {self._channel}", why) from None

    @property
    def idle(self) -> bool:
        return self._sending is None

    async def close(self, within: float) -> None:
        """Wait for what is in flight, at most `within` seconds."""
        if self._sending is None:
            return
        _, late = await asyncio.wait([self._sending], timeout=within)
        for task in late:
            task.cancel()
            await asyncio.wait([task])

    def _not_sent(self) -> Unavailable:
        why = f"it does not acknowledge; these records were not sent{self._last_error}"
        return Unavailable(f"channel {self._channel}", why)

    async def _send(self) -> None:
        # Continues after the timeout of a request: its records may still arrive, and no later batch may overtake them.
        try:
            while self._waiting:
                batch = self._next()
                self._since = self._clock.elapsed()
                self.in_flight_bytes = sum(size(record) for request in batch for record in request.records)
                try:
                    await self._deliver(batch)
                except BaseException:
                    self._settle(batch, Unavailable(f"channel {self._channel}", "sending was cancelled"))
                    raise
        finally:
            self._sending, self._since, self._last_error, self.in_flight_bytes = None, None, "", 0

    def _next(self) -> list[_Request]:
        batch, count = [self._waiting.popleft()], 0
        while self._waiting and (count := count + len(batch[-1].records)) < _BATCH:
            batch.append(self._waiting.popleft())
        for request in batch:
            request.records = list(self._numbered(request))
        return batch

    async def _deliver(self, batch: Sequence[_Request]) -> None:
        """Send the batch, and settle each of its requests."""
        failure: PenstockError | None = None
        try:
            await self._send_until_acknowledged([record for request in batch for record in request.records])
        except PenstockError as error:
            failure = error
        if isinstance(failure, Refused) and len(batch) > 1:
            # The record of one request may be the cause: send them one by one, so that the others succeed.
            for request in batch:
                await self._deliver([request])
        else:
            self._settle(batch, failure)

    async def _send_until_acknowledged(self, records: Sequence[Record]) -> None:
        for pause in backoff():
            try:
                await self._sender.send(self._channel, records)
                self._last_error = ""
                return
            except Unavailable as error:
                if not self._retry:
                    raise
                # Some records may be there. Without a retry, the rest would be a gap before later records.
                self._last_error = f" ({error})"
            await asyncio.sleep(pause)

    def _settle(self, batch: Sequence[_Request], failure: PenstockError | None) -> None:
        if failure is not None:
            self._epoch, self._last = max(self._epoch + 1, self._clock.now()), 0
            self._log_failure(batch, failure)
        for request in batch:
            if request.done.done():
                continue  # The request has timed out.
            if failure is None:
                request.done.set_result(None)
            else:
                request.done.set_exception(failure)

    def _log_failure(self, batch: Sequence[_Request], failure: PenstockError) -> None:
        records = [record for request in batch for record in request.records]
        own = [one.origin for one in records if one.origin and one.origin.sender == self._name]
        if own:
            numbers = f"{self._name}/{own[0].epoch}: {own[0].seq}–{own[-1].seq}"
            log.warning("channel %s did not acknowledge all of %s: %s", self._channel, numbers, failure)

    def _numbered(self, request: _Request) -> Iterator[Record]:
        for record in request.records:
            if record.origin is None:
                self._last += 1
                yield replace(record, origin=Origin(self._name, self._epoch, self._last, request.received))
            else:
                yield record

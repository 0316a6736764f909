"""A seat that one process has at a time: who waits for it takes over when it is left, or its holder falls silent.

A source that several collectors could hear, and one has to: each waits for the seat, and only then reads what the
channel holds and connects. So the whole collector runs inside of it, not only its connection.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

from penstock.core.contracts import ChannelPartition, Channels, Member
from penstock.core.errors import Misconfigured, Unavailable

LEAVE_WITHIN = 10.0
"""Seconds after which a binder that does not answer is left alone with its thread, which ends when it does."""


@dataclass(frozen=True)
class GroupSeat:
    """The seat is partition 0 of a channel, as a group deals it. One that is made for this, and stays empty, is best.

    A holder that could not renew its lease for `silence` gives the seat up by itself. That has to be well before the
    lease ends, for then another one has it. A process that was stopped meanwhile may still do, when it wakes, what it
    does before it looks at the clock.
    """

    channels: Channels
    group: str
    channel: str
    silence: timedelta = timedelta(seconds=5)

    def __post_init__(self) -> None:
        if self.silence <= timedelta(0):
            raise Misconfigured(f"the seat {self.group}, silence", "it is no time", "say half of the lease")

    @asynccontextmanager
    async def held(self) -> AsyncIterator[asyncio.Event]:
        """Wait for the seat; it is left at the end. The event is set once it is lost: then the body has to end at once.

        Raises what the binder raises while we wait: Unavailable, for one, when the channel is not there.
        """
        sitting = _Sitting(self, asyncio.get_running_loop())
        thread = threading.Thread(target=sitting.run, name=f"seat-{self.group}", daemon=True)
        thread.start()
        watching: asyncio.Task[None] | None = None
        try:
            await sitting.decided.wait()
            if sitting.failure is not None:
                raise sitting.failure
            watching = asyncio.create_task(sitting.watch())
            yield sitting.gone
        finally:
            if watching is not None:
                watching.cancel()
            sitting.over.set()
            leaving = asyncio.ensure_future(asyncio.to_thread(thread.join, LEAVE_WITHIN))
            try:
                await asyncio.shield(leaving)
            except asyncio.CancelledError:
                await leaving
                raise


async def seated(seat: GroupSeat, work: Callable[[], Awaitable[None]]) -> None:
    """Do the work whenever the seat is ours, from its beginning each time, until it is done. A loss cancels it."""
    while True:
        async with seat.held() as lost:
            working, losing = asyncio.ensure_future(work()), asyncio.ensure_future(lost.wait())
            try:
                await asyncio.wait((working, losing), return_when=asyncio.FIRST_COMPLETED)
                if working.done():
                    return await working
            finally:
                working.cancel()
                losing.cancel()
                await asyncio.gather(working, losing, return_exceptions=True)


class _Sitting:
    """A member of the group in a thread, and what the event loop hears of it."""

    def __init__(self, seat: GroupSeat, loop: asyncio.AbstractEventLoop) -> None:
        self._seat, self._loop = seat, loop
        self._silence = seat.silence.total_seconds()
        self._renewed = time.monotonic()
        self._ours = False
        self.decided, self.gone = asyncio.Event(), asyncio.Event()
        """The seat is ours, or cannot be had; it is ours no longer."""
        self.failure: Exception | None = None
        self.over = threading.Event()
        """The body has ended: nobody acts for us any more."""

    async def watch(self) -> None:
        """Give the seat up in time, whatever the thread is at."""
        while not self.gone.is_set():
            left = self._renewed + self._silence - time.monotonic()
            if left <= 0:
                self.gone.set()
            else:
                await asyncio.sleep(left)

    # --- the thread

    def run(self) -> None:
        try:
            with self._seat.channels.join(self._seat.group, [self._seat.channel], self, beginning=False) as member:
                self._sit(member)
        except Exception as error:  # noqa: BLE001 - who waits for the seat is told; who has it has lost it
            self.failure = error
        finally:
            self._tell(self.decided, self.gone)

    def _sit(self, member: Member) -> None:
        while not self.over.wait(self._silence / 20):
            began = time.monotonic()
            try:
                member.read(0, 0)
            except Unavailable:
                # A lease outlasts a short absence. Who only waits is told: there may be no such channel.
                if not self._ours:
                    raise
                continue
            if not self.gone.is_set():
                self._renewed = began
            elif self._ours:
                # It has been given up: it stays nobody's until the body has ended, or the lease.
                self.over.wait()

    def _tell(self, *events: asyncio.Event) -> None:
        with suppress(RuntimeError):  # The loop is closed: nobody listens.
            for event in events:
                self._loop.call_soon_threadsafe(event.set)

    # --- the dealing, called from within `read`

    def assigned(self, partitions: Sequence[ChannelPartition]) -> Mapping[ChannelPartition, int]:
        if (self._seat.channel, 0) in partitions and not self._ours:
            self._ours, self._renewed = True, time.monotonic()
            self._tell(self.decided)
        return {}

    def revoked(self, partitions: Sequence[ChannelPartition]) -> None:
        """It goes to somebody else as soon as this returns: not before the body has ended, if that is soon."""
        if (self._seat.channel, 0) in partitions:
            self._tell(self.gone)
            self.over.wait(self._silence)

    def lost(self, partitions: Sequence[ChannelPartition]) -> None:
        if (self._seat.channel, 0) in partitions:
            self._tell(self.gone)

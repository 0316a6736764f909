"""Standby: of several collectors, one holds the lease and collects. Another takes over when it stops or is silent.

The whole collector runs inside the lease, not only its connection: a new leader first reads what the channel holds.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

from penstock.collect.spool import in_thread
from penstock.core.contracts import ChannelPartition, Channels, Member
from penstock.core.errors import Misconfigured, Unavailable

STOP_TIMEOUT = 10.0
"""Seconds to wait at a stop for the thread, which may be in a call to the binder."""


@dataclass(frozen=True)
class LeaderLease:
    """The lease is partition 0 of a channel, assigned by a consumer group. Use an empty channel for it.

    A leader that could not renew its lease for `silence` gives it up. `silence` must be well below the lease time of
    the group. A process that was suspended may still run for a moment after it wakes up.
    """

    channels: Channels
    group: str
    channel: str
    silence: timedelta = timedelta(seconds=5)

    def __post_init__(self) -> None:
        if self.silence <= timedelta(0):
            raise Misconfigured(f"the lease {self.group}, silence", "it is not positive", "set half of the lease time")

    @asynccontextmanager
    async def held(self) -> AsyncIterator[asyncio.Event]:
        """Wait for the lease, and release it at the end. The event is set when it is lost: stop at once.

        Raises the errors of the binder while it waits, such as Unavailable for a missing channel.
        """
        candidate = _Candidate(self, asyncio.get_running_loop())
        thread = threading.Thread(target=candidate.run, name=f"lease-{self.group}", daemon=True)
        thread.start()
        watching: asyncio.Task[None] | None = None
        try:
            await candidate.decided.wait()
            if candidate.failure is not None:
                raise candidate.failure
            watching = asyncio.create_task(candidate.watch())
            yield candidate.gone
        finally:
            if watching is not None:
                watching.cancel()
            candidate.finished.set()
            await in_thread(thread.join, STOP_TIMEOUT)


async def run_as_leader(lease: LeaderLease, work: Callable[[], Awaitable[None]]) -> None:
    """Run the work whenever this process holds the lease, until it is done. Losing the lease cancels it."""
    while True:
        async with lease.held() as lost:
            working, losing = asyncio.ensure_future(work()), asyncio.ensure_future(lost.wait())
            try:
                await asyncio.wait((working, losing), return_when=asyncio.FIRST_COMPLETED)
                if working.done():
                    return await working
            finally:
                working.cancel()
                losing.cancel()
                await asyncio.gather(working, losing, return_exceptions=True)


class _Candidate:
    """A group member in a thread, with events for the event loop."""

    def __init__(self, lease: LeaderLease, loop: asyncio.AbstractEventLoop) -> None:
        self._lease, self._loop = lease, loop
        self._silence = lease.silence.total_seconds()
        self._renewed = time.monotonic()
        self._leading = False
        self.decided, self.gone = asyncio.Event(), asyncio.Event()
        """The lease is held, or cannot be acquired; the lease is lost."""
        self.failure: Exception | None = None
        self.finished = threading.Event()
        """The work has ended."""

    async def watch(self) -> None:
        """Give the lease up in time, whatever the thread does."""
        while not self.gone.is_set():
            left = self._renewed + self._silence - time.monotonic()
            if left <= 0:
                self.gone.set()
            else:
                await asyncio.sleep(left)

    # --- the thread

    def run(self) -> None:
        try:
            with self._lease.channels.join(self._lease.group, [self._lease.channel], self, beginning=False) as member:
                self._keep(member)
        except Exception as error:  # noqa: BLE001 - it is raised where the lease is awaited
            self.failure = error
        finally:
            self._notify(self.decided, self.gone)

    def _keep(self, member: Member) -> None:
        while not self.finished.wait(self._silence / 20):
            began = time.monotonic()
            try:
                member.read(0, 0)
            except Unavailable:
                # The lease survives a short outage. A candidate fails: the channel may be missing.
                if not self._leading:
                    raise
                continue
            if not self.gone.is_set():
                self._renewed = began
            elif self._leading:
                # Given up: keep the partition until the work has ended or the lease expires.
                self.finished.wait()

    def _notify(self, *events: asyncio.Event) -> None:
        with suppress(RuntimeError):  # The loop is closed.
            for event in events:
                self._loop.call_soon_threadsafe(event.set)

    # --- rebalance callbacks, called within `read`

    def assigned(self, partitions: Sequence[ChannelPartition]) -> Mapping[ChannelPartition, int]:
        if (self._lease.channel, 0) in partitions and not self._leading:
            self._leading, self._renewed = True, time.monotonic()
            self._notify(self.decided)
        return {}

    def revoked(self, partitions: Sequence[ChannelPartition]) -> None:
        """Another member gets it when this returns: wait for the end of the work, but not for long."""
        if (self._lease.channel, 0) in partitions:
            self._notify(self.gone)
            self.finished.wait(self._silence)

    def lost(self, partitions: Sequence[ChannelPartition]) -> None:
        if (self._lease.channel, 0) in partitions:
            self._notify(self.gone)

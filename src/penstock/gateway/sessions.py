"""Consumer sessions: members of groups for HTTP clients. A thread keeps the lease between two requests.

Records are sent again until they are committed: an answer that does not arrive loses nothing.
"""

import asyncio
import queue
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from penstock.core.clock import Clock
from penstock.core.contracts import ChannelPartition, Channels, Entry, Member
from penstock.core.errors import PenstockError, Unaccounted, Unavailable
from penstock.gateway.encode import partitions
from penstock.gateway.fetch import ReadLimits, read_some
from penstock.gateway.settings import GatewaySettings
from penstock.web.responses import Problem

Answer = TypeVar("Answer")

_BEAT = 0.5
"""A member that is not asked beats so often, in seconds: leases are longer."""


@dataclass(frozen=True)
class Polled:
    entries: Sequence[Entry]
    held: Mapping[ChannelPartition, int]
    given: Sequence[ChannelPartition]
    """Since the last answer, as are those that were lost."""
    lost: Sequence[ChannelPartition]
    number: int
    """By which it is committed."""


class ConsumerSession:
    """A member of a group. It serves one request at a time, and ends on leave, silence or an error."""

    def __init__(
        self, channels: Channels, group: str, names: Sequence[str], beginning: bool, silence: float, clock: Clock
    ) -> None:
        self.id, self.group, self.channels = secrets.token_hex(16), group, tuple(names)
        self.joined: Future[None] = _started()
        self.ended: Future[Problem] = _started()
        """Settled with the reason, once the group knows that this member has left."""
        self._binder, self._beginning, self._silence, self._clock = channels, beginning, silence, clock
        self._jobs: queue.SimpleQueue[Callable[[Member], None] | None] = queue.SimpleQueue()
        self._lock, self._busy = threading.Lock(), threading.Lock()
        self._leaving = threading.Event()
        self._pending: list[Entry] = []
        self._number = 0
        self._given: set[ChannelPartition] = set()
        self._lost: set[ChannelPartition] = set()
        self._gone: set[ChannelPartition] = set()
        """Partitions that went to others with records that we gave and that were not committed."""
        self._thread = threading.Thread(target=self._run, name=f"gateway-member-{group}", daemon=True)
        self._thread.start()

    def poll(self, limits: ReadLimits) -> "Future[Polled]":
        return self._submit(lambda member: self._poll(member, limits))

    def commit(self, number: int) -> "Future[None]":
        """What the answer of this number gave is done.

        Conflict when it is not the last one: the client has not got what that would cover. Conflict when partitions
        were lost meanwhile: nothing is committed then, and another call writes the rest.
        """
        return self._submit(lambda member: self._commit(member, number))

    def leave(self) -> None:
        """Begin to leave; `ended` tells when that is done."""
        self._leaving.set()
        self._jobs.put(None)

    # --- from outside to the thread

    def _submit(self, job: Callable[[Member], Answer]) -> "Future[Answer]":
        answer: Future[Answer] = _started()

        def run(member: Member) -> None:
            failure: PenstockError | None = Unavailable(f"group {self.group}", "the member has broken off")
            try:
                found = job(member)
                failure = None
            except PenstockError as error:
                failure = error
                if isinstance(error, Unaccounted):
                    raise
            finally:
                # Before the answer: who hears it may ask again at once.
                self._busy.release()
                if failure is None:
                    answer.set_result(found)
                else:
                    answer.set_exception(failure)

        with self._lock:
            if self.ended.done() or self._leaving.is_set():
                raise self.why_ended()
            if not self._busy.acquire(blocking=False):
                raise Problem(409, f"member {self.id}", "another request of it is under way", "wait for its answer")
            self._jobs.put(run)
        return answer

    def why_ended(self) -> Problem:
        if self.ended.done():
            return self.ended.result()
        return Problem(410, f"member {self.id}", "it is leaving its group", "join again")

    # --- the thread

    def _run(self) -> None:
        reason = "it has broken off"
        try:
            with self._binder.join(self.group, self.channels, self, beginning=self._beginning) as member:
                self.joined.set_result(None)
                reason = self._serve(member)
        except PenstockError as error:
            reason = str(error)
            if not self.joined.done():
                self.joined.set_exception(error)
        finally:
            if not self.joined.done():
                self.joined.set_exception(Unavailable(f"group {self.group}", "joining was broken off"))
            why = Problem(410, f"member {self.id}", f"it has left its group: {reason}", "join again")
            with self._lock:
                self.ended.set_result(why)
            while not self._jobs.empty():
                if (job := self._jobs.get()) is not None:
                    job(_Ended(why))

    def _serve(self, member: Member) -> str:
        heard = self._clock.elapsed()
        beaten = heard
        while not self._leaving.is_set():
            with suppress(queue.Empty):
                if (job := self._jobs.get(timeout=_BEAT)) is not None:
                    job(member)
                    heard = self._clock.elapsed()
            now = self._clock.elapsed()
            if now - heard > self._silence:
                self._leaving.set()
                return f"it was not heard of for {self._silence:g} s"
            if now - beaten >= _BEAT:
                beaten = now
                self._beat(member)
        return "it was asked to"

    def _beat(self, member: Member) -> None:
        """Keep the lease, and hear of what is dealt. Nothing is read: a commit would cover it."""
        with suppress(Unavailable):  # Who asks next hears of it, if it is still so.
            if early := member.read(0, 0):
                why = f"{len(early)} records were handed over when none were asked for: nothing can be committed"
                raise Unaccounted(early[0].channel, (), why)

    def _poll(self, member: Member, limits: ReadLimits) -> Polled:
        if not self._pending:
            self._number += 1
            until_leaving = replace(limits, ended=lambda: limits.ended() or self._leaving.is_set())
            read_some(_Held(member), self._pending, until_leaving)
        given, lost = sorted(self._given), sorted(self._lost)
        self._given.clear()
        self._lost.clear()
        return Polled(tuple(self._pending), member.held(), given, lost, self._number)

    def _commit(self, member: Member, number: int) -> None:
        if number != self._number:
            why = f"answer {number} is not the last one, which is {self._number}: nothing was committed"
            raise Problem(409, f"member {self.id}", why, "read again: what is not committed is given again")
        self._unless_gone()
        try:
            member.commit()
        except Unavailable:
            self._beat(member)
            self._unless_gone()
            raise
        self._pending.clear()

    def _unless_gone(self) -> None:
        if self._gone:
            gone = partitions(sorted(self._gone))
            self._gone.clear()
            raise Problem(
                409,
                f"group {self.group}",
                "partitions went to other members before this commit: nothing was committed",
                "their records are given to others again; commit once more for the rest",
                {"lost": gone},
            )

    # --- the dealing, called from within `read`

    def assigned(self, partitions: Sequence[ChannelPartition]) -> Mapping[ChannelPartition, int]:
        self._given |= set(partitions)
        return {}

    def revoked(self, partitions: Sequence[ChannelPartition]) -> None:
        """What was given and not committed is for others to do again: it is not ours to commit."""
        moved = set(partitions)
        self._gone |= {(entry.channel, entry.partition) for entry in self._pending} & moved
        self._pending[:] = [entry for entry in self._pending if (entry.channel, entry.partition) not in moved]
        self._lost |= moved
        self._given -= moved

    def lost(self, partitions: Sequence[ChannelPartition]) -> None:
        self.revoked(partitions)


def _started() -> "Future[Answer]":
    """A future that whoever waits for it cannot cancel."""
    future: Future[Answer] = Future()
    future.set_running_or_notify_cancel()
    return future


class _Held:
    """A member without entries that were on their way here when their partition went to somebody else."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def read(self, most: int, wait: float) -> Sequence[Entry]:
        entries = self._member.read(most, wait)
        held = self._member.held() if entries else {}
        return [entry for entry in entries if (entry.channel, entry.partition) in held]


class _Ended:
    """Stands for a member that is no more: a request that came too late hears why."""

    def __init__(self, why: Problem) -> None:
        self._why = why

    def read(self, most: int, wait: float) -> Sequence[Entry]:
        raise self._why

    def held(self) -> Mapping[ChannelPartition, int]:
        raise self._why

    def commit(self) -> None:
        raise self._why


_REMEMBERED = 1_000
"""So many ended sessions are kept with the reason why they ended."""


class Sessions:
    """All consumer sessions of this gateway."""

    def __init__(self, channels: Channels, settings: GatewaySettings, clock: Clock) -> None:
        self._channels, self._settings, self._clock = channels, settings, clock
        self._sessions: dict[str, ConsumerSession] = {}
        self._ended: OrderedDict[str, Problem] = OrderedDict()

    async def join(self, group: str, names: Sequence[str], beginning: bool) -> ConsumerSession:
        if len(self._sessions) >= self._settings.members:
            raise Unavailable("the gateway", f"{self._settings.members} members are here already", 5.0)
        silence = self._settings.silence.total_seconds()
        session = ConsumerSession(self._channels, group, names, beginning, silence, self._clock)
        self._sessions[session.id] = session
        loop = asyncio.get_running_loop()
        session.ended.add_done_callback(partial(self._on_ended, loop, session))
        try:
            async with asyncio.timeout(self._settings.acknowledged.total_seconds()):
                await asyncio.wrap_future(session.joined)
        except TimeoutError:
            session.leave()
            raise Unavailable(f"group {group}", "it could not be joined in time") from None
        return session

    def session(self, group: str, member: str) -> ConsumerSession:
        session = self._sessions.get(member)
        if session is not None and session.group == group:
            return session
        if session is None and member in self._ended:
            raise self._ended[member]
        fix = f"POST /groups/{group}/members makes one"
        raise Problem(404, f"group {group}", f'no member "{member}" is here', fix)

    async def leave(self, session: ConsumerSession, patience: float) -> None:
        session.leave()
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await asyncio.wrap_future(session.ended)

    async def close(self, patience: float) -> None:
        await asyncio.gather(*(self.leave(session, patience) for session in list(self._sessions.values())))

    def _on_ended(self, loop: asyncio.AbstractEventLoop, session: ConsumerSession, _: object) -> None:
        with suppress(RuntimeError):  # The loop is closed: there are no requests any more.
            loop.call_soon_threadsafe(self._forget, session)

    def _forget(self, session: ConsumerSession) -> None:
        self._sessions.pop(session.id, None)
        self._ended[session.id] = session.ended.result()
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

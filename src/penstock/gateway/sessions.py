"""Consumer sessions: group members for HTTP clients. A thread renews the lease between two requests.

Records are delivered again until they are committed, so a lost response loses no record.
"""

import asyncio
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from penstock.core.clock import Clock
from penstock.core.contracts import ChannelPartition, Channels, Entry, Member
from penstock.core.errors import PenstockError, Unaccounted, Unavailable
from penstock.gateway.fetch import ReadLimits, read_some
from penstock.gateway.records import partitions_json
from penstock.gateway.settings import GatewaySettings
from penstock.web.responses import Problem

Result = TypeVar("Result")

_HEARTBEAT = 0.5
"""Seconds between two heartbeats of an idle session: shorter than a lease."""
_MAX_ENDED = 1_000
"""Ended sessions that are remembered, with the reason."""


@dataclass(frozen=True)
class Polled:
    entries: Sequence[Entry]
    held: Mapping[ChannelPartition, int]
    assigned: Sequence[ChannelPartition]
    """Since the last response, as is `revoked`."""
    revoked: Sequence[ChannelPartition]
    number: int
    """The number of the response, for its commit."""


class ConsumerSession:
    """A member of a group. It serves one request at a time, and ends on leave, session timeout or an error."""

    def __init__(
        self, channels: Channels, group: str, names: Sequence[str], beginning: bool, timeout: float, clock: Clock
    ) -> None:
        self.id, self.group, self.channels = secrets.token_hex(16), group, tuple(names)
        self.joined: Future[None] = _started()
        self.ended: Future[Problem] = _started()
        """Set to the reason, once the member has left the group."""
        self._binder, self._beginning, self._timeout, self._clock = channels, beginning, timeout, clock
        self._lock, self._wake, self._leaving = threading.Lock(), threading.Event(), threading.Event()
        self._request: tuple[Callable[[Member], Any], Future[Any]] | None = None
        """The request that is being served, and its result."""
        self._pending: list[Entry] = []
        """Delivered, and not committed."""
        self._number = 0
        self._assigned: set[ChannelPartition] = set()
        self._revoked: set[ChannelPartition] = set()
        self._revoked_pending: set[ChannelPartition] = set()
        """Partitions that were revoked while some of their records were pending."""
        threading.Thread(target=self._run, name=f"gateway-member-{group}", daemon=True).start()

    def poll(self, limits: ReadLimits) -> "Future[Polled]":
        return self._submit(lambda member: self._poll(member, limits))

    def commit(self, number: int) -> "Future[None]":
        """Commit the records of the response with this number.

        Problem 409 when it is not the last response: the client has not received what the commit would cover. Problem
        409 when partitions were revoked meanwhile: nothing is committed, and another call commits the rest.
        """
        return self._submit(lambda member: self._commit(member, number))

    def leave(self) -> None:
        """Start to leave the group; `ended` is set when that is done."""
        self._leaving.set()
        self._wake.set()

    # --- called by requests

    def _submit(self, function: Callable[[Member], Result]) -> "Future[Result]":
        future: Future[Result] = _started()
        with self._lock:
            if self.ended.done():
                raise self.ended.result()
            if self._leaving.is_set():
                raise Problem(410, f"member {self.id}", "it is leaving its group", "join again")
            if self._request is not None:
                raise Problem(409, f"member {self.id}", "another request of it is in progress", "wait for its response")
            self._request = function, future
        self._wake.set()
        return future

    # --- called by the thread

    def _run(self) -> None:
        failure: PenstockError = Unavailable(f"group {self.group}", "joining failed")
        reason = "the session failed"
        try:
            with self._binder.join(self.group, self.channels, self, beginning=self._beginning) as member:
                self.joined.set_result(None)
                reason = self._serve(member)
        except PenstockError as error:
            failure, reason = error, str(error)
        finally:
            problem = Problem(410, f"member {self.id}", f"it has left its group: {reason}", "join again")
            if not self.joined.done():
                self.joined.set_exception(failure)
            with self._lock:
                self.ended.set_result(problem)
                request, self._request = self._request, None
            if request is not None:
                request[1].set_exception(problem)
            self._pending.clear()

    def _serve(self, member: Member) -> str:
        """Serve requests until the session ends; the reason."""
        active = heartbeat = self._clock.elapsed()
        while not self._leaving.is_set():
            if self._wake.wait(_HEARTBEAT):
                self._wake.clear()
                self._serve_request(member)
                active = self._clock.elapsed()
            now = self._clock.elapsed()
            if now - active > self._timeout:
                self._leaving.set()
                return f"it sent no request for {self._timeout:g} s"
            if now - heartbeat >= _HEARTBEAT:
                heartbeat = now
                self._heartbeat(member)
        return "it was asked to"

    def _serve_request(self, member: Member) -> None:
        if self._request is None:
            return
        function, future = self._request
        try:
            result = function(member)
        except PenstockError as error:
            self._request = None
            future.set_exception(error)
            if isinstance(error, Unaccounted):
                raise
        else:
            # Before the result: the client may send its next request at once.
            self._request = None
            future.set_result(result)

    def _heartbeat(self, member: Member) -> None:
        """Renew the lease and take part in rebalances. It must not read records: a commit would cover them."""
        with suppress(Unavailable):  # The next request gets the error, if it persists.
            if early := member.read(0, 0):
                why = f"{len(early)} records were delivered although 0 were requested: nothing can be committed"
                raise Unaccounted(early[0].channel, (), why)

    def _poll(self, member: Member, limits: ReadLimits) -> Polled:
        if not self._pending:
            self._number += 1
            until_leaving = replace(limits, ended=lambda: limits.ended() or self._leaving.is_set())
            read_some(member.read, self._pending, until_leaving)
            # Without entries of partitions that were revoked while they were being read.
            held = member.held()
            self._pending[:] = [entry for entry in self._pending if (entry.channel, entry.partition) in held]
        assigned, revoked = sorted(self._assigned), sorted(self._revoked)
        self._assigned.clear()
        self._revoked.clear()
        return Polled(tuple(self._pending), member.held(), assigned, revoked, self._number)

    def _commit(self, member: Member, number: int) -> None:
        if number != self._number:
            why = f"response {number} is not the last one, which is {self._number}: nothing was committed"
            raise Problem(409, f"member {self.id}", why, "read again: records are delivered until they are committed")
        self._require_assigned()
        try:
            member.commit()
        except Unavailable:
            self._heartbeat(member)
            self._require_assigned()
            raise
        self._pending.clear()

    def _require_assigned(self) -> None:
        if self._revoked_pending:
            revoked = partitions_json(sorted(self._revoked_pending))
            self._revoked_pending.clear()
            raise Problem(
                409,
                f"group {self.group}",
                "partitions were revoked before this commit: nothing was committed",
                "other members get their records again; commit again for the rest",
                {"revoked": revoked},
            )

    # --- RebalanceListener, called from within `read`

    def assigned(self, partitions: Sequence[ChannelPartition]) -> Mapping[ChannelPartition, int]:
        self._assigned |= set(partitions)
        return {}

    def revoked(self, partitions: Sequence[ChannelPartition]) -> None:
        """Forget what is pending of them: other members get it again."""
        revoked = set(partitions)
        self._revoked_pending |= {(entry.channel, entry.partition) for entry in self._pending} & revoked
        self._pending[:] = [entry for entry in self._pending if (entry.channel, entry.partition) not in revoked]
        self._revoked |= revoked
        self._assigned -= revoked

    def lost(self, partitions: Sequence[ChannelPartition]) -> None:
        self.revoked(partitions)


def _started() -> "Future[Result]":
    """A future that a waiting request cannot cancel."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()
    return future


class Sessions:
    """All consumer sessions of this gateway."""

    def __init__(self, channels: Channels, settings: GatewaySettings, clock: Clock) -> None:
        self._channels, self._settings, self._clock = channels, settings, clock
        self._sessions: dict[str, ConsumerSession] = {}

    async def join(self, group: str, names: Sequence[str], beginning: bool) -> ConsumerSession:
        ended = [session.id for session in self._sessions.values() if session.ended.done()]
        if len(self._sessions) - len(ended) >= self._settings.members:
            raise Unavailable("the gateway", f"it has {self._settings.members} consumer sessions already", 5.0)
        for member in ended[:-_MAX_ENDED]:
            del self._sessions[member]
        timeout = self._settings.session_timeout.total_seconds()
        session = ConsumerSession(self._channels, group, names, beginning, timeout, self._clock)
        self._sessions[session.id] = session
        try:
            async with asyncio.timeout(self._settings.send_timeout.total_seconds()):
                await asyncio.wrap_future(session.joined)
        except TimeoutError:
            session.leave()
            raise Unavailable(f"group {group}", "joining timed out") from None
        return session

    def session(self, group: str, member: str) -> ConsumerSession:
        session = self._sessions.get(member)
        if session is None or session.group != group:
            fix = f"join with POST /groups/{group}/members"
            raise Problem(404, f"group {group}", f'member "{member}" not found', fix)
        if session.ended.done():
            raise session.ended.result()
        return session

    async def leave(self, session: ConsumerSession, within: float) -> None:
        session.leave()
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                await asyncio.wrap_future(session.ended)

    async def close(self, within: float) -> None:
        await asyncio.gather(*(self.leave(session, within) for session in list(self._sessions.values())))

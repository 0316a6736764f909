"""Consumer sessions: group members for HTTP clients. The lease is renewed between two requests.

Records are delivered again until they are committed, so a lost response loses no record.
"""

import asyncio
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, TypeVar
from urllib.parse import quote

from starlette.responses import Response

from penstock.core.clock import Clock
from penstock.core.contracts import ChannelPartition, Channels, Entry, Member
from penstock.core.errors import PenstockError, Unaccounted, Unavailable
from penstock.gateway.fetch import ReadLimits, read_some
from penstock.gateway.records import Format, entry_json, partitions_json
from penstock.gateway.settings import GatewaySettings
from penstock.web.responses import Problem, reply

Result = TypeVar("Result")

_HEARTBEAT = 0.5
"""Seconds between two heartbeats of an idle session: shorter than a lease."""
_LEAVE_TIMEOUT = 5.0
"""Seconds to wait until sessions have left their groups."""
_MAX_ENDED = 1_000
"""Ended sessions that are remembered, with the reason."""


class ConsumerSession:
    """A member of a group. It serves one request at a time, and ends on leave, session timeout or an error.

    One thread makes all calls of the member. It is a daemon: middleware that does not answer must not delay the exit.
    """

    _member: Member

    def __init__(
        self, channels: Channels, group: str, names: Sequence[str], beginning: bool, timeout: float, clock: Clock
    ) -> None:
        self.id, self.group = secrets.token_hex(16), group
        self.url = f"/groups/{quote(group, safe='')}/members/{self.id}"
        self._channels, self._names, self._beginning = channels, names, beginning
        self._timeout, self._clock = timeout, clock
        self._membership, self._joined = ExitStack(), False
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._request: asyncio.Future[Any] | None = None
        """The request that is being served."""
        self._active = clock.elapsed()
        """When the last request was served."""
        self._leaving = asyncio.Event()
        self._reason = ""
        self._pending: list[Entry] = []
        """Delivered, and not committed."""
        self._membership.callback(self._pending.clear)
        self._number = 0
        self._assigned: set[ChannelPartition] = set()
        self._revoked: set[ChannelPartition] = set()
        self._revoked_pending: set[ChannelPartition] = set()
        """Partitions that were revoked while some of their records were pending."""
        threading.Thread(target=self._work, name=f"gateway-member-{group}", daemon=True).start()
        self.running = asyncio.create_task(self._run())
        """It ends when the member has left the group."""

    async def join(self, within: float) -> None:
        await self._serve(self._join, within)

    async def poll(self, limits: ReadLimits, form: Format, within: float) -> Response:
        """The records that are not committed, or the next ones; and the changes of the assignment."""
        return await self._serve(lambda: self._poll(limits, form), within)

    async def commit(self, number: int, within: float) -> None:
        """Commit the records of the response with this number.

        Problem 409 when it is not the last response: the client has not received what the commit would cover. Problem
        409 when partitions were revoked meanwhile: nothing is committed, and another call commits the rest.
        """
        await self._serve(lambda: self._commit(number), within)

    def leave(self, reason: str = "it was asked to") -> None:
        """Start to leave the group, after the request that is being served."""
        if not self._leaving.is_set():
            self._reason = reason
            self._leaving.set()

    def require(self) -> None:
        """Problem 410 when it has left its group."""
        if self._leaving.is_set():
            raise Problem(410, f"member {self.id}", f"it has left its group: {self._reason}", "join again")

    # --- in the event loop

    async def _serve(self, function: Callable[[], Result], within: float) -> Result:
        self.require()
        if self._request is not None:
            raise Problem(409, f"member {self.id}", "another request of it is in progress", "wait for its response")
        self._request = request = self._call(function)
        request.add_done_callback(self._served)
        try:
            async with asyncio.timeout(within):
                return await asyncio.shield(request)
        except TimeoutError:
            raise Unavailable(f"group {self.group}", f"it did not answer within {within:g} s") from None

    def _served(self, request: "asyncio.Future[Any]") -> None:
        self._request, self._active = None, self._clock.elapsed()
        error = request.exception()
        if isinstance(error, Unaccounted) or not self._joined:
            self.leave(str(error))

    async def _run(self) -> None:
        """Renew the lease between requests until the session ends; then leave the group."""
        try:
            while not self._leaving.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._leaving.wait(), _HEARTBEAT)
                if self._request is not None:
                    continue
                if self._clock.elapsed() - self._active > self._timeout:
                    self.leave(f"it sent no request for {self._timeout:g} s")
                elif not self._leaving.is_set():
                    await self._call(self._heartbeat)
        except PenstockError as error:
            self.leave(str(error))
        finally:
            self.leave("the session failed")
            closing = self._call(self._membership.close)
            self._calls.put(None)
        with suppress(PenstockError):
            await closing

    def _call(self, function: Callable[[], Result]) -> "asyncio.Future[Result]":
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()  # A request that stops waiting must not cancel it.
        self._calls.put((function, future))
        return asyncio.wrap_future(future)

    # --- in the thread

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            function, future = call
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 # it is raised where the result is awaited
                future.set_exception(error)

    def _join(self) -> None:
        joining = self._channels.join(self.group, self._names, self, beginning=self._beginning)
        self._member = self._membership.enter_context(joining)
        self._joined = True

    def _heartbeat(self) -> None:
        """Renew the lease and take part in rebalances. It must not read records: a commit would cover them."""
        with suppress(Unavailable):  # The next request gets the error, if it persists.
            if early := self._member.read(0, 0):
                why = f"{len(early)} records were delivered although 0 were requested: nothing can be committed"
                raise Unaccounted(early[0].channel, (), why)

    def _poll(self, limits: ReadLimits, form: Format) -> Response:
        member = self._member
        if not self._pending:
            self._number += 1
            until_leaving = replace(limits, ended=lambda: limits.ended() or self._leaving.is_set())
            read_some(member.read, self._pending, until_leaving)
            # Without entries of partitions that were revoked while they were being read.
            held = member.held()
            self._pending[:] = [entry for entry in self._pending if (entry.channel, entry.partition) in held]
        document = {
            "records": [entry_json(entry, form) for entry in self._pending],
            "held": [
                {"channel": channel, "partition": partition, "next": offset}
                for (channel, partition), offset in sorted(member.held().items())
            ],
            "assigned": partitions_json(sorted(self._assigned)),
            "revoked": partitions_json(sorted(self._revoked)),
            "commit": f"{self.url}/commit?answer={self._number}",
        }
        self._assigned.clear()
        self._revoked.clear()
        return reply(document)

    def _commit(self, number: int) -> None:
        if number != self._number:
            why = f"response {number} is not the last one, which is {self._number}: nothing was committed"
            raise Problem(409, f"member {self.id}", why, "read again: records are delivered until they are committed")
        self._require_assigned()
        try:
            self._member.commit()
        except Unavailable:
            self._heartbeat()
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


class Sessions:
    """All consumer sessions of this gateway."""

    def __init__(self, channels: Channels, settings: GatewaySettings, clock: Clock) -> None:
        self._channels, self._settings, self._clock = channels, settings, clock
        self._sessions: dict[str, ConsumerSession] = {}

    async def join(self, group: str, names: Sequence[str], beginning: bool) -> ConsumerSession:
        ended = [session.id for session in self._sessions.values() if session.running.done()]
        if len(self._sessions) - len(ended) >= self._settings.members:
            raise Unavailable("the gateway", f"it has {self._settings.members} consumer sessions already", 5.0)
        for member in ended[:-_MAX_ENDED]:
            del self._sessions[member]
        timeout = self._settings.session_timeout.total_seconds()
        session = ConsumerSession(self._channels, group, names, beginning, timeout, self._clock)
        self._sessions[session.id] = session
        try:
            await session.join(self._settings.send_timeout.total_seconds())
        except PenstockError:
            session.leave("joining failed")
            raise
        return session

    def session(self, group: str, member: str) -> ConsumerSession:
        session = self._sessions.get(member)
        if session is None or session.group != group:
            fix = f"join with POST /groups/{group}/members"
            raise Problem(404, f"group {group}", f'member "{member}" not found', fix)
        session.require()
        return session

    async def leave(self, *sessions: ConsumerSession) -> None:
        """Let these leave their groups, or all."""
        leaving = sessions or tuple(self._sessions.values())
        for session in leaving:
            session.leave()
        if leaving:
            await asyncio.wait([session.running for session in leaving], timeout=_LEAVE_TIMEOUT)

"""The read budget: a limit of the bytes that all WebSocket connections of a server have read and nobody has processed.

The websockets library reads a connection without regard to the others. So the messages that each connection holds are
counted after each read: complete ones that wait, and incomplete ones. Above the limits, connections are not read, and
the rest stays with the kernel and the senders. Incomplete messages do not block complete ones: above their limit, the
connection that holds most is closed.
"""

import asyncio
from collections.abc import Awaitable
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.frames import DATA_OPCODES, CloseCode, Frame
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.typing import DataLike

from penstock.collect.ingest import ARRIVAL_OVERHEAD

CONNECTION_BYTES = 2 << 20
"""Limit of complete messages of one connection."""
SHARED_BYTES = 8 << 20
"""Limit for all connections. Above it, a connection is paused after each read that brings something."""
MAX_BYTES = 32 << 20
"""Above it, all connections are paused: very many with a little each."""
INCOMPLETE_BYTES = 64 << 20
"""Limit of incomplete messages of all connections."""


class ReadBudget:
    """What all connections of a server hold."""

    def __init__(self, max_connections: int | None = None) -> None:
        """`max_connections`: including those before the handshake. A further one is closed at once."""
        self._max_connections = max_connections
        self._waiting = self._incomplete = 0
        # In the order of the last read.
        self._connections: dict[BudgetedConnection, None] = {}
        self._paused: dict[BudgetedConnection, None] = {}
        self._stopped = False

    def add(self, one: "BudgetedConnection") -> None:
        self._connections[one] = None
        if self._max_connections is not None and len(self._connections) > self._max_connections:
            one.transport.abort()
        elif self._stopped:
            # Not at once: the transport starts to read after `connection_made`.
            asyncio.get_running_loop().call_soon(self._pause_if_stopped, one)

    def _pause_if_stopped(self, one: "BudgetedConnection") -> None:
        if self._stopped:
            self._pause(one)

    def read(self, one: "BudgetedConnection", waiting: int, incomplete: int) -> None:
        """Account for a read: the changes in bytes of complete and incomplete messages."""
        self._waiting += waiting
        self._incomplete += incomplete
        if one in self._connections:
            del self._connections[one]
            self._connections[one] = None
        if self._incomplete > INCOMPLETE_BYTES:
            largest = max(self._connections, key=lambda each: each.incomplete)
            largest.reject(CloseCode.TRY_AGAIN_LATER, "too many incomplete messages; try again later")
        if self._waiting >= MAX_BYTES:
            self._stopped = True
            for each in self._connections:
                self._pause(each)
            self._paused = dict.fromkeys(self._connections)
        elif one.waiting >= CONNECTION_BYTES or (self._waiting >= SHARED_BYTES and one.waiting + one.incomplete):
            self._pause(one)

    def _pause(self, one: "BudgetedConnection") -> None:
        if one in self._connections and one not in self._paused:
            self._paused[one] = None
            one.pause()

    def release(self, size: int) -> None:
        """Messages of this size were processed. Paused connections may continue."""
        self._waiting -= size
        if self._waiting <= SHARED_BYTES // 2 and self._paused:
            self._stopped = False
            for one in [each for each in self._paused if each.waiting <= CONNECTION_BYTES // 2]:
                self.resume(one)

    def resume(self, one: "BudgetedConnection") -> None:
        if one in self._paused:
            del self._paused[one]
            one.resume()

    def remove(self, one: "BudgetedConnection", incomplete: int) -> None:
        """Nothing follows on this connection; its incomplete messages are dropped."""
        self._incomplete -= incomplete
        self._connections.pop(one, None)
        self._paused.pop(one, None)


class BudgetedConnection(ServerConnection):
    """A connection that is read within the budget. Its handler calls `accept`, `release` and `finish`."""

    # There may be very many idle connections: keep them small.
    __slots__ = (
        "_accepted",
        "_budget",
        "_closing",
        "_finished",
        "_partial",
        "_pong",
        "_sizes",
        "incomplete",
        "read_paused",
        "waiting",
    )

    def __init__(self, budget: ReadBudget, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.waiting = self.incomplete = 0
        self._budget = budget
        self._sizes: list[int] = []
        self._partial = 0
        self.read_paused = self._accepted = self._finished = False
        self._pong: asyncio.Future[float] | None = None
        self._closing: asyncio.Task[None] | None = None

    # --- called by the transport and the library ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # The library pauses a connection on its own, too, while its queue is full.
        self.recv_messages.resume = self._resume_reading
        self._budget.add(self)

    def _resume_reading(self) -> None:
        if not self.read_paused and not self.recv_messages.paused:
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        waiting, incomplete = self.waiting, self.incomplete
        super().data_received(data)
        if self.request is None:
            self._partial += len(data)
        self.incomplete = 0 if self._finished else self._partial + len(self.protocol.reader.buffer)
        self._budget.read(self, self.waiting - waiting, self.incomplete - incomplete)

    def process_event(self, event: Request | Response | Frame) -> None:
        if not isinstance(event, Frame):
            self._partial = 0
        elif event.opcode in DATA_OPCODES:
            if self._finished:
                return
            self._partial += len(event.data) + ARRIVAL_OVERHEAD
            if event.fin:
                self._sizes.append(self._partial)
                self.waiting += self._partial
                self._partial = 0
        super().process_event(event)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._remove()
        if not self._accepted:
            self.finish()

    async def ping(self, data: DataLike | None = None) -> Awaitable[float]:
        pong = await super().ping(data)
        assert isinstance(pong, asyncio.Future)
        self._pong = pong
        self._answer_ping()
        return pong

    def _answer_ping(self) -> None:
        """A paused connection cannot receive a pong: it must not time out."""
        if self.read_paused and self._pong is not None and not self._pong.done():
            self._pong.set_result(0.0)

    # --- called by the budget -----------------------------------------------------------------------------------------

    def pause(self) -> None:
        self.read_paused = True
        self.transport.pause_reading()
        self._answer_ping()

    def resume(self) -> None:
        self.read_paused = False
        self._resume_reading()

    def reject(self, code: CloseCode, reason: str) -> None:
        """Close with a reason. What still arrives is read and dropped: a reset would overtake the reason."""
        if self.state is State.OPEN:
            self.protocol.fail(code, reason)
            self.send_data()
            self._closing = asyncio.create_task(self.close())
        elif self.state is State.CONNECTING:
            self.transport.abort()
        self._budget.resume(self)
        self.transport.resume_reading()
        self._remove()

    def _remove(self) -> None:
        self._partial, incomplete, self.incomplete = 0, self.incomplete, 0
        self._budget.remove(self, incomplete)

    # --- called by the handler ----------------------------------------------------------------------------------------

    def accept(self) -> None:
        self._accepted = True

    def release(self, count: int) -> None:
        """The first `count` messages were processed."""
        size = sum(self._sizes[:count])
        del self._sizes[:count]
        self.waiting -= size
        self._budget.release(size)

    def finish(self) -> None:
        """Drop the remaining messages, and those that follow."""
        self._finished = True
        self.release(len(self._sizes))

"""What WebSocket connections have read and nobody has taken yet, bounded for all of them together.

The library reads a connection as long as it is let, whether there is room or not. So what each holds is weighed after
each read: whole messages that wait until they are taken, and those that have not ended. When too much waits,
connections are read no further, and the rest stays with the kernel and the senders. Nobody waits for a message that
does not end: whole ones go on without it, and when there is too much of such, whoever holds most has to go.
"""

import asyncio
from collections.abc import Awaitable
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.frames import DATA_OPCODES, CloseCode, Frame
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.typing import DataLike

from penstock.collect.gathering import OVERHEAD

OWN = 2 << 20
"""So much of whole messages waits for one connection; more is not read."""
WAITING = 8 << 20
"""So much waits for all of them; from then on each that brings something is read once, and no further."""
MOST = 32 << 20
"""With so much nobody is read: very many that bring a little each make a lot."""
UNFINISHED = 64 << 20
"""So many bytes of messages that have not ended are kept for all connections together."""


class Holding:
    """What all connections of a server hold."""

    def __init__(self, most: int | None = None) -> None:
        """`most`: connections, those included that have not said yet what they want; more are not even heard."""
        self._most = most
        self._waiting = self._unfinished = 0
        # The one that was read last comes last, here and among those that are read again.
        self._connections: dict[Held, None] = {}
        self._held_back: dict[Held, None] = {}
        self._stopped = False

    def enter(self, one: "Held") -> None:
        self._connections[one] = None
        if self._most is not None and len(self._connections) > self._most:
            one.transport.abort()
        elif self._stopped:
            # Not at once: the transport begins to read when it has said that it is there.
            asyncio.get_running_loop().call_soon(self._too_late, one)

    def _too_late(self, one: "Held") -> None:
        if self._stopped:
            self._hold_back(one)

    def read(self, one: "Held", waiting: int, unfinished: int) -> None:
        """It was read, and holds so much more or less than before."""
        self._waiting += waiting
        self._unfinished += unfinished
        if one in self._connections:
            del self._connections[one]
            self._connections[one] = None
        if self._unfinished > UNFINISHED:
            largest = max(self._connections, key=lambda each: each.unfinished)
            largest.leave(
                CloseCode.TRY_AGAIN_LATER, "there are too many messages here that do not end; come back later"
            )
        if self._waiting >= MOST:
            self._stopped = True
            for each in self._connections:
                self._hold_back(each)
            self._held_back = dict.fromkeys(self._connections)
        elif one.waiting >= OWN or (self._waiting >= WAITING and one.waiting + one.unfinished):
            self._hold_back(one)

    def _hold_back(self, one: "Held") -> None:
        if one in self._connections and one not in self._held_back:
            self._held_back[one] = None
            one.hold_back()

    def taken(self, weight: int) -> None:
        """So much no longer waits, and others may be read."""
        self._waiting -= weight
        if self._waiting <= WAITING // 2 and self._held_back:
            self._stopped = False
            for one in [each for each in self._held_back if each.waiting <= OWN // 2]:
                self.go_on(one)

    def go_on(self, one: "Held") -> None:
        if one in self._held_back:
            del self._held_back[one]
            one.go_on()

    def leave(self, one: "Held", unfinished: int) -> None:
        """Nothing follows, and what has not ended never will."""
        self._unfinished -= unfinished
        self._connections.pop(one, None)
        self._held_back.pop(one, None)


class Held(ServerConnection):
    """A connection that is read as long as there is room. Its handler tells what was taken, and when it is over."""

    # There may be very many idle connections: what each of them has beside the library stays small.
    __slots__ = (
        "_begun",
        "_closing",
        "_holding",
        "_met",
        "_over",
        "_pong",
        "_whole",
        "held_back",
        "unfinished",
        "waiting",
    )

    def __init__(self, holding: Holding, *of_the_library: Any, **options: Any) -> None:
        super().__init__(*of_the_library, **options)
        self.waiting = self.unfinished = 0
        self._holding = holding
        self._whole: list[int] = []
        self._begun = 0
        self.held_back = self._met = self._over = False
        self._pong: asyncio.Future[float] | None = None
        self._closing: asyncio.Task[None] | None = None

    # --- what the transport and the library tell ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # The library holds a connection back on its own, too, while many messages are in its queue.
        self.recv_messages.resume = self._read_again
        self._holding.enter(self)

    def _read_again(self) -> None:
        if not self.held_back and not self.recv_messages.paused:
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        waiting, unfinished = self.waiting, self.unfinished
        super().data_received(data)
        if self.request is None:
            self._begun += len(data)
        self.unfinished = 0 if self._over else self._begun + len(self.protocol.reader.buffer)
        self._holding.read(self, self.waiting - waiting, self.unfinished - unfinished)

    def process_event(self, event: Request | Response | Frame) -> None:
        if not isinstance(event, Frame):
            self._begun = 0
        elif event.opcode in DATA_OPCODES:
            if self._over:
                return
            self._begun += len(event.data) + OVERHEAD
            if event.fin:
                self._whole.append(self._begun)
                self.waiting += self._begun
                self._begun = 0
        super().process_event(event)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()
        if not self._met:
            self.over()

    async def ping(self, data: DataLike | None = None) -> Awaitable[float]:
        pong = await super().ping(data)
        assert isinstance(pong, asyncio.Future)
        self._pong = pong
        self._excuse()
        return pong

    def _excuse(self) -> None:
        """Whoever is not read cannot answer: it is not taken for dead."""
        if self.held_back and self._pong is not None and not self._pong.done():
            self._pong.set_result(0.0)

    # --- what the room decides ----------------------------------------------------------------------------------------

    def hold_back(self) -> None:
        self.held_back = True
        self.transport.pause_reading()
        self._excuse()

    def go_on(self) -> None:
        self.held_back = False
        self._read_again()

    def leave(self, code: CloseCode, why: str) -> None:
        """Say why. What it still sends is read off, and no more than that: a reset would overtake the words."""
        if self.state is State.OPEN:
            self.protocol.fail(code, why)
            self.send_data()
            self._closing = asyncio.create_task(self.close())
        elif self.state is State.CONNECTING:
            self.transport.abort()
        self._holding.go_on(self)
        self.transport.resume_reading()
        self._forget()

    def _forget(self) -> None:
        self._begun, unfinished, self.unfinished = 0, self.unfinished, 0
        self._holding.leave(self, unfinished)

    # --- what the handler tells ---------------------------------------------------------------------------------------

    def met(self) -> None:
        self._met = True

    def taken(self, count: int) -> None:
        """So many messages, from the first, have gone on."""
        weight = sum(self._whole[:count])
        del self._whole[:count]
        self.waiting -= weight
        self._holding.taken(weight)

    def over(self) -> None:
        """Nobody takes what is left, nor what follows."""
        self._over = True
        self.taken(len(self._whole))

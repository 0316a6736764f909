"""A TCP connection from which nothing is read before there is room for it: until then it stays with the kernel."""

import asyncio
import socket
from contextlib import suppress

from penstock.collect.listen import SEND_TIMEOUT

CHUNK = 64 << 10
"""So much is read at once: many records in a step, and little memory if each of them is tiny."""
LAST_WORDS = 1.0
"""Seconds that the other side has at the end to hear why."""


class Connection:
    def __init__(self, connected: socket.socket, peer: str) -> None:
        self.peer = peer
        self.why: str | None = None
        """Why it has to go."""
        self._socket = connected
        self._ready: asyncio.Future[None] | None = None
        connected.setblocking(False)
        # A connection breaks whose other side has vanished without a word, however long it was idle.
        with suppress(OSError):
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_KEEPIDLE"):
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(SEND_TIMEOUT))
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(SEND_TIMEOUT / 3))

    def leave(self, why: str) -> None:
        """Whoever waits for it wakes up, and finds the reason."""
        self.why = self.why or why
        self._wake()

    def _wake(self) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)

    async def readable(self, within: float | None) -> None:
        """Wait until there is something to read, or a reason to go; TimeoutError when neither comes."""
        if self.why is not None:
            return
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        loop.add_reader(self._socket, self._wake)
        try:
            async with asyncio.timeout(within):
                await self._ready
        finally:
            loop.remove_reader(self._socket)

    def read(self) -> bytes | None:
        """What is there; None if nothing is, and empty when nothing follows."""
        try:
            return self._socket.recv(CHUNK)
        except BlockingIOError:
            return None

    async def say(self, description: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, description)

    async def dismiss(self, description: bytes) -> None:
        """Say why. What is still under way is read off: a reset would overtake the words."""
        # A timeout is an OSError, too.
        with suppress(OSError):
            async with asyncio.timeout(LAST_WORDS):
                await self.say(description)
                self._socket.shutdown(socket.SHUT_WR)
                while await asyncio.get_running_loop().sock_recv(self._socket, CHUNK):
                    pass

    def close(self) -> None:
        self._socket.close()

"""An app on a port: what everything that is served over HTTP has in common."""

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn

from penstock.core.errors import Misconfigured


@asynccontextmanager
async def served(config: uvicorn.Config, listener: socket.socket) -> AsyncIterator["asyncio.Task[None]"]:
    """Serve while the body runs, which begins once clients can come; then let those who are there finish.

    The task ends early when the server does.
    """
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await first(serving, server.up.wait())
        yield serving
    finally:
        server.should_exit = True
        await serving


async def first(*ends: Awaitable[object] | None) -> None:
    """Wait for the first of these to end; what it raises is raised where it is awaited again."""
    futures = {asyncio.ensure_future(end): end for end in ends if end is not None}
    try:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future, end in futures.items():
            if future is not end:
                future.cancel()


class _Server(uvicorn.Server):
    """A server that says when it is up, and leaves the signals to the process that it runs in."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextmanager
def listening(whose: str, host: str, port: int, patience: float, shared: bool = False) -> Iterator[socket.socket]:
    """A socket that listens; Misconfigured when the address is not to be had.

    `shared`: with others of this machine that say so, too.
    """
    try:
        listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, reuse_port=shared
        )
    except (OSError, UnicodeError) as error:
        number = getattr(error, "errno", None)
        # Its own words repeat the address. An error of looking up a name has words, and a number that is no errno.
        why = os.strerror(number) if number and number > 0 else str(error)
        of_the_port = number in (errno.EADDRINUSE, errno.EACCES)
        way_out = "choose another port" if of_the_port else "choose a host that is this machine"
        raise Misconfigured(f"{whose} address {authority(host, port)}", why, way_out) from error
    with listener:
        # Connections inherit both. Answers are not held back for the peer's next word, which asyncio sees to by itself
        # only for sockets that it has made; and the kernel drops a peer that takes nothing, with all that waits for it.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(patience * 1_000))
        yield listener


def address(host: str, listener: socket.socket) -> str:
    return f"http://{authority(host, listener.getsockname()[1])}"


def authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

"""Run an ASGI app on a port."""

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn

from penstock.core.errors import Misconfigured


@asynccontextmanager
async def run_server(config: uvicorn.Config, listener: socket.socket) -> AsyncIterator["asyncio.Task[None]"]:
    """Serve while the body runs, from the time at which clients can connect; then finish open requests.

    The task that is given to the body ends early when the server does.
    """
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await wait_first(serving, server.up.wait())
        yield serving
    finally:
        server.should_exit = True
        await serving


async def wait_first(*ends: Awaitable[object] | None) -> None:
    """Wait until the first of these ends. What it raises is raised where it is awaited again."""
    futures = {asyncio.ensure_future(end): end for end in ends if end is not None}
    try:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future, end in futures.items():
            if future is not end:
                future.cancel()


class _Server(uvicorn.Server):
    """A server with an event for its start. It leaves signals to its process."""

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
def listen(whose: str, host: str, port: int, timeout: float, shared: bool = False) -> Iterator[socket.socket]:
    """A listening socket; Misconfigured when the address cannot be used.

    `timeout`: seconds after which the kernel drops a peer that acknowledges nothing. `shared`: other processes of this
    machine may listen at the same address.
    """
    try:
        listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, reuse_port=shared
        )
    except (OSError, UnicodeError) as error:
        number = getattr(error, "errno", None)
        # Its own text repeats the address. An error of a name lookup has a negative number, which is no errno.
        why = os.strerror(number) if number and number > 0 else str(error)
        of_the_port = number in (errno.EADDRINUSE, errno.EACCES)
        fix = "choose another port" if of_the_port else "choose a host that is this machine"
        raise Misconfigured(f"{whose} address {authority(host, port)}", why, fix) from error
    with listener:
        # Connections inherit both. asyncio sets TCP_NODELAY only on sockets that it has made itself.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout * 1_000))
        yield listener


def url_of(host: str, listener: socket.socket) -> str:
    return f"http://{authority(host, listener.getsockname()[1])}"


def authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

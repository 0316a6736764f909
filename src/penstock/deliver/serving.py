"""The app on a port."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

from penstock.deliver.delivery import Delivery
from penstock.deliver.streams import LONGEST
from penstock.errors import Misconfigured


async def serve(
    app: Starlette, host: str, port: int, stop: asyncio.Event, ready: Callable[[str], None] | None = None
) -> None:
    """Serve until `stop`; `ready` is told the address once clients can come. Port 0 takes a free one.

    Raises what ended the reading of the channels, if that ends by itself.
    """
    delivery: Delivery = app.state.delivery
    with _listening(host, port, app.state.patience) as listener:
        server = _Server(_config(app))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await _first(serving, server.up.wait())
            if ready and server.started:
                ready(f"http://{_authority(host, listener.getsockname()[1])}")
            await _first(serving, stop.wait(), delivery.ended)
        finally:
            # Before the server closes its connections: those who follow are told why.
            delivery.close()
            server.should_exit = True
            await serving
        if delivery.ended is not None:
            await delivery.ended


async def _first(*ends: Awaitable[object] | None) -> None:
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


class _NoFalseAlarm(logging.Filter):
    """Uvicorn takes a WebSocket that was refused with a reason for one that was forgotten, and says so as an error."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "returned without completing handshake" not in record.msg


logging.getLogger("uvicorn.error").addFilter(_NoFalseAlarm())


def _config(app: Starlette) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        ws="websockets-sansio",
        ws_max_size=LONGEST,
        ws_per_message_deflate=False,
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=3,
    )


@contextmanager
def _listening(host: str, port: int, patience: float) -> Iterator[socket.socket]:
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise Misconfigured(
            f"the page's address {_authority(host, port)}",
            error.strerror or str(error),
            "choose another port, or 0 for a free one",
        ) from error
    with listener:
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Connections inherit it: the kernel drops a peer that takes nothing, with all that waits for it.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(patience * 1_000))
        yield listener


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

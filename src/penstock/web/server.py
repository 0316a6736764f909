"""HTTP servers: run an ASGI app on a port, with an idle timeout and a limit of connections."""

import asyncio
import errno
import math
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from penstock.core.errors import Misconfigured
from penstock.web.responses import error_response

_MAX_HEAD = 64 << 10
_REJECTED = 100
"""Connections beyond the limit that are answered with 503; further ones are closed at once."""


def http_config(app: ASGIApp, connections: int, idle_timeout: float, shutdown_timeout: int, **more: Any) -> Config:
    """The configuration of a server with a limit of connections and an idle timeout in seconds.

    A request has to be complete within the idle timeout, too. The response may take longer, and an accepted WebSocket
    stays open. At shutdown, open requests have `shutdown_timeout` seconds. `more` can enable WebSocket and lifespan.
    """
    options = {"ws": "none", "lifespan": "off", **more}
    return Config(
        app,
        http=IdleTimeoutProtocol,
        access_log=False,
        log_config=None,
        server_header=False,
        limit_concurrency=connections,
        timeout_keep_alive=math.ceil(idle_timeout),
        h11_max_incomplete_event_size=_MAX_HEAD,
        timeout_graceful_shutdown=shutdown_timeout,
        **options,
    )


class IdleTimeoutProtocol(H11Protocol):
    """An HTTP connection, closed when no request was complete for `timeout_keep_alive` seconds.

    Uvicorn itself waits without limit for the first request and for the rest of a request. Beyond `limit_concurrency`
    connections, the answer is a JSON problem.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._inner_app, self._limit = self.app, self.limit_concurrency
        self.app, self.limit_concurrency = self._limited_app, None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn does
        super().connection_made(transport)
        if self._limit is not None and len(self.connections) > self._limit + _REJECTED:
            transport.abort()
            return
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        # Only a complete head stops the timer: handling it does.
        self.conn.receive_data(data)
        self.handle_events()

    async def _limited_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._limit is None or len(self.connections) <= self._limit:
            await self._inner_app(scope, receive, send)
            return
        facts = {"place": "the server", "fix": "try again later"}
        full = error_response(503, f"too many connections: the limit is {self._limit}", facts, {"connection": "close"})
        await full(scope, receive, send)


@asynccontextmanager
async def run_server(config: Config, listener: socket.socket) -> AsyncIterator["asyncio.Task[None]"]:
    """Serve while the context is open; at its end, finish open requests.

    It opens when clients can connect. The task that it yields ends early if the server does.
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
    """Wait until the first of these ends. Its error is raised only where it is awaited again."""
    futures = {asyncio.ensure_future(end): end for end in ends if end is not None}
    try:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future, end in futures.items():
            if future is not end:
                future.cancel()


class _Server(uvicorn.Server):
    """A server with an event for its start, and without signal handlers."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextmanager
def listen(owner: str, host: str, port: int, timeout: float, shared: bool = False) -> Iterator[socket.socket]:
    """A listening socket; Misconfigured when the address cannot be used.

    `timeout`: seconds after which the kernel drops a peer that acknowledges no data. `shared`: other processes of this
    machine may listen on the same address.
    """
    try:
        listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, reuse_port=shared
        )
    except (OSError, UnicodeError) as error:
        number = getattr(error, "errno", None)
        # The text of the error repeats the address. A failed name lookup has a negative number, not an errno.
        why = os.strerror(number) if number and number > 0 else str(error)
        port_problem = number in (errno.EADDRINUSE, errno.EACCES)
        fix = "choose another port" if port_problem else "choose an address of this machine"
        raise Misconfigured(f"{owner} address {authority(host, port)}", why, fix) from error
    with listener:
        # Connections inherit both. asyncio sets TCP_NODELAY only on sockets that it creates.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout * 1_000))
        yield listener


def url_of(host: str, listener: socket.socket) -> str:
    return f"http://{authority(host, listener.getsockname()[1])}"


def authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

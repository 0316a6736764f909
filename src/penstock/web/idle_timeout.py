"""Idle timeout and connection limit of HTTP servers."""

import asyncio
import math
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from penstock.web.responses import problem

_MAX_HEAD = 64 << 10
_REJECTED = 100
"""So many connections beyond the limit are answered with 503; further ones are closed at once."""


def http_config(app: ASGIApp, connections: int, idle_timeout: float, shutdown_timeout: int) -> Config:
    """The configuration of a server without WebSocket; see `server_config`."""
    return server_config(app, connections, idle_timeout, shutdown_timeout, ws="none", lifespan="off")


def server_config(app: ASGIApp, connections: int, idle_timeout: float, shutdown_timeout: int, **more: Any) -> Config:
    """The configuration of a server with at most so many connections, each idle for so many seconds at most.

    A request has to be complete within that time, too. Answering may take longer, and an accepted WebSocket stays open.
    At shutdown, requests that are being answered have `shutdown_timeout` seconds.
    """
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
        **more,
    )


class IdleTimeoutProtocol(H11Protocol):
    """An HTTP connection, closed when no request was complete for `timeout_keep_alive` seconds.

    Uvicorn itself waits without limit for the first request and for the rest of any. Beyond `limit_concurrency`
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
        facts = {"place": "the server", "fix": "come back later"}
        full = problem(503, f"{self._limit} connections are open already", facts, {"connection": "close"})
        await full(scope, receive, send)

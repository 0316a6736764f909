"""Connections that ask for nothing, and those that are too many."""

import asyncio
import math
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from penstock.serve.replies import problem

_LONGEST_HEAD = 64 << 10
_LEAVING = 100
"""So many beyond the limit are told that there are too many; more are not even heard."""


def http_alone(app: ASGIApp, connections: int, patience: float, farewell: int) -> Config:
    """An app that speaks HTTP alone; see `bounded`."""
    return bounded(app, connections, patience, farewell, ws="none", lifespan="off")


def bounded(app: ASGIApp, connections: int, patience: float, farewell: int, **more: Any) -> Config:
    """The configuration of a server: so many connections at once, each silent for so many seconds at most.

    A request has to be whole within that time, too; what is being answered may take longer, and a WebSocket that was
    accepted stays. At the end those who are being answered have `farewell` seconds.
    """
    return Config(
        app,
        http=Patient,
        access_log=False,
        log_config=None,
        server_header=False,
        limit_concurrency=connections,
        timeout_keep_alive=math.ceil(patience),
        h11_max_incomplete_event_size=_LONGEST_HEAD,
        timeout_graceful_shutdown=farewell,
        **more,
    )


class Patient(H11Protocol):
    """HTTP over a connection, which is closed when it has asked for nothing for `timeout_keep_alive` seconds.

    Uvicorn itself waits for ever for the first request, and for the rest of any. Beyond `limit_concurrency`
    connections, the answer is a document as all others are.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._all, self._most = self.app, self.limit_concurrency
        self.app, self.limit_concurrency = self._within, None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn does
        super().connection_made(transport)
        if self._most is not None and len(self.connections) > self._most + _LEAVING:
            transport.abort()
            return
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        # Not a word stops the clock, but a whole head: handling it does.
        self.conn.receive_data(data)
        self.handle_events()

    async def _within(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._most is None or len(self.connections) <= self._most:
            await self._all(scope, receive, send)
            return
        facts = {"place": "the server", "way_out": "come back later"}
        full = problem(503, f"{self._most} connections are open already", facts, {"connection": "close"})
        await full(scope, receive, send)

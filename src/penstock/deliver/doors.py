"""Each feed under one address in three ways: as a document, as server-sent events, as a WebSocket."""

import asyncio

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from penstock.core.clock import Clock
from penstock.deliver.delivery import Delivery
from penstock.deliver.outlet import Outlet
from penstock.deliver.settings import DeliverSettings
from penstock.deliver.streams import EventStream, Socket
from penstock.web.responses import problem

_START_UP = 20.0


class Doors:
    """Who may come in, and what they get."""

    def __init__(self, delivery: Delivery, settings: DeliverSettings, clock: Clock) -> None:
        self._delivery, self._settings, self._clock = delivery, settings, clock
        self._patience = settings.patience.total_seconds()

    async def http(self, request: Request) -> Response:
        wants_events = "text/event-stream" in request.headers.get("accept", "")
        outlet = await self._enter(request, follows=wants_events)
        if isinstance(outlet, Response):
            return outlet
        if wants_events:
            token = request.headers.get("last-event-id") or _after(request)
            return EventStream(self._delivery, outlet, token, self._patience)
        message = outlet.feed.join(_after(request))
        return Response(message.text, headers={"cache-control": "no-store"}, media_type="application/json")

    async def websocket(self, socket: WebSocket) -> None:
        outlet = await self._enter(socket, follows=True)
        if isinstance(outlet, Response):
            await socket.send_denial_response(outlet)
            return
        await socket.accept()
        await Socket(socket, self._delivery, outlet, self._clock, self._patience).follow(_after(socket))

    async def _enter(self, visitor: HTTPConnection, follows: bool) -> Outlet | Response:
        """The feed that is asked for, or the reason why not."""
        name = visitor.path_params["name"]
        outlet = self._delivery.outlets.get(name)
        if outlet is None:
            return problem(404, f'there is no feed "{name}"', {"feeds": sorted(self._delivery.outlets)})
        if follows and self._delivery.clients >= self._settings.clients:
            return problem(503, f"{self._settings.clients} clients follow already; come back later")
        try:
            # A table that is still being read would look as if rows had vanished.
            async with asyncio.timeout(_START_UP):
                await self._delivery.ready.wait()
        except TimeoutError:
            return problem(503, "the tables are still being read; come back later")
        return outlet


def _after(visitor: HTTPConnection) -> str | None:
    return visitor.query_params.get("after")

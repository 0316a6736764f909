"""The web app of a pipeline: its pages, the feeds that they and other clients follow, and metrics."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp

from penstock.core.clock import Clock, SystemClock
from penstock.core.contracts import Channels
from penstock.deliver.clients import LONGEST, FeedEndpoint
from penstock.deliver.delivery import Delivery
from penstock.deliver.metrics import metrics
from penstock.deliver.outlet import FeedSpec
from penstock.deliver.settings import DeliverSettings
from penstock.deliver.site import ChartSpec, Site
from penstock.deliver.states import States
from penstock.web.idle_timeout import server_config
from penstock.web.origin_check import OriginCheck, OriginCheckMiddleware
from penstock.web.paths import register_rest_convertor
from penstock.web.responses import SecurityHeaders, problem, reply
from penstock.web.server import listen, run_server, url_of, wait_first

_FAREWELL = 3
# No 'unsafe-eval': the page lets Vega interpret its expressions instead of compiling them.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def build(
    channels: Channels,
    feeds: Sequence[FeedSpec],
    charts: Sequence[ChartSpec],
    graph: Mapping[str, object],
    status: str,
    title: str,
    clock: Clock | None = None,
    settings: DeliverSettings | None = None,
    cache: Path | None = None,
    bookmarks: str = "",
) -> Starlette:
    """The app; while it is served it follows the channels, from where each feed starts.

    `app.state.delivery.figures()` tells what it measures itself. `cache` is a folder for what takes long to make.
    In the channel of bookmarks the writers of results are announced.
    """
    clock, settings = clock or SystemClock(), settings or DeliverSettings()
    delivery = Delivery(channels, feeds, status, clock, bookmarks)
    endpoint, site = FeedEndpoint(delivery, settings, clock), Site(charts, graph, title, cache)
    states = States(delivery, clock)
    register_rest_convertor()

    async def say_status(_: Request) -> Response:
        return reply(delivery.status())

    async def say_metrics(_: Request) -> Response:
        headers = {"cache-control": "no-store", "content-type": CONTENT_TYPE_PLAIN_0_0_4}
        return Response(metrics(delivery.status()), headers=headers)

    async def say_health(_: Request) -> Response:
        health = {"ready": delivery.ready.is_set(), "trouble": delivery.trouble}
        return reply(health, 200 if delivery.ready.is_set() and not delivery.trouble else 503)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with delivery.running(), site.making():
            yield

    app = Starlette(
        routes=[
            Route("/feeds/{name}", endpoint.http),
            WebSocketRoute("/feeds/{name}", endpoint.websocket),
            Route("/state/{query}", states.some),
            Route("/state/{query}/{key:rest}", states.one),
            Route("/status", say_status),
            Route("/metrics", say_metrics),
            Route("/healthz", say_health),
            *site.routes(),
        ],
        middleware=[Middleware(SecurityHeaders, policy=_POLICY)],
        exception_handlers={404: _nothing_here},
        lifespan=lifespan,
    )
    app.state.delivery = delivery
    app.state.settings = settings
    return app


async def _nothing_here(request: Request, _: Exception) -> Response:
    return problem(404, f"there is nothing at {request.url.path}")


async def serve(
    app: Starlette, host: str, port: int, stop: asyncio.Event, ready: Callable[[str], None] | None = None
) -> None:
    """Serve until `stop`; `ready` is told the address once clients can come. Port 0 takes a free one.

    Raises what ended the reading of the channels, if that ends by itself.
    """
    delivery: Delivery = app.state.delivery
    settings: DeliverSettings = app.state.settings
    with listen("the page's", host, port, settings.patience.total_seconds()) as listener:
        # Behind a proxy, the other sites may be names of our own.
        checked = OriginCheckMiddleware(app, OriginCheck(listener, host, origins=settings.origins))
        async with run_server(_config(checked, settings), listener) as serving:
            try:
                if ready and not serving.done():
                    ready(url_of(host, listener))
                await wait_first(serving, stop.wait(), delivery.ended)
            finally:
                # Before the server closes its connections: those who follow are told why.
                delivery.close()
        if delivery.ended is not None:
            await delivery.ended


class _NoFalseAlarm(logging.Filter):
    """Uvicorn takes a WebSocket that was refused with a reason for one that was forgotten, and says so as an error."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "returned without completing handshake" not in record.msg


logging.getLogger("uvicorn.error").addFilter(_NoFalseAlarm())


def _config(app: ASGIApp, settings: DeliverSettings) -> uvicorn.Config:
    return server_config(
        app,
        settings.connections,
        settings.patience.total_seconds(),
        _FAREWELL,
        ws="websockets-sansio",
        ws_max_size=LONGEST,
        ws_per_message_deflate=False,
    )

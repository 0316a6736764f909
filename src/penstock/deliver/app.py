"""The web app of a pipeline: pages, feeds, state, status and metrics."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute

from penstock.core.clock import SystemClock
from penstock.core.contracts import Channels
from penstock.deliver.clients import MAX_MESSAGE, FeedEndpoint
from penstock.deliver.delivery import DeliverSettings, Delivery, FeedSpec
from penstock.deliver.metrics import metrics
from penstock.deliver.site import ChartSpec, Site
from penstock.deliver.states import StateEndpoint
from penstock.web.requests import OriginCheck, OriginCheckMiddleware
from penstock.web.responses import SecurityHeaders, error_response, reply
from penstock.web.server import http_config, listen, run_server, url_of, wait_first

_SHUTDOWN_TIMEOUT = 3
# No 'unsafe-eval': on the page, Vega interprets its expressions instead of compiling them.
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
    settings: DeliverSettings | None = None,
    cache: Path | None = None,
    bookmarks: str = "",
) -> Starlette:
    """The app; while it is served, it reads the channels.

    `status`, `bookmarks`: channels. `cache`: a folder for the script of the charts.
    """
    clock, settings = SystemClock(), settings or DeliverSettings()
    delivery = Delivery(channels, feeds, status, clock, bookmarks)
    feed_endpoint, site = FeedEndpoint(delivery, settings, clock), Site(charts, graph, title, cache)
    state_endpoint = StateEndpoint(delivery, clock)

    async def get_status(_: Request) -> Response:
        return reply(delivery.status())

    async def get_metrics(_: Request) -> Response:
        headers = {"cache-control": "no-store", "content-type": CONTENT_TYPE_PLAIN_0_0_4}
        return Response(metrics(delivery.status()), headers=headers)

    async def get_health(_: Request) -> Response:
        health = {"ready": delivery.ready.is_set(), "trouble": delivery.trouble}
        return reply(health, 200 if delivery.ready.is_set() and not delivery.trouble else 503)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with delivery.running(), site.preparing():
            yield

    app = Starlette(
        routes=[
            Route("/feeds/{name}", feed_endpoint.http),
            WebSocketRoute("/feeds/{name}", feed_endpoint.websocket),
            Route("/state/{query}", state_endpoint.scan),
            Route("/state/{query}/{key:rest}", state_endpoint.get),
            Route("/status", get_status),
            Route("/metrics", get_metrics),
            Route("/healthz", get_health),
            *site.routes(),
        ],
        middleware=[Middleware(SecurityHeaders, policy=_POLICY)],
        exception_handlers={404: _not_found},
        lifespan=lifespan,
    )
    app.state.delivery = delivery
    app.state.settings = settings
    return app


async def _not_found(request: Request, _: Exception) -> Response:
    return error_response(404, f"unknown address {request.url.path}")


async def serve(
    app: Starlette, host: str, port: int, stop: asyncio.Event, ready: Callable[[str], None] | None = None
) -> None:
    """Serve until `stop`. `ready` is called with the address when clients can connect; port 0 is any free port.

    If reading the channels fails, its error is raised.
    """
    delivery: Delivery = app.state.delivery
    settings: DeliverSettings = app.state.settings
    with listen("the page's", host, port, settings.idle_timeout.total_seconds()) as listener:
        checked = OriginCheckMiddleware(app, OriginCheck(listener, host, origins=settings.origins))
        config = http_config(
            checked,
            settings.connections,
            settings.idle_timeout.total_seconds(),
            _SHUTDOWN_TIMEOUT,
            lifespan="auto",
            ws="websockets-sansio",
            ws_max_size=MAX_MESSAGE,
            ws_per_message_deflate=False,
        )
        async with run_server(config, listener) as serving:
            try:
                if ready and not serving.done():
                    ready(url_of(host, listener))
                await wait_first(serving, stop.wait(), delivery.ended)
            finally:
                # Before the server closes the connections, so that clients learn the reason.
                delivery.close()
        if delivery.ended is not None:
            await delivery.ended


class _NoFalseErrors(logging.Filter):
    """Drops an error that uvicorn logs when a WebSocket is rejected with a response."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "returned without completing handshake" not in record.msg


logging.getLogger("uvicorn.error").addFilter(_NoFalseErrors())

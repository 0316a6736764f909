"""The web app of a pipeline: its pages, the feeds that they and other clients follow, and metrics."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute

from penstock.core.clock import Clock, SystemClock
from penstock.core.contracts import Channels
from penstock.deliver.delivery import Delivery
from penstock.deliver.doors import Doors
from penstock.deliver.metrics import metrics
from penstock.deliver.outlet import FeedSpec
from penstock.deliver.settings import DeliverSettings
from penstock.deliver.site import ChartSpec, Site
from penstock.deliver.states import States
from penstock.web.paths import register_rest_convertor
from penstock.web.responses import SecurityHeaders, problem, reply

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
    doors, site = Doors(delivery, settings, clock), Site(charts, graph, title, cache)
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
            Route("/feeds/{name}", doors.http),
            WebSocketRoute("/feeds/{name}", doors.websocket),
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

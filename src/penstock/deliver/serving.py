"""The app on a port."""

import asyncio
import logging
from collections.abc import Callable

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp

from penstock.deliver.delivery import Delivery
from penstock.deliver.settings import DeliverSettings
from penstock.deliver.streams import LONGEST
from penstock.web.idle_timeout import server_config
from penstock.web.origin_check import OriginCheck, OriginCheckMiddleware
from penstock.web.server import listen, run_server, url_of, wait_first

_FAREWELL = 3


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

"""The gateway on a port."""

import asyncio
from collections.abc import Callable

from penstock.gateway.app import build
from penstock.gateway.gateway import Gateway
from penstock.web.idle_timeout import http_config
from penstock.web.origin_check import OriginCheck, OriginCheckMiddleware
from penstock.web.server import listen, run_server, url_of, wait_first


async def serve(
    gateway: Gateway, host: str, port: int, stop: asyncio.Event, ready: Callable[[str], None] | None = None
) -> None:
    """Serve until `stop`; `ready` is told the address once clients can come. Port 0 takes a free one.

    At the end long polls are answered with what there is, what is being sent is acknowledged, members leave.
    """
    settings, patience = gateway.settings, gateway.settings.patience.total_seconds()
    with listen("the gateway's", host, port, patience) as listener:
        app = OriginCheckMiddleware(build(gateway), OriginCheck(listener, host))
        farewell = round(settings.acknowledged.total_seconds()) + 2
        config = http_config(app, settings.connections, patience, farewell)
        async with gateway.running(), run_server(config, listener) as serving:
            try:
                if ready and not serving.done():
                    ready(url_of(host, listener))
                await wait_first(serving, stop.wait())
            finally:
                gateway.closing.set()

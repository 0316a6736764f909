"""The gateway on a port."""

import asyncio
from collections.abc import Callable

from penstock.gateway.app import build
from penstock.gateway.gateway import Gateway
from penstock.serve import address, first, listening, served
from penstock.serve.patient import http_alone
from penstock.serve.visitors import Checked, Visitors


async def serve(
    gateway: Gateway, host: str, port: int, stop: asyncio.Event, ready: Callable[[str], None] | None = None
) -> None:
    """Serve until `stop`; `ready` is told the address once clients can come. Port 0 takes a free one.

    At the end long polls are answered with what there is, what is being sent is acknowledged, members leave.
    """
    settings, patience = gateway.settings, gateway.settings.patience.total_seconds()
    with listening("the gateway's", host, port, patience) as listener:
        app = Checked(build(gateway), Visitors(listener, host))
        farewell = round(settings.acknowledged.total_seconds()) + 2
        config = http_alone(app, settings.connections, patience, farewell)
        async with gateway.running(), served(config, listener) as serving:
            try:
                if ready and not serving.done():
                    ready(address(host, listener))
                await first(serving, stop.wait())
            finally:
                gateway.closing.set()

"""The gateway on a port."""

import asyncio
import math
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from penstock.gateway.app import build
from penstock.gateway.gateway import Gateway
from penstock.gateway.settings import GatewaySettings
from penstock.serve import address, first, listening, served
from penstock.serve.patient import Patient
from penstock.serve.visitors import Addressed

_LONGEST_HEAD = 64 << 10


async def serve(
    gateway: Gateway, host: str, port: int, stop: asyncio.Event, ready: Callable[[str], None] | None = None
) -> None:
    """Serve until `stop`; `ready` is told the address once clients can come. Port 0 takes a free one.

    At the end long polls are answered with what there is, what is being sent is acknowledged, members leave.
    """
    with listening("the gateway's", host, port, gateway.settings.patience.total_seconds()) as listener:
        app = Addressed(build(gateway), listener, host)
        async with gateway.running(), served(_config(app, gateway.settings), listener) as serving:
            try:
                if ready and not serving.done():
                    ready(address(host, listener))
                await first(serving, stop.wait())
            finally:
                gateway.closing.set()


def _config(app: ASGIApp, settings: GatewaySettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=Patient,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        limit_concurrency=settings.connections,
        timeout_keep_alive=math.ceil(settings.patience.total_seconds()),
        h11_max_incomplete_event_size=_LONGEST_HEAD,
        timeout_graceful_shutdown=round(settings.acknowledged.total_seconds()) + 2,
    )

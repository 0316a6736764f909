"""`penstock proxy`: a stream for a device that sleeps."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.collect.sse import SseSource
from penstock.core.clock import duration
from penstock.core.errors import Misconfigured
from penstock.push import PushProxy
from penstock.supervise.signals import async_stop_event

SECRET, TOKEN = "PENSTOCK_PROXY_SECRET", "PENSTOCK_PROXY_TOKEN"


def proxy(
    upstream: Annotated[
        str, typer.Argument(help="The stream to listen to: http://… or https://….", show_default=False)
    ],
    folder: Annotated[Path, typer.Option(help="Where events wait for the device.")] = Path(".penstock/proxy"),
    wake: Annotated[str, typer.Option(help="The webhook that wakes the device.", show_default="nobody does")] = "",
    public: Annotated[
        str, typer.Option(help="The address at which the device finds this proxy.", show_default="where it listens")
    ] = "",
    most: Annotated[int, typer.Option(min=8, help="Megabytes to keep; then the upstream waits.")] = 256,
    again: Annotated[str, typer.Option(help="After so long a device that was woken is woken again.")] = "5 minutes",
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0 takes a free one.")] = 8790,
) -> None:
    """Keep a stream of server-sent events for a device that sleeps, and wake it, until Ctrl-C.

    The device reads GET /events, and goes on behind its Last-Event-ID. PENSTOCK_PROXY_TOKEN is what it has to say as
    Authorization: Bearer …; PENSTOCK_PROXY_SECRET signs the webhook, as Standard Webhooks do.
    """
    try:
        pause = duration(again)
    except ValueError as error:
        raise Misconfigured("--again", str(error)) from error
    described = PushProxy(
        SseSource(f"sse+{upstream.removeprefix('sse+')}", "upstream"),
        folder,
        wake,
        os.environ.get(SECRET, ""),
        os.environ.get(TOKEN, ""),
        public,
        most << 20,
        pause,
    )
    asyncio.run(_serve(described, host, port))


async def _serve(described: PushProxy, host: str, port: int) -> None:
    stop = async_stop_event()

    def ready(address: str) -> None:
        typer.echo(f"events for the device are at {address}/events")
        sys.stdout.flush()

    await described.serve(host, port, stop, ready)

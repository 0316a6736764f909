"""`penstock proxy`: a stream of events for a device that sleeps."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import parse_duration
from penstock.collect.sse import SseSource
from penstock.push import PushProxy
from penstock.supervise.process import async_stop_event

SECRET, TOKEN = "PENSTOCK_PROXY_SECRET", "PENSTOCK_PROXY_TOKEN"


def proxy(
    upstream: Annotated[
        str, typer.Argument(help="The stream of server-sent events: http://… or https://….", show_default=False)
    ],
    folder: Annotated[Path, typer.Option(help="The folder in which events are stored for the device.")] = Path(
        ".penstock/proxy"
    ),
    wake: Annotated[str, typer.Option(help="The webhook that wakes the device.", show_default="none")] = "",
    public: Annotated[
        str,
        typer.Option(
            help="The public address of this proxy, for the webhook.", show_default="the address it listens on"
        ),
    ] = "",
    max_megabytes: Annotated[
        int, typer.Option(min=8, help="The most megabytes to store. Beyond that, reading from the stream pauses.")
    ] = 256,
    wake_again: Annotated[
        str, typer.Option(help="The time after which a device that has not come is woken again.")
    ] = "5 minutes",
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0 takes a free one.")] = 8790,
) -> None:
    """Store a stream of server-sent events for a device that sleeps, and wake it, until Ctrl-C.

    The device reads GET /events and resumes after its Last-Event-ID. The environment variable PENSTOCK_PROXY_TOKEN is
    the token that it must send as Authorization: Bearer …; PENSTOCK_PROXY_SECRET signs the webhook (Standard Webhooks).
    """
    push_proxy = PushProxy(
        SseSource(f"sse+{upstream.removeprefix('sse+')}", "upstream"),
        folder,
        wake,
        os.environ.get(SECRET, ""),
        os.environ.get(TOKEN, ""),
        public,
        max_megabytes << 20,
        parse_duration("--wake-again", wake_again),
    )
    asyncio.run(_serve(push_proxy, host, port))


async def _serve(push_proxy: PushProxy, host: str, port: int) -> None:
    stop = async_stop_event()

    def ready(address: str) -> None:
        typer.echo(f"events for the device are at {address}/events")
        sys.stdout.flush()

    await push_proxy.serve(host, port, stop, ready)

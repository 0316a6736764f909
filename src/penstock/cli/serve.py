"""The commands that serve until Ctrl-C: `penstock feed`, `penstock gateway` and `penstock proxy`."""

import asyncio
import os
import sys
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import Folder, Host, Port, Profile, Servers, find_channels, parse_duration
from penstock.collect.sse import SseSource
from penstock.core.clock import SystemClock
from penstock.core.text import counted
from penstock.gateway.app import serve as serve_gateway
from penstock.gateway.gateway import Gateway
from penstock.pipeline.config import Config
from penstock.push import PushProxy
from penstock.simulate.documents import KINDS, Recording, kind_of
from penstock.simulate.feed import SECOND, Feed
from penstock.simulate.feed import serve as serve_feed
from penstock.supervise.process import async_stop_event

SECRET, TOKEN = "PENSTOCK_PROXY_SECRET", "PENSTOCK_PROXY_TOKEN"


def feed(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The feed to simulate, from the list above.")] = "rsvps",
    rate: Annotated[
        float, typer.Option(min=0.001, max=1e6, help="The number of records per second, of all senders together.")
    ] = 200,
    senders: Annotated[int, typer.Option(min=1, max=10_000, help="The number of senders.")] = 20,
    seed: Annotated[int, typer.Option(help="The same seed produces the same records.")] = 7,
    count: Annotated[
        int | None, typer.Option(min=0, help="Stop after this number of records.", show_default="never")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Send the lines of this JSON file instead, in order.")] = None,
    epoch: Annotated[
        int | None,
        typer.Option(
            min=0, help="The time of the first record, in seconds since 1970.", show_default="the next second"
        ),
    ] = None,
    no_resume: Annotated[
        bool, typer.Option("--no-resume", help="Send no numbers, and do not resume: a client loses what it misses.")
    ] = False,
    host: Host = "127.0.0.1",
    port: Port = 8765,
) -> None:
    """Serve a simulated public feed over WebSocket until Ctrl-C.

    Each record has a sender and a number, and a client that reconnects can resume after the numbers that it has. A feed
    that is restarted with the same seed and --epoch continues as if it had not been stopped.
    """
    kind = kind_of(name, "penstock feed")
    recording = Recording(file, senders) if file else None
    if recording is not None:
        count = len(recording) if count is None else min(count, len(recording))
    with closing(recording) if recording is not None else nullcontext():
        simulated = Feed(
            recording or kind.documents(seed),
            rate,
            senders,
            epoch if epoch is not None else SystemClock().now() // SECOND + 1,
            count,
            numbered=not no_resume,
            sender=kind.sender,
        )
        asyncio.run(_serve_feed(simulated, host, port, name))


# The list comes from the registry; a `\b` keeps the line breaks.
feed.__doc__ = f"{feed.__doc__}\n    \b\n" + "\n".join(
    f"    {name:<13}{kind.description}" for name, kind in KINDS.items()
)


async def _serve_feed(simulated: Feed, host: str, port: int, name: str) -> None:
    stop, terminal = async_stop_event(), sys.stderr.isatty()
    async with serve_feed(simulated, host, port, path=f"/{name}") as serving:
        typer.echo(f"{name}: {simulated.rate:g} records/s of {simulated.senders} senders at {serving.url}")
        while not stop.is_set():
            if terminal:
                progress = f"{counted(serving.sent, 'record')} sent, {counted(len(serving.clients), 'client')}"
                typer.echo(f"\r{progress}\033[K", nl=False, err=True)
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), 1)
    if terminal:
        typer.echo(err=True)


def gateway(
    port: Port = 8082,
    host: Host = "127.0.0.1",
    servers: Servers = None,
    folder: Folder = Path(),
    profile: Profile = None,
) -> None:
    """Serve channels over HTTP until Ctrl-C: append records, read by offsets, join consumer groups.

    GET / lists the addresses. There is no authentication: every client that reaches the port may read and write.
    Without --host, only this machine can reach it.
    """
    settings = Config.read(folder, profile).gateway
    channels = find_channels(folder, profile, servers)

    async def serve() -> None:
        gateway_ = Gateway(channels, settings)
        await serve_gateway(
            gateway_, host, port, async_stop_event(), lambda url: typer.echo(f"serving {channels.where} at {url}")
        )

    asyncio.run(serve())


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
    host: Host = "127.0.0.1",
    port: Port = 8790,
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

    async def serve() -> None:
        await push_proxy.serve(
            host, port, async_stop_event(), lambda url: typer.echo(f"events for the device are at {url}/events")
        )

    asyncio.run(serve())

"""`penstock feed`: a simulated public feed."""

import asyncio
import sys
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from penstock.core.clock import SystemClock
from penstock.simulate.documents import KINDS, Recording, kind_of
from penstock.simulate.feed import SECOND, Feed, Serving, serve
from penstock.supervise.process import async_stop_event


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
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0 takes a free one.")] = 8765,
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
        feed_ = Feed(
            recording or kind.documents(seed),
            rate,
            senders,
            epoch if epoch is not None else SystemClock().now() // SECOND + 1,
            count,
            numbered=not no_resume,
            sender=kind.sender,
        )
        asyncio.run(_serve(feed_, host, port, name))


# The list comes from the registry; a `\b` keeps the line breaks.
feed.__doc__ = f"{feed.__doc__}\n    \b\n" + "\n".join(
    f"    {name:<13}{kind.description}" for name, kind in KINDS.items()
)


async def _serve(feed_: Feed, host: str, port: int, name: str) -> None:
    stop = async_stop_event()
    async with serve(feed_, host, port, path=f"/{name}") as serving:
        typer.echo(f"{name}: {feed_.rate:g} records/s of {feed_.senders} senders at {serving.url}")
        sys.stdout.flush()
        while not stop.is_set():
            if sys.stderr.isatty():
                typer.echo(f"\r{_progress(serving)}\033[K", nl=False, err=True)
            try:
                await asyncio.wait_for(stop.wait(), 1)
            except TimeoutError:
                continue
    if sys.stderr.isatty():
        typer.echo(err=True)


def _progress(serving: Serving) -> str:
    clients = len(serving.clients)
    return f"{serving.sent:,} records sent, {clients} client{'' if clients == 1 else 's'}"

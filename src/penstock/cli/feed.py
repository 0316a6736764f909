"""`penstock feed`: the outside world, on a port."""

import asyncio
import sys
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from penstock.core.clock import SystemClock
from penstock.simulate.documents import KINDS, Recording, kind_of
from penstock.simulate.feed import SECOND, Feed
from penstock.simulate.server import Serving, serve
from penstock.supervise.signals import async_stop_event


def feed(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to simulate: see above.")] = "rsvps",
    rate: Annotated[float, typer.Option(min=0.001, max=1e6, help="Records per second, of all senders together.")] = 200,
    senders: Annotated[int, typer.Option(min=1, max=10_000, help="How many senders number the records.")] = 20,
    seed: Annotated[int, typer.Option(help="The same seed makes the same records.")] = 7,
    count: Annotated[int | None, typer.Option(min=0, help="End after so many records.", show_default="never")] = None,
    file: Annotated[Path | None, typer.Option(help="Replay a file of JSON lines instead, in its order.")] = None,
    epoch: Annotated[
        int | None,
        typer.Option(min=0, help="The second since 1970 at which record 0 is due.", show_default="the next one"),
    ] = None,
    no_resume: Annotated[
        bool, typer.Option("--no-resume", help="Behave like a feed without numbers: what a client misses is gone.")
    ] = False,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0 takes a free one.")] = 8765,
) -> None:
    """Serve a simulated public feed over WebSocket, until Ctrl-C.

    Each record carries its sender and number, and a client that was away resumes after the numbers that it holds.
    A feed that is started again with the same seed and --epoch goes on as if it had never been away.
    """
    kind = kind_of(name, "penstock feed")
    recording = Recording(file, senders) if file else None
    if recording is not None:
        count = len(recording) if count is None else min(count, len(recording))
    with closing(recording) if recording is not None else nullcontext():
        described = Feed(
            recording or kind.documents(seed),
            rate,
            senders,
            # The next whole second, not the last one: a feed does not begin its life late.
            epoch if epoch is not None else SystemClock().now() // SECOND + 1,
            count,
            numbered=not no_resume,
            called=kind.sender,
        )
        asyncio.run(_serve(described, host, port, name))


# Written once, in the table; a `\b` keeps the lines of a paragraph apart.
feed.__doc__ = f"{feed.__doc__}\n    \b\n" + "\n".join(
    f"    {name:<13}{kind.description}" for name, kind in KINDS.items()
)


async def _serve(described: Feed, host: str, port: int, name: str) -> None:
    stop = async_stop_event()
    async with serve(described, host, port, path=f"/{name}") as serving:
        typer.echo(f"{name}: {described.rate:g} records/s of {described.senders} senders at {serving.url}")
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

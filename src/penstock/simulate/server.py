"""Serves a simulated feed over WebSocket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import parse_qs, urlsplit

from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as listen
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.http11 import Request, Response

from penstock.core.clock import Clock, Micros, SystemClock
from penstock.core.errors import Misconfigured, Refused
from penstock.simulate.feed import END, SECOND, Cursor, Feed, parse_resume

PATH = "/rsvps"
RESUME_WITHIN = 10.0
BURST = 200  # records between two checks of the clock, so that heartbeats are sent during a long catch-up


@dataclass
class Serving:
    """A running feed: its address, the number of sent records, and its clients."""

    url: str
    sent: int = 0
    clients: set[ServerConnection] = field(default_factory=set)


@asynccontextmanager
async def serve(
    feed: Feed, host: str, port: int, clock: Clock | None = None, path: str = PATH
) -> AsyncIterator[Serving]:
    """Serve the feed at this path until the context is left; port 0 takes a free one."""
    clock = clock or SystemClock()
    serving = Serving("")

    async def handle(client: ServerConnection) -> None:
        serving.clients.add(client)
        try:
            with suppress(ConnectionClosed):
                await _serve_client(client, feed, clock, serving)
        finally:
            serving.clients.discard(client)

    def answer(client: ServerConnection, request: Request) -> Response | None:
        return _answer(client, request, path)

    try:
        server = await listen(
            handle, host, port, process_request=answer, compression=None, close_timeout=2, server_header=None
        )
    except OSError as error:
        raise Misconfigured(
            "the feed",
            f"it cannot listen on {host}:{port}: {error.strerror}",
            "choose another port, or 0 for a free one",
        ) from error
    async with server:
        bound = server.sockets[0].getsockname()[1]
        serving.url = f"ws://{f'[{host}]' if ':' in host else host}:{bound}{path}"
        yield serving


def _answer(client: ServerConnection, request: Request, path: str) -> Response | None:
    requested = urlsplit(request.path).path
    if requested == "/":
        return client.respond(HTTPStatus.OK, f"A simulated feed. Connect by WebSocket to {path}.\n")
    return None if requested == path else client.respond(HTTPStatus.NOT_FOUND, f"There is only {path} here.\n")


async def _serve_client(client: ServerConnection, feed: Feed, clock: Clock, serving: Serving) -> None:
    cursor = feed.from_now(clock.now())
    if feed.numbered and client.request and "resume" in parse_qs(urlsplit(client.request.path).query, True):
        try:
            async with asyncio.timeout(RESUME_WITHIN):
                numbers = parse_resume(await client.recv(decode=False))
        except TimeoutError:
            await client.close(CloseCode.POLICY_VIOLATION, f"no resume within {RESUME_WITHIN:g} s")
            return
        except Refused as refused:
            await client.close(CloseCode.POLICY_VIOLATION, str(refused))
            return
        cursor = feed.after(numbers, clock.now())
    gone = asyncio.ensure_future(client.wait_closed())
    try:
        await _send(client, feed, cursor, clock, serving, gone)
    finally:
        gone.cancel()


async def _send(
    client: ServerConnection,
    feed: Feed,
    cursor: Cursor,
    clock: Clock,
    serving: Serving,
    gone: asyncio.Future[None],
) -> None:
    beat = clock.now()
    while not gone.done():
        now = clock.now()
        for message in cursor.take(now, BURST):
            await client.send(message, text=True)
            serving.sent += 1
        if cursor.ended or now >= beat + SECOND:
            beat = now
            # Heartbeats and the end are only sent with numbers.
            if feed.numbered:
                await client.send(feed.heartbeats(cursor.n, now), text=True)
        if cursor.ended:
            if feed.numbered:
                await client.send(END, text=True)
            await gone
            return
        await asyncio.wait([gone], timeout=_pause(feed, cursor, beat, clock.now()))


def _pause(feed: Feed, cursor: Cursor, beat: Micros, now: Micros) -> float:
    """Seconds until the next message to this client; 0 while it catches up."""
    if cursor.n < feed.due(now):
        return 0
    wake = min(feed.time_of(cursor.n), beat + SECOND)
    # At least a millisecond: a timer for each record would be too expensive.
    return max(0.001, (wake - now) / SECOND)

"""The feed on a port: a thin shell that asks `Feed` what is due and sends it."""

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
from penstock.simulate.feed import END, SECOND, Feed, Following, asked

PATH = "/rsvps"
RESUME_WITHIN = 10.0
BURST = 200  # records between two looks at the clock, so that heartbeats go out during a long catch-up, too


@dataclass
class Serving:
    """A feed that listens: its address, and what it has done so far."""

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
                await _attend(client, feed, clock, serving)
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
    asked_for = urlsplit(request.path).path
    if asked_for == "/":
        return client.respond(HTTPStatus.OK, f"A simulated feed. Connect by WebSocket to {path}.\n")
    return None if asked_for == path else client.respond(HTTPStatus.NOT_FOUND, f"There is only {path} here.\n")


async def _attend(client: ServerConnection, feed: Feed, clock: Clock, serving: Serving) -> None:
    following = feed.from_now(clock.now())
    if feed.numbered and client.request and "resume" in parse_qs(urlsplit(client.request.path).query, True):
        try:
            async with asyncio.timeout(RESUME_WITHIN):
                after = asked(await client.recv(decode=False))
        except TimeoutError:
            await client.close(CloseCode.POLICY_VIOLATION, f"no resume within {RESUME_WITHIN:g} s")
            return
        except Refused as refused:
            await client.close(CloseCode.POLICY_VIOLATION, str(refused))
            return
        following = feed.following(after, clock.now())
    gone = asyncio.ensure_future(client.wait_closed())
    try:
        await _follow(client, feed, following, clock, serving, gone)
    finally:
        gone.cancel()


async def _follow(
    client: ServerConnection,
    feed: Feed,
    following: Following,
    clock: Clock,
    serving: Serving,
    gone: asyncio.Future[None],
) -> None:
    beat = clock.now()
    while not gone.done():
        now = clock.now()
        for message in following.take(now, BURST):
            await client.send(message, text=True)
            serving.sent += 1
        if following.ended or now >= beat + SECOND:
            beat = now
            # Without numbers there is nothing that a heartbeat or an end could say.
            if feed.numbered:
                await client.send(feed.heartbeats(following.n, now), text=True)
        if following.ended:
            if feed.numbered:
                await client.send(END, text=True)
            await gone
            return
        await asyncio.wait([gone], timeout=_pause(feed, following, beat, clock.now()))


def _pause(feed: Feed, following: Following, beat: Micros, now: Micros) -> float:
    """Seconds until there is something to send to this client; 0 while it has to catch up."""
    if following.n < feed.due(now):
        return 0
    wake = min(feed.time_of(following.n), beat + SECOND)
    # Records that are closer together than this leave in one burst: a timer for each would cost more than it gives.
    return max(0.001, (wake - now) / SECOND)

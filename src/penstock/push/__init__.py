"""A push proxy: it follows a stream for a device that sleeps, stores the events, and wakes the device.

The events of the upstream are stored on disk, each once. The device reads them as server-sent events, and resumes after
its last event. While it is disconnected and events wait, a webhook asks to wake it.
"""

import asyncio
import hmac
import logging
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.channels.sqlite import SqliteChannels
from penstock.collect.ingest import IngestLoop
from penstock.core.contracts import Source
from penstock.core.errors import Misconfigured, Unavailable, backoff
from penstock.core.signatures import parse_secrets
from penstock.push.device_queue import BOOKMARKS, CHANNEL, DEAD, HEARTBEATS, DeviceQueue, QueuedSource
from penstock.web.requests import OriginCheck, OriginCheckMiddleware
from penstock.web.responses import (
    SecurityHeaders,
    ServerSentEvents,
    Write,
    error_response,
    event,
    reply,
    wait_for,
)
from penstock.web.server import http_config, listen, run_server, url_of, wait_first
from penstock.web.webhook import TIMEOUT, Rejected, Webhook, new_id

log = logging.getLogger(__name__)

_SEND_TIMEOUT = 30.0
"""Seconds after which a device that does not read is disconnected."""
MIN_BYTES = 8 << 20
"""Bytes: an empty database and its log take some of them."""
_CONNECTIONS = 16
_FAREWELL = 2


@dataclass(frozen=True)
class PushProxy:
    """`folder` stores up to about `most` bytes of events; then the upstream has to wait.

    `wake`: the URL of the webhook; `secret` signs its requests. `token`: the bearer token of the device. `public`: the
    URL of this proxy for the device, if it is not the listening address. A device sleeps when it was disconnected for
    `asleep_after`; it is woken once per sleep, and again after `again`.
    """

    source: Source
    folder: Path
    wake: str = ""
    secret: str = ""
    token: str = ""
    public: str = ""
    most: int = 256 << 20
    again: timedelta = timedelta(minutes=5)
    asleep_after: timedelta = timedelta(seconds=5)
    heartbeat: timedelta = timedelta(seconds=15)

    def __post_init__(self) -> None:
        for option, url in (("wake", self.wake), ("public", self.public)):
            parts = urlsplit(url)
            if url and (parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii()):
                raise Misconfigured(f"the proxy's {option}", "it is not a URL", "write https://host/path")
        if self.most < MIN_BYTES:
            raise Misconfigured("the proxy's most", f"{self.most} bytes are too few", f"give {MIN_BYTES} or more")
        for option in ("again", "heartbeat"):
            if getattr(self, option) <= timedelta(0):
                raise Misconfigured(f"the proxy's {option}", "it must be longer than 0")
        parse_secrets("the proxy's secret", self.secret)

    async def serve(
        self, host: str, port: int, stop: asyncio.Event, ready: Callable[[str], None] | None = None
    ) -> None:
        """Serve until `stop`; `ready` gets the URL when the device can connect. Port 0 takes a free one.

        After the end of the upstream, stored events are still served. Raises the error that ends the ingest loop.
        """
        queue = DeviceQueue(SqliteChannels(self.folder), self.most)
        await asyncio.to_thread(queue.prepare)
        ingest = IngestLoop(
            QueuedSource(self.source, queue), CHANNEL, queue.disk, dead=DEAD, heartbeats=HEARTBEATS, bookmarks=BOOKMARKS
        )
        with listen("the proxy's", host, port, _SEND_TIMEOUT) as listener:
            where = url_of(host, listener)
            public = (self.public or where).rstrip("/")
            app = OriginCheckMiddleware(
                build(queue, self.token, self.heartbeat.total_seconds()),
                OriginCheck(listener, host, origins=[public] if self.public else ()),
            )
            config = http_config(app, _CONNECTIONS, _SEND_TIMEOUT, _FAREWELL)
            tasks = [asyncio.create_task(self._ingest(ingest, stop))]
            if self.wake:
                tasks.append(asyncio.create_task(Waker(self, queue, f"{public}/events").run()))
            try:
                async with run_server(config, listener) as serving:
                    try:
                        if ready and not serving.done():
                            ready(where)
                        await wait_first(serving, *tasks, stop.wait())
                    finally:
                        queue.closing = True
                        queue.notify()
            finally:
                # After `stop`, the ingest loop ends by itself.
                for task in tasks[1:] if stop.is_set() else tasks:
                    task.cancel()
                ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end

    async def _ingest(self, ingest: IngestLoop, stop: asyncio.Event) -> None:
        await ingest.run(stop)
        await stop.wait()


def build(queue: DeviceQueue, token: str, heartbeat: float) -> Starlette:
    """`token`: the bearer token of the device; empty: none is required."""

    async def overview(request: Request) -> Response:
        if (refused := _unauthorized(request, token)) is not None:
            return refused
        return reply({"waiting": queue.waiting, "bytes": queue.bytes, "connected": queue.connected})

    async def events(request: Request) -> Response:
        if (refused := _unauthorized(request, token)) is not None:
            return refused
        if queue.closing:
            return error_response(503, "the proxy is stopping; try again later")
        if (position := queue.position(request.headers.get("last-event-id"))) is not None:
            await queue.acknowledge(position)
        start = queue.acknowledged if position is None else position
        return ServerSentEvents(partial(_stream, queue, start, heartbeat), _SEND_TIMEOUT)

    return Starlette(
        routes=[Route("/", overview), Route("/events", events)],
        middleware=[Middleware(SecurityHeaders)],
    )


def _unauthorized(request: Request, token: str) -> Response | None:
    header = request.headers.get("authorization", "").encode("latin-1", "replace")
    if not token or hmac.compare_digest(header, b"Bearer " + token.encode()):
        return None
    facts = {"place": "the header authorization", "fix": "send the token of this proxy as a bearer token"}
    return error_response(401, "the bearer token is missing or wrong", facts, {"www-authenticate": "Bearer"})


async def _stream(queue: DeviceQueue, position: int, heartbeat: float, write: Write) -> None:
    """Write events to the device. A new connection ends the one before.

    It ends after some megabytes, so that the device connects again and acknowledges them.
    """
    session = queue.session = object()
    queue.notify()
    try:
        sent, text = 0, b"retry: 500\n\n"
        while not queue.closing and queue.session is session and sent < queue.most // 4:
            changed = queue.changed
            entries = await queue.since(position) if position < queue.end else ()
            text += b"".join(event(entry.value or b"", queue.token(entry.offset)) for entry in entries)
            if text:
                await write(text)
                sent += len(text)
                text = b""
            if entries:
                position = entries[-1].offset + 1
                queue.sent = max(queue.sent, position)
                continue
            text = await wait_for(changed, heartbeat)
    finally:
        if queue.session is session:
            queue.session, queue.left = None, time.monotonic()
            queue.notify()


class Waker:
    """Wakes the device once per sleep, and again after `again` seconds.

    It sleeps when it was disconnected for `asleep_after` seconds. Events that were sent and not acknowledged wake it
    only after `again`: it probably has them.
    """

    def __init__(self, proxy: PushProxy, queue: DeviceQueue, following: str) -> None:
        self._queue, self._following = queue, following
        key = (parse_secrets("the proxy's secret", proxy.secret) or [b""])[0]
        self._webhook = Webhook(proxy.wake, key)
        self._again, self._asleep_after = proxy.again.total_seconds(), proxy.asleep_after.total_seconds()

    async def run(self) -> None:
        """Run until cancelled."""
        verify = ssl.create_default_context()
        async with httpx.AsyncClient(verify=verify, timeout=TIMEOUT, trust_env=False) as client:
            while True:
                while (left := self._due()) is None or left > 0:
                    await self._change(left)
                await self._wake(client)
                await self._pause(self._again)

    def _due(self) -> float | None:
        """Seconds until the device has to be woken; None while that is not known."""
        queue = self._queue
        if queue.connected or not queue.waiting:
            return None
        timeout = self._asleep_after if queue.sent < queue.end else self._again
        return queue.left + timeout - time.monotonic()

    async def _change(self, within: float | None) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._queue.changed.wait(), within)

    async def _pause(self, seconds: float) -> None:
        """Wait, but not longer than until the device connects."""
        until = time.monotonic() + seconds
        while not self._queue.connected and (left := until - time.monotonic()) > 0:
            await self._change(left)

    async def _wake(self, client: httpx.AsyncClient) -> None:
        """Post until the webhook accepts it, or the device connects."""
        id, delays, troubled = new_id(), backoff(), False
        while not self._queue.connected:
            try:
                data = {"waiting": self._queue.waiting, "next": self._following}
                await self._webhook.post_async(client, self._webhook.message("device.wake", data, id))
                return
            except Unavailable as error:
                log.log(logging.DEBUG if troubled else logging.WARNING, "%s", error)
                troubled = True
                await self._pause(next(delays) if error.retry_after is None else error.retry_after)
            except Rejected as error:
                log.error("%s; the device is not woken before %g s", error, self._again)
                return

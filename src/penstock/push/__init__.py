"""A push proxy: it follows a stream for a device that sleeps, stores the events, and wakes the device.

The events of the upstream are stored on disk, each once. The device reads them as server-sent events, and resumes after
its last event. While it is disconnected and events wait, a webhook asks to wake it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

from penstock.channels.sqlite import SqliteChannels
from penstock.collect.ingest import IngestLoop
from penstock.core.contracts import Source
from penstock.core.errors import Misconfigured
from penstock.core.signatures import parse_secrets
from penstock.push.device_queue import BOOKMARKS, CHANNEL, DEAD, HEARTBEATS, DeviceQueue, QueuedSource
from penstock.push.stream import TIMEOUT, build
from penstock.push.wake import Waker
from penstock.web.origin_check import OriginCheck, OriginCheckMiddleware
from penstock.web.server import http_config, listen, run_server, url_of, wait_first

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
        await queue.prepare()
        ingest = IngestLoop(
            QueuedSource(self.source, queue), CHANNEL, queue.disk, dead=DEAD, heartbeats=HEARTBEATS, bookmarks=BOOKMARKS
        )
        with listen("the proxy's", host, port, TIMEOUT) as listener:
            where = url_of(host, listener)
            app = build(queue, self.token, self.heartbeat.total_seconds())
            named = OriginCheckMiddleware(
                app, OriginCheck(listener, host, origins=[self.public.rstrip("/")] if self.public else ())
            )
            config = http_config(named, _CONNECTIONS, TIMEOUT, _FAREWELL)
            ingesting = asyncio.create_task(self._ingest(ingest, stop))
            waking = asyncio.create_task(self._wake(queue, (self.public or where).rstrip("/")))
            try:
                async with run_server(config, listener) as serving:
                    try:
                        if ready and not serving.done():
                            ready(where)
                        await wait_first(serving, ingesting, waking, stop.wait())
                    finally:
                        queue.closing = True
                        queue.notify()
            finally:
                waking.cancel()
                if not stop.is_set():
                    ingesting.cancel()
                ends = await asyncio.gather(ingesting, waking, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end

    async def _ingest(self, ingest: IngestLoop, stop: asyncio.Event) -> None:
        await ingest.run(stop)
        await stop.wait()

    async def _wake(self, queue: DeviceQueue, where: str) -> None:
        if not self.wake:
            await asyncio.Event().wait()
        key = (parse_secrets("the proxy's secret", self.secret) or [b""])[0]
        again, asleep_after = self.again.total_seconds(), self.asleep_after.total_seconds()
        await Waker(queue, self.wake, key, f"{where}/events", again, asleep_after).run()

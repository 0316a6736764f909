"""A push proxy: it listens to a stream for a device that sleeps, keeps what the device misses, and wakes it.

Events of the upstream go into a log on disk, each once. The device gets them as server-sent events, and goes on behind
the last one that it has. While it is away and something waits, a webhook is asked to wake it.
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
from penstock.push.shelf import BOOKMARKS, CHANNEL, DEAD, HEARTBEATS, Shelf, Shelved
from penstock.push.stream import PATIENCE, build
from penstock.push.wake import Waker
from penstock.web.origin_check import OriginCheck, OriginCheckMiddleware
from penstock.web.server import http_config, listen, run_server, url_of, wait_first

LEAST = 8 << 20
"""Bytes: the last segment stays whatever was acknowledged, and with much less it could take all the room."""
_CONNECTIONS = 16
_FAREWELL = 2


@dataclass(frozen=True)
class PushProxy:
    """`folder` holds what waits, up to `most` bytes, about; then the upstream has to wait.

    `wake` is the address of the webhook, `secret` signs what is posted there. `token` is what the device has to say.
    `public` is the address at which the device finds us, where that is not the one that we listen on. It sleeps when
    it was away for `asleep_after`; in one sleep it is woken once, and `again` after a while.
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
                raise Misconfigured(f"the proxy's {option}", "it is no address", "write https://host/path")
        if self.most < LEAST:
            raise Misconfigured("the proxy's most", f"{self.most} bytes are too few", f"give {LEAST} or more")
        for option in ("again", "heartbeat"):
            if getattr(self, option) <= timedelta(0):
                raise Misconfigured(f"the proxy's {option}", "it has to be longer than nothing")
        parse_secrets("the proxy's secret", self.secret)

    async def serve(
        self, host: str, port: int, stop: asyncio.Event, ready: Callable[[str], None] | None = None
    ) -> None:
        """Serve until `stop`; `ready` is told the address once the device can come. Port 0 takes a free one.

        When the upstream is done, what waits is served all the same. Raises what ends the pump.
        """
        shelf = Shelf(SqliteChannels(self.folder), self.most)
        await shelf.prepare()
        pump = IngestLoop(
            Shelved(self.source, shelf), CHANNEL, shelf.disk, dead=DEAD, heartbeats=HEARTBEATS, bookmarks=BOOKMARKS
        )
        with listen("the proxy's", host, port, PATIENCE) as listener:
            where = url_of(host, listener)
            app = build(shelf, self.token, self.heartbeat.total_seconds())
            named = OriginCheckMiddleware(
                app, OriginCheck(listener, host, origins=[self.public.rstrip("/")] if self.public else ())
            )
            config = http_config(named, _CONNECTIONS, PATIENCE, _FAREWELL)
            pumping = asyncio.create_task(self._pump(pump, stop))
            waking = asyncio.create_task(self._wake(shelf, (self.public or where).rstrip("/")))
            try:
                async with run_server(config, listener) as serving:
                    try:
                        if ready and not serving.done():
                            ready(where)
                        await wait_first(serving, pumping, waking, stop.wait())
                    finally:
                        shelf.closing = True
                        shelf.tell()
            finally:
                waking.cancel()
                if not stop.is_set():
                    pumping.cancel()
                ends = await asyncio.gather(pumping, waking, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end

    async def _pump(self, pump: IngestLoop, stop: asyncio.Event) -> None:
        await pump.run(stop)
        await stop.wait()

    async def _wake(self, shelf: Shelf, where: str) -> None:
        if not self.wake:
            await asyncio.Event().wait()
        key = (parse_secrets("the proxy's secret", self.secret) or [b""])[0]
        again, asleep_after = self.again.total_seconds(), self.asleep_after.total_seconds()
        await Waker(shelf, self.wake, key, f"{where}/events", again, asleep_after).run()

"""Waking a device that sleeps while records wait for it: a webhook, signed as Standard Webhooks are."""

import asyncio
import logging
import ssl
import time
import uuid
from contextlib import suppress
from datetime import UTC, datetime
from urllib.parse import urlsplit

import httpx
import orjson

from penstock.collect.http_client import asked_pause
from penstock.collect.reconnecting import backoff
from penstock.core.clock import Clock, SystemClock
from penstock.core.errors import Unavailable
from penstock.core.signatures import signed
from penstock.pipeline.push.shelf import Shelf

log = logging.getLogger(__name__)

TIMEOUT = 10.0
LATER = (408, 429)


class Waker:
    """Wakes the device once in each sleep, and again after `again` seconds.

    It sleeps when it was away for `asleep_after` seconds. What it was sent and has not acknowledged yet wakes it only
    after `again`: most likely it has it.
    """

    def __init__(
        self,
        shelf: Shelf,
        url: str,
        key: bytes,
        following: str,
        again: float,
        asleep_after: float,
        clock: Clock | None = None,
    ) -> None:
        self._shelf, self._url, self._key, self._following = shelf, url, key, following
        self._again, self._asleep_after = again, asleep_after
        self._clock = clock or SystemClock()
        # The path and the query may be secret.
        self._who = f"the webhook at {urlsplit(url).netloc}"
        self._changed = asyncio.Event()
        self.woken = 0

    async def run(self) -> None:
        """For ever."""
        self._shelf.heard.add(self._changed)
        try:
            # Redirects are not followed: they would tell an address that nobody has set.
            verify = ssl.create_default_context()
            async with httpx.AsyncClient(verify=verify, timeout=TIMEOUT, trust_env=False) as client:
                while True:
                    while (left := self._due()) is None or left > 0:
                        await self._change(left)
                    await self._wake(client)
                    until = time.monotonic() + self._again
                    while not self._shelf.connected and (left := until - time.monotonic()) > 0:
                        await self._change(left)
        finally:
            self._shelf.heard.discard(self._changed)

    def _due(self) -> float | None:
        """Seconds until the device has to be woken, as far as it is known now."""
        shelf = self._shelf
        if shelf.connected or not shelf.waiting:
            return None
        patience = self._asleep_after if shelf.sent < shelf.end else self._again
        return shelf.left + patience - time.monotonic()

    async def _change(self, within: float | None) -> None:
        self._changed.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), within)

    async def _wake(self, client: httpx.AsyncClient) -> None:
        """Until the webhook has taken it, or the device is there by itself."""
        message, delays, troubled = f"msg_{uuid.uuid4().hex}", backoff(), False
        while not self._shelf.connected:
            try:
                await self._post(client, message)
            except Unavailable as error:
                log.log(logging.DEBUG if troubled else logging.WARNING, "%s", error)
                troubled = True
                until = time.monotonic() + (next(delays) if error.retry_after is None else error.retry_after)
                while not self._shelf.connected and (left := until - time.monotonic()) > 0:
                    await self._change(left)
            else:
                return

    async def _post(self, client: httpx.AsyncClient, message: str) -> None:
        now = self._clock.now()
        when = datetime.fromtimestamp(now / 1e6, UTC).isoformat().replace("+00:00", "Z")
        data = {"waiting": self._shelf.waiting, "next": self._following}
        body = orjson.dumps({"type": "device.wake", "timestamp": when, "data": data})
        seconds = now // 1_000_000
        headers = {"content-type": "application/json", "user-agent": "penstock"}
        headers |= signed(self._key, message, seconds, body)
        try:
            async with client.stream("POST", self._url, content=body, headers=headers) as response:
                status = response.status_code
                pause = asked_pause(response.headers.get("retry-after"), self._clock)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unavailable(self._who, str(error) or type(error).__name__) from error
        if status >= 500 or status in LATER:
            raise Unavailable(self._who, f"it answers {status}", pause)
        if status >= 300:
            log.error("%s answers %d: the device is not woken before %g s", self._who, status, self._again)
            return
        self.woken += 1

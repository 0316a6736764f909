"""Waking a device that sleeps while records wait for it: a webhook, signed as Standard Webhooks are."""

import asyncio
import logging
import ssl
import time
from contextlib import suppress

import httpx

from penstock.collect.reconnecting import backoff
from penstock.core.clock import Clock, SystemClock
from penstock.core.errors import Unavailable
from penstock.push.shelf import Shelf
from penstock.web.webhook import TIMEOUT, Rejected, Webhook, new_id

log = logging.getLogger(__name__)


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
        self._shelf, self._following = shelf, following
        self._webhook = Webhook(url, key, clock or SystemClock())
        self._again, self._asleep_after = again, asleep_after
        self._changed = asyncio.Event()
        self.woken = 0

    async def run(self) -> None:
        """For ever."""
        self._shelf.heard.add(self._changed)
        try:
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
        id, delays, troubled = new_id(), backoff(), False
        while not self._shelf.connected:
            try:
                data = {"waiting": self._shelf.waiting, "next": self._following}
                await self._webhook.post_async(client, self._webhook.message("device.wake", data, id))
            except Unavailable as error:
                log.log(logging.DEBUG if troubled else logging.WARNING, "%s", error)
                troubled = True
                until = time.monotonic() + (next(delays) if error.retry_after is None else error.retry_after)
                while not self._shelf.connected and (left := until - time.monotonic()) > 0:
                    await self._change(left)
            except Rejected as error:
                log.error("%s; the device is not woken before %g s", error, self._again)
                return
            else:
                self.woken += 1
                return

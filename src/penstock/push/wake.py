"""Wakes a sleeping device for which events wait: by a signed webhook (Standard Webhooks)."""

import asyncio
import logging
import ssl
import time
from contextlib import suppress

import httpx

from penstock.core.clock import Clock, SystemClock
from penstock.core.errors import Unavailable, backoff
from penstock.push.device_queue import DeviceQueue
from penstock.web.webhook import TIMEOUT, Rejected, Webhook, new_id

log = logging.getLogger(__name__)


class Waker:
    """Wakes the device once per sleep, and again after `again` seconds.

    It sleeps when it was disconnected for `asleep_after` seconds. Events that were sent and not acknowledged wake it
    only after `again`: it probably has them.
    """

    def __init__(
        self,
        queue: DeviceQueue,
        url: str,
        key: bytes,
        following: str,
        again: float,
        asleep_after: float,
        clock: Clock | None = None,
    ) -> None:
        self._queue, self._following = queue, following
        self._webhook = Webhook(url, key, clock or SystemClock())
        self._again, self._asleep_after = again, asleep_after
        self._changed = asyncio.Event()
        self.woken = 0

    async def run(self) -> None:
        """Run until cancelled."""
        self._queue.listeners.add(self._changed)
        try:
            verify = ssl.create_default_context()
            async with httpx.AsyncClient(verify=verify, timeout=TIMEOUT, trust_env=False) as client:
                while True:
                    while (left := self._due()) is None or left > 0:
                        await self._change(left)
                    await self._wake(client)
                    until = time.monotonic() + self._again
                    while not self._queue.connected and (left := until - time.monotonic()) > 0:
                        await self._change(left)
        finally:
            self._queue.listeners.discard(self._changed)

    def _due(self) -> float | None:
        """Seconds until the device has to be woken; None while that is not known."""
        queue = self._queue
        if queue.connected or not queue.waiting:
            return None
        timeout = self._asleep_after if queue.sent < queue.end else self._again
        return queue.left + timeout - time.monotonic()

    async def _change(self, within: float | None) -> None:
        self._changed.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), within)

    async def _wake(self, client: httpx.AsyncClient) -> None:
        """Post until the webhook accepts it, or the device connects."""
        id, delays, troubled = new_id(), backoff(), False
        while not self._queue.connected:
            try:
                data = {"waiting": self._queue.waiting, "next": self._following}
                await self._webhook.post_async(client, self._webhook.message("device.wake", data, id))
            except Unavailable as error:
                log.log(logging.DEBUG if troubled else logging.WARNING, "%s", error)
                troubled = True
                until = time.monotonic() + (next(delays) if error.retry_after is None else error.retry_after)
                while not self._queue.connected and (left := until - time.monotonic()) > 0:
                    await self._change(left)
            except Rejected as error:
                log.error("%s; the device is not woken before %g s", error, self._again)
                return
            else:
                self.woken += 1
                return

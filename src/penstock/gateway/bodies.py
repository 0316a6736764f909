"""Bodies of requests, taken within bounds: each in size and time, all together in size."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from penstock.core.errors import Unavailable
from penstock.gateway.settings import GatewaySettings
from penstock.web.problems import Problem
from penstock.web.query import integer


class Bodies:
    def __init__(self, settings: GatewaySettings) -> None:
        self._most, self._memory = settings.body, settings.memory
        self._upload = settings.upload.total_seconds()
        self._held = 0

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """The whole body, which counts for as long as it is used."""
        if (coding := request.headers.get("content-encoding", "identity")) != "identity":
            raise Problem(415, "the header content-encoding", f"{coding} is not taken", "send the body as it is")
        announced = request.headers.get("content-length")
        if announced is not None and integer("the header content-length", announced) > self._most:
            raise self._too_long()
        taken = bytearray()
        try:
            await self._fill(taken, request)
            yield bytes(taken)
        finally:
            self._held -= len(taken)

    async def _fill(self, taken: bytearray, request: Request) -> None:
        try:
            async with asyncio.timeout(self._upload):
                async for chunk in request.stream():
                    if len(taken) + len(chunk) > self._most:
                        raise self._too_long()
                    if self._held + len(chunk) > self._memory:
                        raise Unavailable("the gateway", "more is being sent through it than it holds at a time", 1.0)
                    taken += chunk
                    self._held += len(chunk)
        except TimeoutError:
            raise Problem(408, "the body", f"it did not arrive within {self._upload:g} s") from None

    def _too_long(self) -> Problem:
        return Problem(413, "the body", f"it has more than {self._most} bytes", "send less in more requests")

"""The outside of a source that others send to: somebody who keeps what is not safe, and goes on trying."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
from websockets.asyncio.server import ServerConnection

from penstock.core.contracts import Arrival, Intake
from penstock.testing.sources import plain


async def taken(intakes: AsyncIterator[Intake], count: int) -> list[Arrival]:
    """The next arrivals, settled."""
    found: list[Arrival] = []
    async with asyncio.timeout(20):
        while len(found) < count:
            intake = await anext(intakes)
            found += [one for one in intake.arrivals if isinstance(one, Arrival)]
            await intake.settle(None)
    return found


@dataclass
class Keeper:
    """What it has to give, and how much of it is safe."""

    source: Any
    kept: list[bytes] = field(default_factory=list)
    safe: int = 0
    more: asyncio.Event = field(default_factory=asyncio.Event)

    def payloads(self, count: int) -> list[bytes]:
        return plain(count)

    async def add_records(self, payloads: Sequence[bytes]) -> None:
        self.kept += payloads
        self.more.set()

    async def disconnect(self) -> None:
        raise AssertionError("who can be cut off says how")

    def acknowledged(self) -> int | None:
        return self.safe

    async def run(self) -> None:
        raise AssertionError("who tries says how")

    async def has_more(self, listening: "asyncio.Task[None]") -> bool:
        """Wait for more to give; whether the other side was still there by then."""
        more = asyncio.ensure_future(self.more.wait())
        await asyncio.wait((listening, more), return_when=asyncio.FIRST_COMPLETED)
        more.cancel()
        return not listening.done()


Trying = TypeVar("Trying", bound=Keeper)


@asynccontextmanager
async def trying(keeper: Trying) -> AsyncIterator[Trying]:
    """It goes on trying while the body runs. One that has given up is a fault of the test, and said."""
    running = asyncio.create_task(keeper.run())
    try:
        yield keeper
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


@dataclass
class Poster(Keeper):
    """Posts one after the other, each until it is answered 202."""

    client: httpx.AsyncClient | None = None

    async def disconnect(self) -> None:
        if self.client is not None:
            await self.client.aclose()

    async def post(self, client: httpx.AsyncClient, number: int) -> httpx.Response:
        """Of the record of that number, from 0."""
        raise AssertionError("who posts says how")

    async def run(self) -> None:
        while True:
            async with httpx.AsyncClient(timeout=60) as self.client:
                with suppress(httpx.HTTPError, RuntimeError):
                    while True:
                        while self.safe < len(self.kept):
                            if (await self.post(self.client, self.safe)).status_code != 202:
                                break
                            self.safe += 1
                        self.more.clear()
                        if self.safe == len(self.kept):
                            await self.more.wait()
            await asyncio.sleep(0.005)


async def followed(client: ServerConnection, kept: Sequence[bytes], sent: int) -> None:
    """Send what is kept behind a place, also what comes to it, until the client goes."""
    gone = asyncio.ensure_future(client.wait_closed())
    try:
        while not gone.done():
            some = kept[sent:]
            for one in some:
                await client.send(one)
            sent += len(some)
            await asyncio.wait([gone], timeout=0.005)
    finally:
        gone.cancel()

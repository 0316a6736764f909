"""A client that stays: it is told things until it leaves, or there is nothing more to tell."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Tell = Callable[[bytes], Awaitable[None]]


async def both_until_one_ends(
    talking: Coroutine[Any, Any, None], listening: Coroutine[Any, Any, None], usual: tuple[type[Exception], ...]
) -> None:
    """With the first of them ends the other. `usual`: the errors by which a client goes away."""
    tasks = [asyncio.create_task(talking), asyncio.create_task(listening)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception) and not isinstance(end, usual):
            raise end


class ServerSentEvents(Response, ABC):
    """One client of server-sent events. One that takes nothing for `patience` seconds is dropped."""

    media_type = "text/event-stream"

    def __init__(self, patience: float) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._patience = patience

    @abstractmethod
    async def talk(self, tell: Tell) -> None:
        """Tell what there is, as it comes. It is cancelled when the client has left."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await both_until_one_ends(self._told(send), _left(receive), (TimeoutError, OSError))

    async def _told(self, send: Send) -> None:
        async def tell(text: bytes, more: bool = True) -> None:
            async with asyncio.timeout(self._patience):
                await send({"type": "http.response.body", "body": text, "more_body": more})

        await self.talk(tell)
        await tell(b"", more=False)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

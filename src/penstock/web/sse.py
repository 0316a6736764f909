"""Server-sent events."""

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Write = Callable[[bytes], Awaitable[None]]
_LINE_END = re.compile(rb"\r\n|\r|\n")


def event(data: bytes, id: str) -> bytes:
    lines = b"".join(b"data: %b\n" % line for line in _LINE_END.split(data))
    return b"id: %b\n%b\n" % (id.encode(), lines)


def retry(milliseconds: int) -> bytes:
    """The time that the client waits before it reconnects."""
    return b"retry: %d\n\n" % milliseconds


async def wait_for(changed: asyncio.Event, heartbeat: float) -> bytes:
    """Wait for a change. Without one in `heartbeat` seconds, return a comment that keeps the connection alive."""
    try:
        async with asyncio.timeout(heartbeat):
            await changed.wait()
    except TimeoutError:
        return b":\n\n"
    return b""


async def run_until_first_ends(
    sending: Coroutine[Any, Any, None], receiving: Coroutine[Any, Any, None], expected: tuple[type[Exception], ...]
) -> None:
    """Run both until one ends; cancel the other. `expected`: errors that are ignored, such as a disconnect."""
    tasks = [asyncio.create_task(sending), asyncio.create_task(receiving)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception) and not isinstance(end, expected):
            raise end


class ServerSentEvents(Response, ABC):
    """The response to one client. A client that does not read for `timeout` seconds is disconnected."""

    media_type = "text/event-stream"

    def __init__(self, timeout: float) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._timeout = timeout

    @abstractmethod
    async def stream(self, write: Write) -> None:
        """Write events. It is cancelled when the client disconnects."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await run_until_first_ends(self._send_all(send), _disconnected(receive), (TimeoutError, OSError))

    async def _send_all(self, send: Send) -> None:
        async def write(text: bytes, more: bool = True) -> None:
            async with asyncio.timeout(self._timeout):
                await send({"type": "http.response.body", "body": text, "more_body": more})

        await self.stream(write)
        await write(b"", more=False)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

"""Figures over TCP: posted from any thread, sent by one of its own, and forgotten when nobody takes them."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from itertools import groupby

from penstock.core.contracts import Sender
from penstock.core.errors import Refused, Unavailable
from penstock.core.record import Record

_MOST = 10_000
_AT_THE_END = 2.0


@contextmanager
def posting(
    sender: Callable[[], AbstractAsyncContextManager[Sender]],
) -> Iterator[Callable[[str, bytes, bytes], None]]:
    poster = _Poster(sender)
    thread = threading.Thread(target=lambda: asyncio.run(poster.run()), name="tcp-poster", daemon=True)
    thread.start()
    poster.started.wait()
    try:
        yield poster.post
    finally:
        poster.close()
        thread.join()


class _Poster:
    def __init__(self, sender: Callable[[], AbstractAsyncContextManager[Sender]]) -> None:
        self._sender = sender
        self._posts: deque[tuple[str, Record]] = deque(maxlen=_MOST)  # The newest figures replace the oldest.
        self._more, self._closing = asyncio.Event(), asyncio.Event()
        self.started = threading.Event()

    def post(self, channel: str, key: bytes, value: bytes) -> None:
        self._posts.append((channel, Record(value, key=key)))
        self._loop.call_soon_threadsafe(self._more.set)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.started.set()
        async with self._sender() as sender:
            going = asyncio.create_task(self._go(sender))
            await self._closing.wait()
            self._more.set()
            # What nobody has taken by then is cancelled with it.
            with suppress(TimeoutError):
                await asyncio.wait_for(going, _AT_THE_END)

    async def _go(self, sender: Sender) -> None:
        while self._posts or not self._closing.is_set():
            self._more.clear()
            some = [self._posts.popleft() for _ in range(len(self._posts))]
            for channel, group in groupby(some, lambda post: post[0]):
                with suppress(Unavailable, Refused):
                    await sender.send(channel, [record for _, record in group])
            if not self._posts and not self._closing.is_set():
                await self._more.wait()

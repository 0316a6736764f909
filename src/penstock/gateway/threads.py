"""Threads for calls that block, bounded in number: who finds none free hears so, and comes back."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from penstock.core.errors import Unavailable

Answer = TypeVar("Answer")


class Threads:
    def __init__(self, most: int, name: str, patience: float) -> None:
        self._most, self._name, self._patience = most, name, patience
        self._pool = ThreadPoolExecutor(most, f"gateway-{name}")
        self._free = asyncio.Semaphore(most)

    async def run(self, call: Callable[[], Answer]) -> Answer:
        """What the call answers; Unavailable when no thread gets free in time."""
        try:
            if self._free.locked() and not self._patience:
                raise TimeoutError
            async with asyncio.timeout(self._patience or None):
                await self._free.acquire()
        except TimeoutError:
            raise Unavailable("the gateway", f"{self._most} {self._name} are under way already", 1.0) from None
        running = asyncio.get_running_loop().run_in_executor(self._pool, call)
        # Free again when the thread is, and not when whoever asked has gone.
        running.add_done_callback(lambda _: self._free.release())
        return await asyncio.shield(running)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

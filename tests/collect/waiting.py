"""Waiting in an event loop."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], patience: float = 20) -> None:
    """Wait until something is true."""
    async with asyncio.timeout(patience):
        while not condition():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.005)

"""Waiting in an event loop for what a signal handler sets."""

import asyncio
import threading


async def until_set(stop: threading.Event) -> None:
    """Wait for an event of threads; a thread that waited for it could not be cancelled."""
    while not stop.is_set():  # noqa: ASYNC110 (an asyncio.Event belongs to its loop, the handler runs outside of it)
        await asyncio.sleep(0.05)

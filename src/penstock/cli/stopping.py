"""Ctrl-C and SIGTERM, for a command that serves until then."""

import asyncio
import signal


def stopping() -> asyncio.Event:
    """Set as soon as this process is asked to end; from then on the command ends it, in its own time."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop

"""Events that are set by Ctrl-C and SIGTERM."""

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """An event that the first signal sets; the second signal raises KeyboardInterrupt. Only in the main thread.

    Ignored signals stay ignored, as with `nohup`.
    """
    stop = threading.Event()

    def handle(_number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    caught = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in caught:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number in caught:
            signal.signal(number, before[number])


def async_stop_event() -> asyncio.Event:
    """An event of the running loop that SIGINT or SIGTERM sets."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop

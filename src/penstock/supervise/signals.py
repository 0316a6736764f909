"""Ctrl-C and SIGTERM as an event to wait for."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """An event that the first signal sets; the second one interrupts whatever goes on. Only in the main thread.

    A signal that is ignored stays ignored: `nohup` means it.
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

"""Work that goes on beside the main one, in a thread of its own."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LEAVE_WITHIN = 5.0

log = logging.getLogger(__name__)


@contextmanager
def beside(name: str, work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work` while the body runs. It has to end soon after its event is set; what it raises is logged."""
    stop = threading.Event()

    def run() -> None:
        try:
            work(stop)
        except Exception:
            log.exception("%s has ended", name)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(LEAVE_WITHIN)

"""Background threads."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

JOIN_TIMEOUT = 5.0

log = logging.getLogger(__name__)


@contextmanager
def run_in_background(name: str, work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work` in a thread while the body runs. It has to end soon after its event is set. Its errors are logged."""
    stop = threading.Event()

    def run() -> None:
        try:
            work(stop)
        except Exception:
            log.exception("%s failed", name)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(JOIN_TIMEOUT)

"""The one retry of the parts that run as threads and processes: patient with whoever is away, awake for the stop."""

import logging
import time
from collections.abc import Callable
from threading import Event

from penstock.core.errors import Unavailable

FIRST, LONGEST = 0.1, 5.0
_SETTLED = 60.0


def retrying(
    work: Callable[[Callable[[], None]], None],
    stop: Event,
    waiting: Callable[[Unavailable], None] = lambda _: None,
    log: logging.Logger | None = None,
) -> None:
    """Call `work` until it returns or `stop` is set; each Unavailable is told to `waiting`, and work starts anew.

    A log has the same reason once, until work went well for a minute.

    The pauses double up to five seconds, or are what the error asks for. Work is handed a call by which it says that it
    goes well again: the next pause is then a short one.
    """
    pause, logged, failed = FIRST, "", 0.0

    def well() -> None:
        nonlocal pause, logged
        pause = FIRST
        if time.monotonic() - failed > _SETTLED:
            logged = ""

    while not stop.is_set():
        try:
            work(well)
            return
        except Unavailable as error:
            delay = pause if error.retry_after is None else error.retry_after
            failed = time.monotonic()
            if log is not None and logged != str(error):
                logged = str(error)
                log.warning("%s; tried again until it works", error)
            waiting(Unavailable(error.service, error.reason, delay))
            stop.wait(delay)
            pause = min(2 * pause, LONGEST)

"""The retry loop of threads and processes: it waits for a service that is unavailable, until it is told to stop."""

import logging
import time
from collections.abc import Callable
from threading import Event

from penstock.core.errors import Unavailable

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
_LOG_AGAIN_AFTER = 60.0


def retry(
    work: Callable[[Callable[[], None]], None],
    stop: Event,
    on_error: Callable[[Unavailable], None] = lambda _: None,
    log: logging.Logger | None = None,
) -> None:
    """Call `work` until it returns or `stop` is set. After each Unavailable, call `on_error`, wait, and call it again.

    The pause doubles up to five seconds, unless the error has its own `retry_after`. `work` gets a function to call
    when it succeeds: that resets the pause. The log gets the same error once, until a minute without errors.
    """
    pause, logged, failed = FIRST_PAUSE, "", 0.0

    def succeeded() -> None:
        nonlocal pause, logged
        pause = FIRST_PAUSE
        if time.monotonic() - failed > _LOG_AGAIN_AFTER:
            logged = ""

    while not stop.is_set():
        try:
            work(succeeded)
            return
        except Unavailable as error:
            delay = pause if error.retry_after is None else error.retry_after
            failed = time.monotonic()
            if log is not None and logged != str(error):
                logged = str(error)
                log.warning("%s; retrying until it answers", error)
            on_error(Unavailable(error.service, error.reason, delay))
            stop.wait(delay)
            pause = min(2 * pause, LONGEST_PAUSE)

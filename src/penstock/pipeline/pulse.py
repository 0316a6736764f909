"""What a process measures, told once a second on the status channel."""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import orjson
import psutil

from penstock.core.clock import SystemClock
from penstock.core.errors import PenstockError
from penstock.pipeline.beside import beside

Figures = Mapping[str, Any]
"""What a process tells: under `nodes`, per part of the pipeline (`source:rsvps`, `query:by_country`, …) its figures."""

EVERY = 1.0

log = logging.getLogger(__name__)


class Posting(Protocol):
    """The part of a binder that figures need: `post(channel, key, value)`, without waiting."""

    def poster(self) -> AbstractContextManager[Callable[[str, bytes, bytes], None]]: ...


@contextmanager
def pulse(
    channels: Posting, channel: str, process: str, figures: Callable[[], Figures], every: float = EVERY
) -> Iterator[None]:
    """Tell the figures of this process while the body runs, at once and then every so many seconds."""
    clock, this = SystemClock(), psutil.Process()

    def said() -> dict[str, Any]:
        about = {"process": process, "at": clock.now(), "pid": os.getpid(), "memory": this.memory_info().rss}
        return {**about, "nodes": {}, **figures()}

    def beat(stop: threading.Event) -> None:
        logged = ""
        with channels.poster() as post:
            while True:
                try:
                    post(channel, process.encode(), orjson.dumps(said()))
                    logged = ""
                except PenstockError as error:
                    # The pipeline does not end because its figures cannot be told; `penstock status` sees the silence.
                    if logged != str(error):
                        log.warning("the figures of %s cannot be told: %s", process, error)
                    logged = str(error)
                except Exception:
                    log.exception("the figures of %s cannot be told", process)
                if stop.wait(every):
                    return

    with beside("pulse", beat):
        yield

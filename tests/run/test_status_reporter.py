import os
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from typing import Any

import orjson
import pytest

from penstock.core.clock import SystemClock
from penstock.run.status import Figures, report_status
from penstock.testing import MemoryChannels


class Posted(MemoryChannels):
    """The posting side of a binder: what was posted waits in a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.beats: queue.Queue[tuple[str, bytes, dict[str, Any]]] = queue.Queue()
        self.closed = False

    @contextmanager
    def poster(self) -> Iterator[Callable[[str, bytes, bytes], None]]:
        yield lambda channel, key, value: self.beats.put((channel, key, orjson.loads(value)))
        self.closed = True


def test_the_first_figures_come_at_once_with_who_tells_them_and_when() -> None:
    channels = Posted()
    before = SystemClock().now()
    with report_status(channels, "status", "collect", lambda: {"nodes": {"source:a": {"count": 7}}, "more": 1}):
        channel, key, said = channels.beats.get(timeout=20)
    assert (channel, key) == ("status", b"collect")
    assert before <= said.pop("at") <= SystemClock().now()
    assert said.pop("memory") > 0
    assert said == {"process": "collect", "pid": os.getpid(), "nodes": {"source:a": {"count": 7}}, "more": 1}


def test_it_ends_with_what_it_tells_of() -> None:
    channels = Posted()
    with report_status(channels, "status", "collect", dict):
        channels.beats.get(timeout=20)
    assert channels.closed


def test_one_without_parts_has_none() -> None:
    channels = Posted()
    with report_status(channels, "status", "collect", dict):
        assert channels.beats.get(timeout=20)[2]["nodes"] == {}


def test_figures_that_cannot_be_told_end_nothing(caplog: pytest.LogCaptureFixture) -> None:
    channels = Posted()
    answers: Iterator[Figures] = chain([{"nodes": object()}], repeat({}))
    with report_status(channels, "status", "collect", lambda: next(answers), every=0.01):
        assert channels.beats.get(timeout=20)[2]["nodes"] == {}
    (logged,) = caplog.messages
    assert logged.startswith("collect cannot report its status: ")

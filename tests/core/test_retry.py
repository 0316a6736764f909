import logging
from collections.abc import Callable
from threading import Event

import pytest

from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.retry import retry


def test_work_that_returns_is_done() -> None:
    calls: list[str] = []
    retry(lambda well: calls.append("once"), Event(), lambda error: calls.append("waiting"))
    assert calls == ["once"]


def test_the_pauses_grow_until_it_goes_well() -> None:
    stop, pauses = Event(), list[float | None]()

    def work(well: Callable[[], None]) -> None:
        if len(pauses) == 2:
            well()
        raise Unavailable("Redis", "it is away")

    def waiting(error: Unavailable) -> None:
        pauses.append(error.retry_after)
        if len(pauses) == 4:
            stop.set()

    retry(work, stop, waiting)
    assert pauses == [0.1, 0.2, 0.1, 0.2]


def test_the_other_side_may_say_when_to_come_back() -> None:
    stop, pauses = Event(), list[float | None]()

    def work(well: Callable[[], None]) -> None:
        raise Unavailable("a feed", "too many requests", retry_after=60)

    def waiting(error: Unavailable) -> None:
        pauses.append(error.retry_after)
        stop.set()

    retry(work, stop, waiting)
    assert pauses == [60]


def test_any_other_error_is_not_waited_out() -> None:
    def work(well: Callable[[], None]) -> None:
        raise Misconfigured("Redis", "the password is wrong")

    with pytest.raises(Misconfigured):
        retry(work, Event(), lambda error: None)


def test_the_log_has_a_reason_once(caplog: pytest.LogCaptureFixture) -> None:
    stop, tries = Event(), list[Unavailable]()

    def work(well: Callable[[], None]) -> None:
        well()
        raise Unavailable("Redis", "it is away" if len(tries) < 3 else "it is loading")

    def waiting(error: Unavailable) -> None:
        tries.append(error)
        if len(tries) == 5:
            stop.set()

    retry(work, stop, waiting, logging.getLogger("waiting"))
    assert len([record for record in caplog.records if record.name == "waiting"]) == 2

import logging
import pickle
from collections.abc import Callable
from threading import Event

import pytest

from penstock.core.errors import (
    Misconfigured,
    PenstockError,
    Refused,
    SeveralMisconfigured,
    Unaccounted,
    Unavailable,
    located,
    raise_all,
    retry,
)

SENTENCES = [
    (Misconfigured("penstock.toml", "it is empty", "write a table"), "penstock.toml: it is empty; write a table"),
    (Misconfigured("penstock.toml", "it is empty"), "penstock.toml: it is empty"),
    (
        SeveralMisconfigured((Misconfigured("a", "it is b"), Misconfigured("c", "it is d", "do e"))),
        "2 problems:\n  a: it is b\n  c: it is d; do e",
    ),
    (Unavailable("Redis", "it is loading", 0.5), "Redis is unavailable: it is loading; trying again in 0.5 s"),
    (Unavailable("Redis", "it is loading"), "Redis is unavailable: it is loading"),
    (Refused("an RSVP", "it has no id"), "an RSVP is refused: it has no id"),
    (Unaccounted("rsvps", (("a", 1, 3, 5), ("b", 2, 9, 9))), "rsvps misses a/1: 3–5, b/2: 9–9"),
]


@pytest.mark.parametrize(("error", "sentence"), SENTENCES)
def test_an_error_makes_its_sentence_from_its_facts(error: PenstockError, sentence: str) -> None:
    assert str(error) == sentence


@pytest.mark.parametrize("error", [error for error, _ in SENTENCES], ids=lambda error: type(error).__name__)
def test_an_error_survives_the_way_between_processes(error: PenstockError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert repr(vars(again)) == repr(vars(error))
    assert str(again) == str(error)


def test_what_is_wrong_is_raised_at_once_if_anything_is() -> None:
    raise_all([])
    one, other = Misconfigured("a", "b"), Misconfigured("c", "d")
    with pytest.raises(Misconfigured) as alone:
        raise_all([one])
    assert alone.value is one
    with pytest.raises(SeveralMisconfigured) as both:
        raise_all([one, other])
    assert both.value.errors == (one, other)


def test_an_error_is_located_where_its_place_is_declared() -> None:
    lines = {"channel rsvps": "pipe.py:7", "query by": "pipe.py:9", "query by_city": "pipe.py:12"}
    one, other = Misconfigured("query by_city, line 2", "b", "c"), Misconfigured("elsewhere", "d")
    assert located(one, lines).args == ("pipe.py:12, query by_city, line 2", "b", "c")
    assert located(other, lines) is other
    both = located(SeveralMisconfigured((one, other)), lines)
    assert isinstance(both, SeveralMisconfigured)
    assert [error.location for error in both.errors] == ["pipe.py:12, query by_city, line 2", "elsewhere"]


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

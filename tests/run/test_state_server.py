"""The HTTP end of the analysis, on a real port: one question at a time, and those that are none."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from penstock.core.errors import Misconfigured, Refused
from penstock.run.state_server import answering


class Known:
    """Who knows of one query, and can be made to think for long."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.thinking = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.together = 0

    def get(self, query: str, key: str) -> dict[str, Any]:
        with self._one():
            self.asked.append((query, key))
            if query != "totals":
                raise Misconfigured("pipeline app", f'it has no query "{query}"', 'did you mean "totals"?')
            if key == "broken":
                raise ZeroDivisionError
            return {"query": query, "key": [key]}

    def scan(self, query: str, prefix: str, limit: int) -> dict[str, Any]:
        with self._one():
            if limit > 100:
                raise Refused("the limit", "it is too large")
            return {"query": query, "prefix": prefix, "limit": limit}

    def give_up(self) -> None:
        self.go_on.set()

    @contextmanager
    def _one(self) -> Iterator[None]:
        self.together += 1
        self.thinking.set()
        assert self.go_on.wait(20)
        self.together -= 1
        yield


@pytest.fixture
def known() -> Known:
    return Known()


@pytest.fixture
def address(known: Known) -> Iterator[str]:
    with answering(known, "127.0.0.1:0") as at:
        yield at


@pytest.mark.parametrize(
    "key", ["nl", "", "a/b/c", "../../etc", 'ñ☃ "quoted" [1]', "100%", "a?b#c", "\n\t\0", '["a", 1]']
)
def test_a_key_comes_through_as_it_was_asked(known: Known, address: str, key: str) -> None:
    assert httpx.get(f"{address}/state/totals/{quote(key, safe='')}").json()["key"] == [key]
    assert known.asked == [("totals", key)]


def test_a_scan_has_a_limit_and_a_prefix(address: str) -> None:
    assert httpx.get(f"{address}/state/totals").json() == {"query": "totals", "prefix": "", "limit": 100}
    told = httpx.get(f"{address}/state/totals", params={"prefix": "ñ&", "limit": 7}).json()
    assert told == {"query": "totals", "prefix": "ñ&", "limit": 7}


@pytest.mark.parametrize(
    ("path", "status", "error"),
    [
        ("/state/totls/nl", 404, 'it has no query "totls"'),
        ("/state/totals?limit=many", 400, '"many" is not a valid integer'),
        ("/state/totals?limit=-1", 400, '"-1" is not a valid integer'),
        ("/state/totals?limit=99999999999999", 400, "is not a valid integer"),
        ("/state/totals?limit=101", 400, "it is too large"),
        ("/state/totals?limt=1", 400, "not a parameter"),
        ("/elsewhere", 404, "nothing at this address"),
    ],
)
def test_what_is_no_question_is_told_with_its_place(address: str, path: str, status: int, error: str) -> None:
    answer = httpx.get(address + path)
    assert answer.status_code == status
    assert error in answer.json()["error"]
    assert {"place", "fix"} <= answer.json().keys()


def test_a_fault_of_our_own_shows_no_trace(address: str) -> None:
    answer = httpx.get(f"{address}/state/totals/broken")
    assert answer.status_code == 500
    assert "ZeroDivisionError" not in answer.text


def test_pages_of_other_sites_and_other_names_are_refused(address: str) -> None:
    assert httpx.get(f"{address}/state/totals", headers={"origin": "http://elsewhere"}).status_code == 403
    assert httpx.get(f"{address}/state/totals", headers={"host": "elsewhere"}).status_code == 403


def test_questions_are_answered_one_after_the_other_and_who_comes_when_many_wait_hears_so(
    known: Known, address: str
) -> None:
    known.go_on.clear()
    with ThreadPoolExecutor(18) as pool:
        asked = [pool.submit(httpx.get, f"{address}/state/totals/{n}", timeout=30) for n in range(18)]
        refused = next(as_completed(asked)).result()
        # All others are there, and one of them has the turn.
        assert known.thinking.wait(20)
        together = known.together
        known.go_on.set()
        codes = sorted(one.result().status_code for one in asked)
    assert refused.status_code == 503
    assert "questions wait already" in refused.json()["error"]
    assert int(refused.headers["retry-after"]) >= 1
    assert codes == [200] * 17 + [503]
    assert together == 1


def test_what_takes_too_long_is_given_up_and_the_next_is_answered(known: Known) -> None:
    known.go_on.clear()
    with answering(known, "127.0.0.1:0", reading=0.05) as address:
        slow = httpx.get(f"{address}/state/totals/nl")
        assert slow.status_code == 503
        assert "it takes more than 0.05 s to read" in slow.json()["error"]
        assert httpx.get(f"{address}/state/totals/nl").status_code == 200


def test_an_address_that_is_not_to_be_had_is_named(address: str) -> None:
    with pytest.raises(Misconfigured, match="choose another port"), answering(Known(), address.removeprefix("http://")):
        pass

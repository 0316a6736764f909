"""The state server on a real port: one read at a time, and invalid requests."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from penstock.core.errors import Misconfigured, Refused
from penstock.run.state_server import serve_state


class Reader:
    """A reader with one query, which can be blocked."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, ...]] = []
        self.reading = threading.Event()
        self.unblocked = threading.Event()
        self.unblocked.set()
        self.running = 0

    def get(self, query: str, key: str) -> dict[str, Any]:
        with self._one():
            self.requests.append((query, key))
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

    def cancel(self) -> None:
        self.unblocked.set()

    @contextmanager
    def _one(self) -> Iterator[None]:
        self.running += 1
        self.reading.set()
        assert self.unblocked.wait(20)
        self.running -= 1
        yield


@pytest.fixture
def reader() -> Reader:
    return Reader()


@pytest.fixture
def address(reader: Reader) -> Iterator[str]:
    with serve_state(reader, "127.0.0.1:0") as at:
        yield at


@pytest.mark.parametrize(
    "key", ["nl", "", "a/b/c", "../../etc", 'ñ☃ "quoted" [1]', "100%", "a?b#c", "\n\t\0", '["a", 1]']
)
def test_a_key_may_have_any_characters(reader: Reader, address: str, key: str) -> None:
    assert httpx.get(f"{address}/state/totals/{quote(key, safe='')}").json()["key"] == [key]
    assert reader.requests == [("totals", key)]


def test_a_scan_has_a_limit_and_a_prefix(address: str) -> None:
    assert httpx.get(f"{address}/state/totals").json() == {"query": "totals", "prefix": "", "limit": 100}
    found = httpx.get(f"{address}/state/totals", params={"prefix": "ñ&", "limit": 7}).json()
    assert found == {"query": "totals", "prefix": "ñ&", "limit": 7}


@pytest.mark.parametrize(
    ("path", "status", "error"),
    [
        ("/state/totls/nl", 404, 'it has no query "totls"'),
        ("/state/totals?limit=many", 400, '"many" is not a valid integer'),
        ("/state/totals?limit=-1", 400, '"-1" is not a valid integer'),
        ("/state/totals?limit=99999999999999", 400, "is not a valid integer"),
        ("/state/totals?limit=101", 400, "it is too large"),
        ("/state/totals?limt=1", 400, "unknown parameter"),
        ("/elsewhere", 404, "unknown address"),
    ],
)
def test_an_invalid_request_is_rejected_with_its_place(address: str, path: str, status: int, error: str) -> None:
    answer = httpx.get(address + path)
    assert answer.status_code == status
    assert error in answer.json()["error"]
    assert {"place", "fix"} <= answer.json().keys()


def test_an_internal_error_shows_no_traceback(address: str) -> None:
    answer = httpx.get(f"{address}/state/totals/broken")
    assert answer.status_code == 500
    assert "ZeroDivisionError" not in answer.text


def test_cross_site_requests_are_rejected(address: str) -> None:
    assert httpx.get(f"{address}/state/totals", headers={"origin": "http://elsewhere"}).status_code == 403
    assert httpx.get(f"{address}/state/totals", headers={"host": "elsewhere"}).status_code == 403


def test_reads_run_one_at_a_time_and_a_full_queue_rejects(reader: Reader, address: str) -> None:
    reader.unblocked.clear()
    with ThreadPoolExecutor(18) as pool:
        calls = [pool.submit(httpx.get, f"{address}/state/totals/{n}", timeout=30) for n in range(18)]
        refused = next(as_completed(calls)).result()
        # All others are there, and one of them is running.
        assert reader.reading.wait(20)
        running = reader.running
        reader.unblocked.set()
        codes = sorted(one.result().status_code for one in calls)
    assert refused.status_code == 503
    assert "16 are waiting" in refused.json()["error"]
    assert int(refused.headers["retry-after"]) >= 1
    assert codes == [200] * 17 + [503]
    assert running == 1


def test_a_slow_read_is_cancelled_and_the_next_one_runs(reader: Reader) -> None:
    reader.unblocked.clear()
    with serve_state(reader, "127.0.0.1:0", timeout=0.05) as address:
        slow = httpx.get(f"{address}/state/totals/nl")
        assert slow.status_code == 503
        assert "0.05 s" in slow.json()["error"]
        assert httpx.get(f"{address}/state/totals/nl").status_code == 200


def test_a_used_port_is_rejected(address: str) -> None:
    with (
        pytest.raises(Misconfigured, match="choose another port"),
        serve_state(Reader(), address.removeprefix("http://")),
    ):
        pass

"""The state of a query over the page, with the analysis on another port."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from penstock.core.errors import Misconfigured
from penstock.deliver.app import build
from penstock.deliver.delivery import FeedSpec
from penstock.deliver.states import combine
from penstock.run.state_server import serve_state
from penstock.testing import MemoryChannels

Served = Callable[..., AbstractContextManager[str]]
POSITION = {"batch": 7, "at": 1, "watermark": None, "reads": {"things": {"0": 12}}}


class Analysis:
    """A state reader with one key."""

    def get(self, query: str, key: str) -> dict[str, Any]:
        if query != "count":
            raise Misconfigured("pipeline app", f'it has no query "{query}"', 'did you mean "count"?')
        found = {"query": query, "into": "counts", "key": [key], "position": POSITION, "note": None}
        return {**found, "state": {"count": 3} if key == "a/b" else None, "keys": [["a/b"]]}

    def scan(self, query: str, prefix: str, limit: int) -> dict[str, Any]:
        entries = [{"key": ["a/b"], "value": {"count": 3}}]
        return {"query": query, "entries": entries, "more": False, "request": [prefix, limit]}

    def cancel(self) -> None: ...


@pytest.fixture
def channels() -> MemoryChannels:
    return MemoryChannels(partitions=2)


@pytest.fixture
def address(channels: MemoryChannels, vega_cache: Path, served: Served) -> Iterator[str]:
    app = build(channels, [FeedSpec("counts", "counts", "id")], [], {}, "status", "A page", cache=vega_cache)
    with served(app) as at:
        yield at


def report(channels: MemoryChannels, address: str | None, at: int | None = None) -> None:
    status = {"at": time.time_ns() // 1_000 if at is None else at, "nodes": {}, "answers": address}
    channels.append("status", json.dumps(status).encode(), b"analyse")


def ask(address: str, path: str, **more: Any) -> httpx.Response:
    """GET, once the page knows the address of the analysis."""
    until = time.monotonic() + 20
    while (answer := httpx.get(address + path, **more)).status_code == 503 and time.monotonic() < until:
        time.sleep(0.02)
    return answer


def test_the_state_of_a_key_comes_with_its_newest_row(
    channels: MemoryChannels, address: str, eventually: Callable[..., None]
) -> None:
    channels.append("counts", b'{"n": 4}', b'["a/b"]', [("version", b"4"), ("time", b"9")])
    with serve_state(Analysis(), "127.0.0.1:0") as analysis:
        report(channels, analysis)
        eventually(lambda: ask(address, f"/state/count/{quote('a/b', safe='')}").json()["row"] is not None)
        found = ask(address, "/state/count/a/b").json()
    assert found["key"] == ["a/b"]
    assert found["state"] == {"count": 3}
    assert found["position"] == POSITION
    row = found["row"]
    assert (row["row"], row["version"], row["time"]) == ({"n": 4}, 4, 9)
    assert row["position"].keys() == {"partition", "offset", "at"}


def test_an_unknown_key_or_query_is_answered_with_a_fix(channels: MemoryChannels, address: str) -> None:
    with serve_state(Analysis(), "127.0.0.1:0") as analysis:
        report(channels, analysis)
        nothing = ask(address, "/state/count/" + quote("ñ\n", safe=""))
        unknown = ask(address, "/state/cont/a")
        scanned = ask(address, "/state/count", params={"limit": 3, "prefix": "a&b"})
        refused = ask(address, "/state/count?limit=0x1")
        foreign = ask(address, "/state/count", headers={"origin": "http://elsewhere"})
    assert (nothing.status_code, nothing.json()["keys"]) == (404, [["a/b"]])
    assert '["ñ\\n"]' in nothing.json()["error"]
    assert '["a/b"]' in nothing.json()["fix"]
    assert (unknown.status_code, unknown.json()["fix"]) == (404, 'did you mean "count"?')
    assert scanned.json()["request"] == ["a&b", 3]
    assert (refused.status_code, refused.json()["place"]) == (400, "?limit")
    assert foreign.status_code == 403


def test_an_unavailable_analysis_gives_503(
    channels: MemoryChannels, address: str, eventually: Callable[..., None]
) -> None:
    silent = httpx.get(f"{address}/state/count/a")
    assert silent.status_code == 503
    assert "ten seconds" in silent.json()["error"]
    with serve_state(Analysis(), "127.0.0.1:0") as analysis:
        pass
    report(channels, analysis)
    eventually(lambda: "ten seconds" not in httpx.get(f"{address}/state/count/a").json()["error"])
    gone = httpx.get(f"{address}/state/count/a")
    assert gone.status_code == 503
    assert gone.json()["place"] == "the analysis"
    assert gone.headers["retry-after"]


def test_a_row_without_state_is_an_answer() -> None:
    answer = {"query": "q", "key": ["k"], "state": None, "position": None, "note": "it keeps no state", "keys": []}
    assert combine(answer, {"row": {}})[0] == 200
    status, document = combine(answer, None)
    assert (status, document["fix"]) == (404, "it keeps no state")

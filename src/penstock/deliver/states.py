"""What a query remembers of a key, for those who ask the page: the analysis is asked, and the newest row is added."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote, urlsplit

import orjson
from starlette.requests import Request
from starlette.responses import Response

from penstock.core.clock import Clock, is_running
from penstock.deliver.delivery import Delivery
from penstock.deliver.feed import Feed
from penstock.web.responses import problem, reply

PROCESS, ADDRESS = "analyse", "answers"
"""The process that knows, and under what it says where it can be asked."""

_PATIENCE = 45.0
_MOST = 64 << 20
_TOGETHER = 32


class States:
    def __init__(self, delivery: Delivery, clock: Clock, patience: float = _PATIENCE) -> None:
        self._delivery, self._clock, self._patience = delivery, clock, patience
        self._asking = 0

    async def one(self, request: Request) -> Response:
        """The state of a key, and its newest row."""
        query, key = request.path_params["query"], request.path_params["key"]
        answer = await self._ask(f"/state/{quote(query, safe='')}/{quote(key, safe='')}")
        if isinstance(answer, Response):
            return answer
        outlet = self._delivery.outlets.get(str(answer.get("into")))
        status, document = together(answer, row_of(outlet.feed, answer.get("key")) if outlet else None)
        return reply(document, status)

    async def some(self, request: Request) -> Response:
        """The state of many keys."""
        asked = f"?{request.url.query}" if request.url.query else ""
        answer = await self._ask(f"/state/{quote(request.path_params['query'], safe='')}{asked}")
        return answer if isinstance(answer, Response) else reply(answer)

    async def _ask(self, path: str) -> dict[str, Any] | Response:
        """What the analysis answers, or why there is no answer."""
        address = self._address()
        if address is None:
            return _away("it has said nothing for ten seconds")
        if self._asking >= _TOGETHER:
            return problem(503, f"{self._asking} questions are being answered; come back later")
        self._asking += 1
        try:
            status, document = await _fetched(address, path, self._patience)
        except TimeoutError:
            return _away(f"it has not answered within {self._patience:g} s")
        except (OSError, ValueError, EOFError) as error:
            return _away(str(error))
        finally:
            self._asking -= 1
        if status == 200:
            return document
        facts = {name: value for name, value in document.items() if name != "error"}
        return problem(status, str(document.get("error", "")), facts)

    def _address(self) -> str | None:
        said = self._delivery.said(PROCESS)
        address = said.get(ADDRESS) if is_running(said.get("at"), self._clock.now()) else None
        return address if isinstance(address, str) and address.startswith("http://") else None


def together(answer: Mapping[str, Any], row: Mapping[str, Any] | None) -> tuple[int, dict[str, Any]]:
    """The state of a key and its newest row as one answer; with its status: neither is there, or one of them."""
    found = {name: answer.get(name) for name in ("query", "key", "state", "position", "note")}
    if row is not None or found["state"] is not None:
        return 200, {**found, "row": row}
    key = orjson.dumps(found["key"]).decode()
    known = [orjson.dumps(one).decode() for one in answer.get("keys", ())]
    fix = f"its keys look like {', '.join(known)}" if known else found["note"] or "it has no keys yet"
    error = f"{found['query']} has nothing under {key}"
    return 404, {"error": error, "place": "the key", "fix": fix, "keys": answer.get("keys", [])}


def row_of(feed: Feed, key: object) -> dict[str, Any] | None:
    """The newest row of a key, and where it lies."""
    for one in spellings(key):
        if (found := feed.find(orjson.dumps(one))) is not None:
            return {
                "row": orjson.Fragment(found.change.row or b"null"),
                "version": found.change.version,
                "time": found.change.time,
                "position": {"partition": found.partition, "offset": found.offset, "at": found.appended},
            }
    return None


def spellings(key: object) -> list[object]:
    """What a key may mean: a bare value is a text, or a number, or whatever else JSON knows."""
    found = [key]
    if isinstance(key, list) and len(key) == 1 and isinstance(key[0], str):
        with suppress(orjson.JSONDecodeError):
            found.append([orjson.loads(key[0])])
    return found


async def _fetched(address: str, path: str, patience: float) -> tuple[int, dict[str, Any]]:
    """What is at an address. In HTTP's first version, for there the end of the answer is that of the connection."""
    parts = urlsplit(address)
    async with asyncio.timeout(patience):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=_MOST)
        try:
            writer.write(f"GET {path} HTTP/1.0\r\nHost: {parts.netloc}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.read(_MOST)
            while more := await reader.read(_MOST):
                body += more
        finally:
            writer.close()
    document = orjson.loads(body)
    if not isinstance(document, dict):
        raise ValueError("its answer is no object")
    return int(head.split(b" ", 2)[1]), document


def _away(why: str) -> Response:
    facts = {"place": "the analysis", "fix": "ask again later; the newest rows are at /feeds/NAME"}
    return problem(503, f"the analysis is away: {why}", facts)

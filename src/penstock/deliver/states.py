"""The state of a query by key: a request to the analysis, and the newest row of the key from the feed."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import httpx
import orjson
from starlette.requests import Request
from starlette.responses import Response

from penstock.core.clock import Clock, is_running
from penstock.deliver.delivery import Delivery
from penstock.deliver.feed import Feed
from penstock.web.responses import error_response, reply

PROCESS, ADDRESS = "analyse", "answers"
"""The process that serves the state, and the field of its status with its address."""

# httpx logs each request with its whole address, which has the key.
logging.getLogger("httpx").setLevel(logging.WARNING)

_TIMEOUT = 45.0
_MAX_REQUESTS = 32


class StateEndpoint:
    """Forwards requests for state to the analysis."""

    def __init__(self, delivery: Delivery, clock: Clock) -> None:
        self._delivery, self._clock = delivery, clock
        self._open = 0

    async def get(self, request: Request) -> Response:
        """The state of a key, and its newest row."""
        query, key = request.path_params["query"], request.path_params["key"]
        answer = await self._forward(f"/state/{_quoted(query)}/{_quoted(key)}")
        if isinstance(answer, Response):
            return answer
        live = self._delivery.feeds.get(str(answer.get("into")))
        status, document = combine(answer, newest_row(live.feed, answer.get("key")) if live else None)
        return reply(document, status)

    async def scan(self, request: Request) -> Response:
        """The state of many keys."""
        query_string = f"?{request.url.query}" if request.url.query else ""
        answer = await self._forward(f"/state/{_quoted(request.path_params['query'])}{query_string}")
        return answer if isinstance(answer, Response) else reply(answer)

    async def _forward(self, path: str) -> dict[str, Any] | Response:
        """The answer of the analysis, or an error response."""
        address = self._address()
        if address is None:
            return _unavailable("it has not reported for ten seconds")
        if self._open >= _MAX_REQUESTS:
            return error_response(503, f"too many requests for state: the limit is {_MAX_REQUESTS}")
        self._open += 1
        try:
            # Certificates are not loaded, which takes long: the address has no TLS.
            client = httpx.AsyncClient(verify=False, timeout=None, trust_env=False)
            async with asyncio.timeout(_TIMEOUT), client:
                answer = await client.get(address + path)
            document = answer.json()
            if not isinstance(document, dict):
                raise ValueError("its answer is not a JSON object")
        except TimeoutError:
            return _unavailable(f"no answer within {_TIMEOUT:g} s")
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            return _unavailable(str(error))
        finally:
            self._open -= 1
        if answer.status_code == 200:
            return document
        facts = {name: value for name, value in document.items() if name != "error"}
        return error_response(answer.status_code, str(document.get("error", "")), facts)

    def _address(self) -> str | None:
        status = self._delivery.process_status(PROCESS)
        address = status.get(ADDRESS) if is_running(status.get("at"), self._clock.now()) else None
        return address if isinstance(address, str) and address.startswith("http://") else None


def _quoted(segment: str) -> str:
    """A segment of a path. "." and ".." would be removed by the HTTP client."""
    return quote(segment, safe="").replace(".", "%2E")


def combine(answer: Mapping[str, Any], row: Mapping[str, Any] | None) -> tuple[int, dict[str, Any]]:
    """The HTTP status and the document for the state of a key and its newest row; 404 if it has neither."""
    found = {name: answer.get(name) for name in ("query", "key", "state", "position", "note")}
    if row is not None or found["state"] is not None:
        return 200, {**found, "row": row}
    key = orjson.dumps(found["key"]).decode()
    examples = [orjson.dumps(one).decode() for one in answer.get("keys", ())]
    fix = f"its keys look like {', '.join(examples)}" if examples else found["note"] or "it has no keys yet"
    error = f"{found['query']} has no state for the key {key}"
    return 404, {"error": error, "place": "the key", "fix": fix, "keys": answer.get("keys", [])}


def newest_row(feed: Feed, key: object) -> dict[str, Any] | None:
    """The newest row of a key, with its position."""
    for one in readings(key):
        if (found := feed.find(orjson.dumps(one))) is not None:
            return {
                "row": orjson.Fragment(found.change.row or b"null"),
                "version": found.change.version,
                "time": found.change.time,
                "position": {"partition": found.partition, "offset": found.offset, "at": found.appended},
            }
    return None


def readings(key: object) -> list[object]:
    """The possible meanings of a key: a bare value is text, or JSON such as a number."""
    found = [key]
    if isinstance(key, list) and len(key) == 1 and isinstance(key[0], str):
        with suppress(orjson.JSONDecodeError):
            found.append([orjson.loads(key[0])])
    return found


def _unavailable(why: str) -> Response:
    facts = {"place": "the analysis", "fix": "try again later; the newest rows are at /feeds/NAME"}
    return error_response(503, f"the analysis is unavailable: {why}", facts)

"""The HTTP end of the analysis: what its queries remember, for the page of the pipeline and for commands."""

import asyncio
import logging
import math
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.analysis.engine import Engine
from penstock.analysis.state import lookup
from penstock.core.errors import Misconfigured, PenstockError, Refused, Unavailable
from penstock.pipeline.beside import beside
from penstock.pipeline.chosen import find_query
from penstock.pipeline.description import Description
from penstock.pipeline.tiers.waiting import until_set
from penstock.serve import authority, first, listening, served
from penstock.serve.paths import allow_anything
from penstock.serve.patient import http_alone
from penstock.serve.replies import Guarded, problem, reply
from penstock.serve.visitors import Checked, Visitors

log = logging.getLogger(__name__)

SLOTS = 1
"""So many of Spark's slots a question takes: one is read at a time, by one task."""
USUAL = 100
"""So many entries a scan gives if nobody says otherwise."""

_TURN, _READING = 10.0, 30.0
_WAITING = 16
_PATIENCE = 10.0
_TOGETHER = 64
_POLICY = "default-src 'none'; frame-ancestors 'none'"


class Answers(Protocol):
    """Who knows. Misconfigured: there is no such query; Refused: this is no question; Unavailable: not now."""

    def get(self, query: str, key: str) -> dict[str, Any]: ...

    def scan(self, query: str, prefix: str, limit: int) -> dict[str, Any]: ...

    def give_up(self) -> None:
        """End what is being read. Any thread may ask for it."""


class StateAnswers:
    """The state of the queries of a pipeline, read in the session that they run in."""

    _TAG = "penstock-state"

    def __init__(self, engine: Engine, description: Description) -> None:
        self._engine, self._description = engine, description

    def get(self, query: str, key: str) -> dict[str, Any]:
        chosen = find_query(self._description, query)
        with self._tagged():
            return lookup.get(self._engine, chosen, key)

    def scan(self, query: str, prefix: str, limit: int) -> dict[str, Any]:
        chosen = find_query(self._description, query)
        with self._tagged():
            return lookup.scan(self._engine, chosen, prefix, limit)

    def give_up(self) -> None:
        self._engine.spark.interruptTag(self._TAG)

    @contextmanager
    def _tagged(self) -> Iterator[None]:
        """Tags belong to a thread."""
        self._engine.spark.addTag(self._TAG)
        try:
            yield
        finally:
            self._engine.spark.removeTag(self._TAG)


@contextmanager
def answering(answers: Answers, where: str, reading: float = _READING) -> Iterator[str]:
    """Answer at `where` (host:port; port 0 is a free one) while the body runs, which gets the address.

    What takes longer than `reading` seconds to find out is given up.
    """
    host, _, port = where.rpartition(":")
    host = host.strip("[]")
    with listening("[spark] answers, the", host, int(port), _PATIENCE) as listener:
        app = Checked(_build(answers, reading), Visitors(listener, host))

        async def serve(stop: threading.Event) -> None:
            async with served(http_alone(app, _TOGETHER, _PATIENCE, 1), listener) as serving:
                await first(serving, until_set(stop))

        with beside("the answering of questions", lambda stop: asyncio.run(serve(stop))):
            yield f"http://{authority(_reached_by(host), listener.getsockname()[1])}"


def _build(answers: Answers, reading: float) -> Starlette:
    """The app: `GET /state/QUERY/KEY`, and `GET /state/QUERY?prefix=…&limit=…`."""
    allow_anything()
    turns = _Turns(answers.give_up, reading)

    async def get(request: Request) -> Response:
        name, key = request.path_params["query"], request.path_params["key"]
        return reply(await turns.run(lambda: answers.get(name, key)))

    async def scan(request: Request) -> Response:
        name, prefix, limit = request.path_params["query"], request.query_params.get("prefix", ""), _limit(request)
        return reply(await turns.run(lambda: answers.scan(name, prefix, limit)))

    return Starlette(
        routes=[Route("/state/{query}", scan), Route("/state/{query}/{key:anything}", get)],
        middleware=[Middleware(Guarded, policy=_POLICY)],
        exception_handlers={PenstockError: _on_error, HTTPException: _on_http, Exception: _on_fault},
    )


class _Turns:
    """One question after the other; who waits for too long, or comes when many do, hears so."""

    def __init__(self, give_up: Callable[[], None], reading: float) -> None:
        self._give_up, self._reading = give_up, reading
        self._free = asyncio.Semaphore(1)
        self._pool = ThreadPoolExecutor(1, "state")
        self._waiting = 0

    async def run(self, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        await self._turn()
        running = asyncio.get_running_loop().run_in_executor(self._pool, call)
        running.add_done_callback(self._done)
        try:
            async with asyncio.timeout(self._reading):
                return await asyncio.shield(running)
        except TimeoutError:
            await asyncio.to_thread(self._give_up)
            raise Unavailable("the state", f"it takes more than {self._reading:g} s to read") from None

    async def _turn(self) -> None:
        if self._waiting >= _WAITING:
            raise Unavailable("the state", f"{self._waiting} questions wait already", 1.0)
        self._waiting += 1
        try:
            async with asyncio.timeout(_TURN):
                await self._free.acquire()
        except TimeoutError:
            raise Unavailable("the state", "other questions are being answered", 1.0) from None
        finally:
            self._waiting -= 1

    def _done(self, running: "asyncio.Future[dict[str, Any]]") -> None:
        # The turn ends when the thread is free, and not when whoever asked has gone.
        self._free.release()
        if not running.cancelled() and (error := running.exception()) is not None:
            log.debug("a question was not answered: %s", error)


def _limit(request: Request) -> int:
    text = request.query_params.get("limit", str(USUAL))
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise Refused("the limit", f'"{text[:40]}" is no whole number')
    return int(text)


def _reached_by(host: str) -> str:
    """By what name others find us: who listens to everybody is found by the name of the machine."""
    try:
        return socket.gethostname() if ip_address(host).is_unspecified else host
    except ValueError:
        return host


async def _on_error(_: Request, error: Exception) -> Response:
    match error:
        case Misconfigured():
            return problem(404, error.problem, {"place": error.place, "way_out": error.way_out})
        case Refused():
            return problem(400, error.reason, {"place": error.what, "way_out": ""})
        case Unavailable():
            soon = {"retry-after": str(math.ceil(error.retry_after or 1))}
            return problem(503, error.why, {"place": error.who, "way_out": "ask again later"}, soon)
    return problem(500, str(error), {"place": "the analysis", "way_out": ""})


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    place = f"{request.method} {request.url.path}"
    return problem(error.status_code, error.detail, {"place": place, "way_out": "GET /state/QUERY/KEY"}, error.headers)


async def _on_fault(request: Request, error: Exception) -> Response:
    """An error of our own: the trace is for the log, not for who asked."""
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return problem(500, "the analysis has a fault of its own", {"place": request.url.path, "way_out": ""})

"""The HTTP end of the analysis: what its queries remember, for the page of the pipeline and for commands."""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.analysis.engine import Engine
from penstock.analysis.state import lookup
from penstock.core.errors import Misconfigured, Unavailable
from penstock.pipeline.description import Description
from penstock.run.background import beside
from penstock.run.tier import until_set
from penstock.web.idle_timeout import http_config
from penstock.web.origin_check import OriginCheck, OriginCheckMiddleware
from penstock.web.paths import register_rest_convertor
from penstock.web.problems import handlers
from penstock.web.query import Query
from penstock.web.responses import SecurityHeaders, problem, reply
from penstock.web.server import authority, listen, run_server, wait_first

log = logging.getLogger(__name__)

SLOTS = 1
"""So many of Spark's slots a question takes: one is read at a time, by one task."""
USUAL, _MOST = 100, 999_999_999
"""So many entries a scan gives if nobody says otherwise."""

_TURN, _READING = 10.0, 30.0
_WAITING = 16
_PATIENCE = 10.0
_TOGETHER = 64


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
        chosen = self._description.query(query)
        with self._tagged():
            return lookup.get(self._engine, chosen, key)

    def scan(self, query: str, prefix: str, limit: int) -> dict[str, Any]:
        chosen = self._description.query(query)
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
    with listen("[spark] answers, the", host, int(port), _PATIENCE) as listener:
        app = OriginCheckMiddleware(_build(answers, reading), OriginCheck(listener, host))

        async def serve(stop: threading.Event) -> None:
            async with run_server(http_config(app, _TOGETHER, _PATIENCE, 1), listener) as serving:
                await wait_first(serving, until_set(stop))

        with beside("the answering of questions", lambda stop: asyncio.run(serve(stop))):
            yield f"http://{authority(_reached_by(host), listener.getsockname()[1])}"


def _build(answers: Answers, reading: float) -> Starlette:
    """The app: `GET /state/QUERY/KEY`, and `GET /state/QUERY?prefix=…&limit=…`."""
    register_rest_convertor()
    turns = _Turns(answers.give_up, reading)

    async def get(request: Request) -> Response:
        name, key = request.path_params["query"], request.path_params["key"]
        return reply(await turns.run(lambda: answers.get(name, key)))

    async def scan(request: Request) -> Response:
        query, name = Query(request, ("prefix", "limit")), request.path_params["query"]
        prefix, limit = query.text("prefix") or "", query.number("limit", USUAL, _MOST)
        return reply(await turns.run(lambda: answers.scan(name, prefix, limit)))

    return Starlette(
        routes=[Route("/state/{query}", scan), Route("/state/{query}/{key:rest}", get)],
        middleware=[Middleware(SecurityHeaders)],
        exception_handlers={**handlers("the analysis", "GET /state/QUERY/KEY"), Misconfigured: _on_unknown},
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


def _reached_by(host: str) -> str:
    """By what name others find us: who listens to everybody is found by the name of the machine."""
    try:
        return socket.gethostname() if ip_address(host).is_unspecified else host
    except ValueError:
        return host


async def _on_unknown(_: Request, error: Exception) -> Response:
    assert isinstance(error, Misconfigured)
    return problem(404, error.problem, {"place": error.place, "fix": error.fix})

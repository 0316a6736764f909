"""Serves the state of queries over HTTP, for the page and for commands."""

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

from penstock.analysis import state_lookup as lookup
from penstock.analysis.engine import Engine
from penstock.core.errors import Misconfigured, Unavailable
from penstock.pipeline.description import Description
from penstock.run.status import run_in_background
from penstock.run.tier import wait_until_set
from penstock.web.requests import OriginCheck, OriginCheckMiddleware, Query
from penstock.web.responses import SecurityHeaders, error_response, handlers, reply
from penstock.web.server import authority, http_config, listen, run_server, wait_first

log = logging.getLogger(__name__)

SLOTS = 1
"""Spark slots that reading needs: one request at a time, with one task."""
DEFAULT_LIMIT, _MAX_LIMIT = 100, 999_999_999
"""Entries of a scan."""

_QUEUE_TIMEOUT, _READ_TIMEOUT = 10.0, 30.0
_QUEUE_SIZE = 16
_IDLE_TIMEOUT = 10.0
_CONNECTIONS = 64


class StateReader(Protocol):
    """Reads state. Raises Misconfigured for an unknown query, Refused for an invalid request, Unavailable."""

    def get(self, query: str, key: str) -> dict[str, Any]: ...

    def scan(self, query: str, prefix: str, limit: int) -> dict[str, Any]: ...

    def cancel(self) -> None:
        """Cancel the read that is running. Thread-safe."""


class SparkStateReader:
    """Reads the state of the queries of a pipeline in their own Spark session."""

    _TAG = "penstock-state"

    def __init__(self, engine: Engine, description: Description) -> None:
        self._engine, self._description = engine, description

    def get(self, query: str, key: str) -> dict[str, Any]:
        found = self._description.query(query)
        with self._tagged():
            return lookup.get(self._engine, found, key)

    def scan(self, query: str, prefix: str, limit: int) -> dict[str, Any]:
        found = self._description.query(query)
        with self._tagged():
            return lookup.scan(self._engine, found, prefix, limit)

    def cancel(self) -> None:
        self._engine.spark.interruptTag(self._TAG)

    @contextmanager
    def _tagged(self) -> Iterator[None]:
        """Tag the jobs of this thread, so that they can be cancelled."""
        self._engine.spark.addTag(self._TAG)
        try:
            yield
        finally:
            self._engine.spark.removeTag(self._TAG)


@contextmanager
def serve_state(reader: StateReader, address: str, timeout: float = _READ_TIMEOUT) -> Iterator[str]:
    """Serve at `address` (host:port; port 0 is any free port) while the context is open; it yields the URL.

    A read that takes longer than `timeout` seconds is cancelled.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    with listen("[spark] answers, the", host, int(port), _IDLE_TIMEOUT) as listener:
        app = OriginCheckMiddleware(_build(reader, timeout), OriginCheck(listener, host))

        async def serve(stop: threading.Event) -> None:
            async with run_server(http_config(app, _CONNECTIONS, _IDLE_TIMEOUT, 1), listener) as serving:
                await wait_first(serving, wait_until_set(stop))

        with run_in_background("the state server", lambda stop: asyncio.run(serve(stop))):
            yield f"http://{authority(_public_name(host), listener.getsockname()[1])}"


def _build(reader: StateReader, timeout: float) -> Starlette:
    """The app: `GET /state/QUERY/KEY`, and `GET /state/QUERY?prefix=…&limit=…`."""
    executor = _SerialExecutor(reader.cancel, timeout)

    async def get(request: Request) -> Response:
        name, key = request.path_params["query"], request.path_params["key"]
        return reply(await executor.run(lambda: reader.get(name, key)))

    async def scan(request: Request) -> Response:
        query, name = Query(request, ("prefix", "limit")), request.path_params["query"]
        prefix, limit = query.text("prefix") or "", query.number("limit", DEFAULT_LIMIT, _MAX_LIMIT)
        return reply(await executor.run(lambda: reader.scan(name, prefix, limit)))

    return Starlette(
        routes=[Route("/state/{query}", scan), Route("/state/{query}/{key:rest}", get)],
        middleware=[Middleware(SecurityHeaders)],
        exception_handlers={**handlers("the analysis", "GET /state/QUERY/KEY"), Misconfigured: _not_found},
    )


class _SerialExecutor:
    """Runs one read at a time, in a thread. Unavailable if the queue is full, or waiting or reading takes too long."""

    def __init__(self, cancel: Callable[[], None], timeout: float) -> None:
        self._cancel, self._timeout = cancel, timeout
        self._free = asyncio.Semaphore(1)
        self._pool = ThreadPoolExecutor(1, "state")
        self._waiting = 0

    async def run(self, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        await self._acquire()
        running = asyncio.get_running_loop().run_in_executor(self._pool, call)
        running.add_done_callback(self._done)
        try:
            async with asyncio.timeout(self._timeout):
                return await asyncio.shield(running)
        except TimeoutError:
            await asyncio.to_thread(self._cancel)
            raise Unavailable("the state", f"reading it takes more than {self._timeout:g} s") from None

    async def _acquire(self) -> None:
        if self._waiting >= _QUEUE_SIZE:
            raise Unavailable("the state", f"too many requests: {self._waiting} are waiting", 1.0)
        self._waiting += 1
        try:
            async with asyncio.timeout(_QUEUE_TIMEOUT):
                await self._free.acquire()
        except TimeoutError:
            raise Unavailable("the state", "other requests take too long", 1.0) from None
        finally:
            self._waiting -= 1

    def _done(self, running: "asyncio.Future[dict[str, Any]]") -> None:
        # The next read starts when the thread is free, not when the client disconnects.
        self._free.release()
        if not running.cancelled() and (error := running.exception()) is not None:
            log.debug("a read of state failed: %s", error)


def _public_name(host: str) -> str:
    """The host for the URL: the name of the machine if the server listens on all addresses."""
    try:
        return socket.gethostname() if ip_address(host).is_unspecified else host
    except ValueError:
        return host


async def _not_found(_: Request, error: Exception) -> Response:
    assert isinstance(error, Misconfigured)
    return error_response(404, error.problem, {"place": error.location, "fix": error.fix})

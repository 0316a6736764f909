"""What several routes ask of a request."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from starlette.requests import Request

from penstock.gateway.fetching import Wish
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.taking import Format
from penstock.web.problems import Problem
from penstock.web.query import Query

JSON = "application/json"
AMOUNT = ("max", "max_bytes", "wait", "format")
"""The parameters of whoever reads."""

_USUAL_RECORDS = 500
_USUAL_BYTES = 1 << 20


def media_type(request: Request, *taken: str) -> str:
    """What the body is; a problem when it is none of those that are taken."""
    told, *parameters = request.headers.get("content-type", "").split(";")
    found = told.strip().lower()
    if found not in taken:
        why = f"{found} is not taken here" if found else "it is missing"
        raise Problem(415, "the header content-type", why, f"send {' or '.join(taken)}")
    for parameter in parameters:
        name, _, value = parameter.strip().partition("=")
        if name.lower() == "charset" and value.strip('"').lower() not in ("utf-8", "utf8"):
            raise Problem(415, "the header content-type", f"the charset {value} is not taken", "send UTF-8")
    return found


def form(query: Query) -> Format:
    return Format(query.choice("format", [*Format], Format.JSON))


def wish(query: Query, settings: GatewaySettings, ended: Callable[[], bool]) -> Wish:
    return Wish(
        query.number("max", min(_USUAL_RECORDS, settings.records), settings.records, 1),
        query.number("max_bytes", min(_USUAL_BYTES, settings.answer), settings.answer, 1),
        query.seconds("wait", settings.wait) or 0.0,
        ended,
    )


@asynccontextmanager
async def attended(request: Request, closing: threading.Event) -> AsyncIterator[Callable[[], bool]]:
    """A function that tells whether nobody waits for the answer any more, or the gateway closes."""
    left = threading.Event()

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        left.set()

    watching = asyncio.create_task(watch())
    try:
        yield lambda: left.is_set() or closing.is_set()
    finally:
        left.set()
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching

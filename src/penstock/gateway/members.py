"""`/groups`: how they stand, and members of them that only ask."""

import asyncio
import re
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar
from urllib.parse import quote

import orjson
from starlette.requests import Request
from starlette.responses import Response

from penstock.core.errors import Unavailable
from penstock.core.text import did_you_mean
from penstock.gateway.gateway import LEAVING, Gateway
from penstock.gateway.giving import places, shown
from penstock.gateway.groups import described
from penstock.gateway.requests import AMOUNT, JSON, attended, form, media_type, wish
from penstock.gateway.seats import Polled, Seat
from penstock.gateway.taking import Format
from penstock.web.problems import Problem
from penstock.web.query import Query
from penstock.web.responses import reply

Answer = TypeVar("Answer")

_GROUP = re.compile(r"[A-Za-z0-9._-]{1,200}")
_MOST_CHANNELS = 100


class GroupRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway, self._settings = gateway, gateway.settings
        self._patience = gateway.settings.acknowledged.total_seconds()

    async def all(self, request: Request) -> Response:
        Query(request)
        return reply({"groups": await self._gateway.ask(self._gateway.channels.groups)})

    async def one(self, request: Request) -> Response:
        Query(request)
        name, channels = _group(request), self._gateway.channels
        if name not in (names := await self._gateway.ask(channels.groups)):
            way_out = did_you_mean(name, names, "GET /groups tells which there are")
            raise Problem(404, f"group {name}", "there is none of that name", way_out)
        return reply(await self._gateway.ask(lambda: described(channels, channels.group(name))))

    async def join(self, request: Request) -> Response:
        Query(request)
        group = _group(request)
        media_type(request, JSON)
        async with self._gateway.bodies.body(request) as body:
            names, beginning = _wanted(body)
        for name in names:
            await self._gateway.known(name)
        seat = await self._gateway.groups.join(group, names, beginning)
        address = _address(seat)
        answer = {"member": seat.id, "url": address, "silence_seconds": self._settings.silence.total_seconds()}
        return reply(answer, 201, {"location": address})

    async def poll(self, request: Request) -> Response:
        query = Query(request, AMOUNT)
        seat, told = self._gateway.groups.seat(_group(request), request.path_params["member"]), form(query)
        async with attended(request, self._gateway.closing) as ended:
            wanted = wish(query, self._settings, ended)
            polled = await _answered(seat.poll(wanted), wanted.wait + self._patience, seat.group)
        return await self._gateway.ask(partial(_polled, polled, told, seat))

    async def commit(self, request: Request) -> Response:
        query = Query(request, ("answer",))
        seat = self._gateway.groups.seat(_group(request), request.path_params["member"])
        if "answer" not in query:
            raise Problem(400, "?answer", "it is missing", 'each answer tells its own address, as "commit"')
        await _answered(seat.commit(query.number("answer", 0)), self._patience, seat.group)
        return Response(status_code=204)

    async def leave(self, request: Request) -> Response:
        Query(request)
        seat = self._gateway.groups.seat(_group(request), request.path_params["member"])
        await self._gateway.groups.leave(seat, LEAVING)
        return Response(status_code=204)


async def _answered(answer: "Future[Answer]", patience: float, group: str) -> Answer:
    try:
        async with asyncio.timeout(patience):
            return await asyncio.wrap_future(answer)
    except TimeoutError:
        raise Unavailable(f"group {group}", "it does not answer in time") from None


def _address(seat: Seat) -> str:
    return f"/groups/{quote(seat.group, safe='')}/members/{seat.id}"


def _group(request: Request) -> str:
    name: str = request.path_params["group"]
    if not _GROUP.fullmatch(name):
        why = "a group has a name of 1 to 200 letters, digits, dots, dashes and underscores"
        raise Problem(400, "the name of the group", why)
    return name


def _wanted(body: bytes) -> tuple[Sequence[str], bool]:
    """The channels, and whether they are read from the beginning where the group has committed nothing."""
    try:
        told = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Problem(400, f"the body, line {error.lineno}, column {error.colno}", error.msg) from error
    if not isinstance(told, dict):
        raise Problem(400, "the body", "it is no object", 'write {"channels": ["NAME"], "from": "beginning"}')
    for field in told:
        if field not in ("channels", "from"):
            raise Problem(400, "the body", f'"{field}" is not a field', 'the fields are "channels" and "from"')
    channels, start = told.get("channels"), told.get("from", "beginning")
    if not isinstance(channels, list) or not all(isinstance(name, str) for name in channels):
        raise Problem(400, "channels", "these are no names of channels", 'write {"channels": ["NAME"]}')
    if not 0 < len(set(channels)) == len(channels) <= _MOST_CHANNELS:
        raise Problem(400, "channels", f"a member reads 1 to {_MOST_CHANNELS} channels, each named once")
    if start not in ("beginning", "end"):
        raise Problem(400, "from", "it is none of the choices", 'write "beginning" or "end"')
    return channels, start == "beginning"


def _polled(polled: Polled, told: Format, seat: Seat) -> Response:
    return reply(
        {
            "records": [shown(entry, told) for entry in polled.entries],
            "held": [
                {"channel": channel, "partition": partition, "next": offset}
                for (channel, partition), offset in sorted(polled.held.items())
            ],
            "given": places(polled.given),
            "lost": places(polled.lost),
            "commit": f"{_address(seat)}/commit?answer={polled.number}",
        }
    )

"""`/groups`: their state, and consumer sessions."""

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

from penstock.audit.lag import GroupLag
from penstock.core.contracts import Channels, Group
from penstock.core.errors import Unavailable
from penstock.core.text import did_you_mean
from penstock.gateway.decode import Format
from penstock.gateway.encode import entry_json, partitions
from penstock.gateway.fetch import READ_PARAMETERS, read_limits, watch_disconnect
from penstock.gateway.gateway import LEAVING, Gateway
from penstock.gateway.sessions import ConsumerSession, Polled
from penstock.web.bodies import media_type
from penstock.web.query import Query
from penstock.web.responses import Problem, reply

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
            fix = did_you_mean(name, names, "GET /groups tells which there are")
            raise Problem(404, f"group {name}", "there is none of that name", fix)
        return reply(await self._gateway.ask(lambda: _described(channels, channels.group(name))))

    async def join(self, request: Request) -> Response:
        Query(request)
        group = _group(request)
        media_type(request, "application/json")
        async with self._gateway.bodies.body(request) as body:
            names, beginning = _wanted(body)
        for name in names:
            await self._gateway.known(name)
        session = await self._gateway.sessions.join(group, names, beginning)
        address = _address(session)
        answer = {"member": session.id, "url": address, "silence_seconds": self._settings.silence.total_seconds()}
        return reply(answer, 201, {"location": address})

    async def poll(self, request: Request) -> Response:
        query = Query(request, READ_PARAMETERS)
        session, told = self._gateway.sessions.session(_group(request), request.path_params["member"]), Format.of(query)
        async with watch_disconnect(request, self._gateway.closing) as ended:
            limits = read_limits(query, self._settings, ended)
            polled = await _answered(session.poll(limits), limits.wait + self._patience, session.group)
        return await self._gateway.ask(partial(_polled, polled, told, session))

    async def commit(self, request: Request) -> Response:
        query = Query(request, ("answer",))
        session = self._gateway.sessions.session(_group(request), request.path_params["member"])
        if "answer" not in query:
            raise Problem(400, "?answer", "it is missing", 'each answer tells its own address, as "commit"')
        await _answered(session.commit(query.number("answer", 0)), self._patience, session.group)
        return Response(status_code=204)

    async def leave(self, request: Request) -> Response:
        Query(request)
        session = self._gateway.sessions.session(_group(request), request.path_params["member"])
        await self._gateway.sessions.leave(session, LEAVING)
        return Response(status_code=204)


async def _answered(answer: "Future[Answer]", patience: float, group: str) -> Answer:
    try:
        async with asyncio.timeout(patience):
            return await asyncio.wrap_future(answer)
    except TimeoutError:
        raise Unavailable(f"group {group}", "it does not answer in time") from None


def _address(session: ConsumerSession) -> str:
    return f"/groups/{quote(session.group, safe='')}/members/{session.id}"


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


def _polled(polled: Polled, told: Format, session: ConsumerSession) -> Response:
    return reply(
        {
            "records": [entry_json(entry, told) for entry in polled.entries],
            "held": [
                {"channel": channel, "partition": partition, "next": offset}
                for (channel, partition), offset in sorted(polled.held.items())
            ],
            "given": partitions(polled.given),
            "lost": partitions(polled.lost),
            "commit": f"{_address(session)}/commit?answer={polled.number}",
        }
    )


def _described(channels: Channels, group: Group) -> dict[str, object]:
    """The state of a group, with its lag in each partition."""
    standing = GroupLag.of(channels, group)
    return {
        "name": group.name,
        "state": group.state,
        "members": [{"member": name, "partitions": partitions(own)} for name, own in sorted(group.members.items())],
        "partitions": [row.to_json() for row in standing.rows],
        "lag": standing.lag,
    }

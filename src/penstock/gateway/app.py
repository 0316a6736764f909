"""The web app: channels and groups over HTTP."""

import asyncio
import re
from collections.abc import Callable, Sequence
from functools import partial
from urllib.parse import quote, urlencode

import orjson
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from penstock.audit.lag import GroupLag
from penstock.core.contracts import Channels, Group, Offsets
from penstock.core.record import Record
from penstock.gateway.fetch import READ_PARAMETERS, ReadLimits, Start, fetch, no_partition, watch_disconnect
from penstock.gateway.gateway import Gateway, not_found
from penstock.gateway.records import Format, entry_json, partitions_json
from penstock.gateway.sessions import ConsumerSession
from penstock.web.requests import OriginCheck, OriginCheckMiddleware, Query, media_type
from penstock.web.responses import Problem, SecurityHeaders, handlers, reply
from penstock.web.server import http_config, listen, run_server, url_of, wait_first

OVERVIEW = """\
Penstock's gateway: channels over HTTP. Errors are JSON: error, place, fix.

GET    /channels                          list the channels
GET    /channels/NAME                     describe a channel: partitions and settings
POST   /channels/NAME/records             append records; the response comes when they are acknowledged
GET    /channels/NAME/records             read, with ?partition=0&offset=10, ?since=10m, ?from=beginning|end
                                          or ?offsets=0:10,1:7; and &max=100&max_bytes=1000000&wait=10s
GET    /groups                            list the consumer groups
GET    /groups/NAME                       describe a group: members, committed offsets, lag
POST   /groups/NAME/members               join a group: {"channels": ["NAME"], "from": "beginning"}
GET    /groups/NAME/members/ID/records    read the assigned partitions, with ?max=100&max_bytes=1000000&wait=10s
POST   /groups/NAME/members/ID/commit     with ?answer=N: commit the records of that response; until then, they are
                                          delivered again
DELETE /groups/NAME/members/ID            leave the group

A body of records is JSON, {"records": [{"key": "k", "value": 1, "headers": {"name": "text"}}]}, or a record on each
line (application/x-ndjson), or one raw value (application/octet-stream, with ?key=k). ?format=json|text|base64 is
the encoding of keys and values, in requests and responses.
"""

JSON, LINES, RAW = "application/json", "application/x-ndjson", "application/octet-stream"
_STARTS = ("offset", "since", "offsets", "from")
_X_KEY = "the header x-key"
_INLINE = 1 << 16
"""A larger body is decoded in a thread, so that other requests do not wait for it."""
_GROUP = re.compile(r"[A-Za-z0-9._-]{1,200}")
_MAX_CHANNELS = 100


def build(gateway: Gateway) -> Starlette:
    """The app. Run it within `gateway.running()`."""
    channels, groups = ChannelRoutes(gateway), GroupRoutes(gateway)
    return Starlette(
        routes=[
            Route("/", _overview),
            Route("/channels", channels.all),
            Route("/channels/{name}", channels.one),
            Route("/channels/{name}/records", channels.records, methods=["GET", "POST"]),
            Route("/groups", groups.all),
            Route("/groups/{group}", groups.one),
            Route("/groups/{group}/members", groups.join, methods=["POST"]),
            Route("/groups/{group}/members/{member}", groups.leave, methods=["DELETE"]),
            Route("/groups/{group}/members/{member}/records", groups.poll),
            Route("/groups/{group}/members/{member}/commit", groups.commit, methods=["POST"]),
        ],
        middleware=[Middleware(SecurityHeaders)],
        exception_handlers=handlers("the gateway", "GET / lists all addresses"),
    )


async def _overview(_: Request) -> Response:
    return PlainTextResponse(OVERVIEW)


async def serve(
    gateway: Gateway, host: str, port: int, stop: asyncio.Event, ready: Callable[[str], None] | None = None
) -> None:
    """Serve until `stop`. Port 0 takes a free one; `ready` is called with the address.

    At the end, long polls are answered, records in flight are acknowledged, and consumer sessions leave their groups.
    """
    settings, idle_timeout = gateway.settings, gateway.settings.idle_timeout.total_seconds()
    with listen("the gateway's", host, port, idle_timeout) as listener:
        app = OriginCheckMiddleware(build(gateway), OriginCheck(listener, host))
        shutdown_timeout = round(settings.send_timeout.total_seconds()) + 2
        config = http_config(app, settings.connections, idle_timeout, shutdown_timeout)
        async with gateway.running(), run_server(config, listener) as serving:
            try:
                if ready and not serving.done():
                    ready(url_of(host, listener))
                await wait_first(serving, stop.wait())
            finally:
                gateway.closing.set()


# --- channels ---------------------------------------------------------------------------------------------------------


class ChannelRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway, self._settings = gateway, gateway.settings

    async def all(self, request: Request) -> Response:
        Query(request)
        promise = self._gateway.channels.promise
        names = await self._gateway.names()
        promised = {"durable": promise.durable, "replay": promise.replay, "description": promise.description}
        return reply({"channels": names, "promise": promised})

    async def one(self, request: Request) -> Response:
        Query(request)
        name = request.path_params["name"]
        await self._gateway.require(name)
        return reply(await self._gateway.calls.run(partial(_channel_json, self._gateway.channels, name)))

    async def records(self, request: Request) -> Response:
        return await (self._append(request) if request.method == "POST" else self._read(request))

    async def _append(self, request: Request) -> Response:
        query, name = Query(request, ("format", "key")), request.path_params["name"]
        kind, form = media_type(request, JSON, LINES, RAW), Format.of(query)
        await self._gateway.require_writable(name)
        async with self._gateway.bodies.body(request) as body:
            decode = partial(self._decode, request, query, kind, form, body)
            records = decode() if len(body) <= _INLINE else await self._gateway.calls.run(decode)
            await self._gateway.send(name, records)
        return reply({"channel": name, "acknowledged": len(records)})

    def _decode(self, request: Request, query: Query, kind: str, form: Format, body: bytes) -> list[Record]:
        decoder = self._gateway.decoder
        if kind == RAW:
            return decoder.raw(body, *_raw_key(request, query), form)
        for where, present in (("?key", "key" in query), (_X_KEY, "x-key" in request.headers)):
            if present:
                raise Problem(400, where, f"it is only valid with {RAW}", 'give each record its own "key"')
        return decoder.document(body, form) if kind == JSON else decoder.lines(body, form)

    async def _read(self, request: Request) -> Response:
        query, name = Query(request, ("partition", *_STARTS, *READ_PARAMETERS)), request.path_params["name"]
        form = Format.of(query)
        async with watch_disconnect(request, self._gateway.closing) as ended:
            limits = ReadLimits.of(query, self._settings, ended)
            await self._gateway.require_readable(name)
            start = self._start(query, name)
            read = partial(_read, self._gateway.channels, name, start, limits, form, query)
            return await (self._gateway.polls.run(read) if limits.wait else self._gateway.calls.run(read))

    def _start(self, query: Query, name: str) -> Start:
        if len(options := [start for start in _STARTS if start in query]) > 1:
            raise Problem(400, f"?{options[1]}", f"it contradicts ?{options[0]}", "give one of them")
        if "offsets" in query:
            if "partition" in query:
                raise Problem(400, "?partition", "it contradicts ?offsets", "give one of them")
            offsets = query.offsets("offsets")
            return lambda _: offsets
        only = query.number("partition", 0) if "partition" in query else None
        if "offset" in query:
            offset = query.number("offset", 0)
            return lambda bounds: {_single_partition(only, len(bounds)): offset}
        if "since" in query:
            time = self._gateway.clock.now() - round((query.seconds("since") or 0) * 1e6)
            since = partial(self._gateway.channels.since, name, max(0, time))
            return lambda _: _restricted(since(), only, name)
        edge = 1 if query.choice("from", ("beginning", "end"), "beginning") == "end" else 0
        return lambda bounds: _restricted({partition: both[edge] for partition, both in bounds.items()}, only, name)


def _raw_key(request: Request, query: Query) -> tuple[str, str | None]:
    """Where the key of a raw body is, and the key."""
    by_query, by_header = query.text("key"), request.headers.get("x-key")
    if by_header is None:
        return "?key", by_query
    if by_query is not None:
        raise Problem(400, "?key", "the header x-key is there as well", "give one of them")
    try:
        # Starlette decodes headers as Latin-1.
        return _X_KEY, by_header.encode("latin-1").decode()
    except UnicodeDecodeError as error:
        raise Problem(400, _X_KEY, "it is not UTF-8", "send it as base64, with ?format=base64") from error


def _single_partition(only: int | None, count: int) -> int:
    if only is None and count > 1:
        raise Problem(400, "?offset", f"the channel has {count} partitions", "name one: ?partition=0&offset=…")
    return only or 0


def _restricted(offsets: Offsets, only: int | None, name: str) -> Offsets:
    if only is not None and only not in offsets:
        raise no_partition(name, only, len(offsets))
    return offsets if only is None else {only: offsets[only]}


def _read(channels: Channels, name: str, start: Start, limits: ReadLimits, form: Format, query: Query) -> Response:
    entries, next_offsets = fetch(channels, name, start, limits)
    offsets = sorted(next_offsets.items())
    same = {parameter: text for parameter in READ_PARAMETERS if (text := query.text(parameter)) is not None}
    following = {"offsets": ",".join(f"{partition}:{offset}" for partition, offset in offsets), **same}
    return reply(
        {
            "records": [entry_json(entry, form) for entry in entries],
            "offsets": {str(partition): offset for partition, offset in offsets},
            "next": f"/channels/{quote(name, safe='')}/records?{urlencode(following, safe=':,')}",
        }
    )


def _channel_json(channels: Channels, name: str) -> dict[str, object]:
    topic, bounds = channels.topic(name), channels.bounds(name)
    return {
        "name": topic.name,
        "partitions": [
            {"partition": partition, "first": first, "end": end} for partition, (first, end) in sorted(bounds.items())
        ],
        "replicas": topic.replicas,
        "compacted": topic.compacted,
        "retention_seconds": None if topic.retention is None else topic.retention.total_seconds(),
        "settings": dict(topic.config),
    }


# --- groups -----------------------------------------------------------------------------------------------------------


class GroupRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway, self._settings = gateway, gateway.settings
        self._timeout = gateway.settings.send_timeout.total_seconds()

    async def all(self, request: Request) -> Response:
        Query(request)
        return reply({"groups": await self._gateway.calls.run(self._gateway.channels.groups)})

    async def one(self, request: Request) -> Response:
        Query(request)
        name, channels = _group_name(request), self._gateway.channels
        if name not in (names := await self._gateway.calls.run(channels.groups)):
            raise not_found("group", name, names, "GET /groups lists all groups")
        return reply(await self._gateway.calls.run(lambda: _group_json(channels, channels.group(name))))

    async def join(self, request: Request) -> Response:
        Query(request)
        group = _group_name(request)
        media_type(request, JSON)
        async with self._gateway.bodies.body(request) as body:
            names, beginning = _subscription(body)
        for name in names:
            await self._gateway.require(name)
        session = await self._gateway.sessions.join(group, names, beginning)
        timeout = self._settings.session_timeout.total_seconds()
        document = {"member": session.id, "url": session.url, "session_timeout_seconds": timeout}
        return reply(document, 201, {"location": session.url})

    async def poll(self, request: Request) -> Response:
        query = Query(request, READ_PARAMETERS)
        session, form = self._session(request), Format.of(query)
        async with watch_disconnect(request, self._gateway.closing) as ended:
            limits = ReadLimits.of(query, self._settings, ended)
            return await session.poll(limits, form, limits.wait + self._timeout)

    async def commit(self, request: Request) -> Response:
        query = Query(request, ("answer",))
        session = self._session(request)
        if "answer" not in query:
            raise Problem(400, "?answer", "it is missing", 'use the address "commit" of a response')
        await session.commit(query.number("answer", 0), self._timeout)
        return Response(status_code=204)

    async def leave(self, request: Request) -> Response:
        Query(request)
        await self._gateway.sessions.leave(self._session(request))
        return Response(status_code=204)

    def _session(self, request: Request) -> ConsumerSession:
        return self._gateway.sessions.session(_group_name(request), request.path_params["member"])


def _group_name(request: Request) -> str:
    name: str = request.path_params["group"]
    if not _GROUP.fullmatch(name):
        why = "it must have 1 to 200 letters, digits, dots, dashes and underscores"
        raise Problem(400, "the name of the group", why)
    return name


def _subscription(body: bytes) -> tuple[Sequence[str], bool]:
    """The channels, and whether to read from the beginning where the group has no committed offset."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Problem(400, f"the body, line {error.lineno}, column {error.colno}", error.msg) from error
    if not isinstance(document, dict):
        raise Problem(400, "the body", "it is not an object", 'write {"channels": ["NAME"], "from": "beginning"}')
    for field in document:
        if field not in ("channels", "from"):
            raise Problem(400, "the body", f'"{field}" is not a field', 'the fields are "channels" and "from"')
    channels, start = document.get("channels"), document.get("from", "beginning")
    if not isinstance(channels, list) or not all(isinstance(name, str) for name in channels):
        raise Problem(400, "channels", "it is not a list of names", 'write {"channels": ["NAME"]}')
    if not 0 < len(set(channels)) == len(channels) <= _MAX_CHANNELS:
        raise Problem(400, "channels", f"a member reads 1 to {_MAX_CHANNELS} channels, each named once")
    if start not in ("beginning", "end"):
        raise Problem(400, "from", "it is not a valid start", 'write "beginning" or "end"')
    return channels, start == "beginning"


def _group_json(channels: Channels, group: Group) -> dict[str, object]:
    """The state of a group, with its lag in each partition."""
    lag = GroupLag.of(channels, group)
    return {
        "name": group.name,
        "state": group.state,
        "members": [
            {"member": name, "partitions": partitions_json(assigned)}
            for name, assigned in sorted(group.members.items())
        ],
        "partitions": [row.to_json() for row in lag.rows],
        "lag": lag.lag,
    }

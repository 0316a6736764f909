"""`/channels`: what there is, into it, and out of it by positions."""

from collections.abc import Callable, Mapping
from functools import partial
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import Response

from penstock.core.contracts import Channels, Offsets
from penstock.core.record import Record
from penstock.gateway.decode import Format
from penstock.gateway.encode import entry_json
from penstock.gateway.fetch import (
    READ_PARAMETERS,
    Fetched,
    ReadLimits,
    fetch,
    read_limits,
    watch_disconnect,
)
from penstock.gateway.gateway import Gateway
from penstock.web.bodies import media_type
from penstock.web.query import Query
from penstock.web.responses import Problem, reply

JSON, LINES, RAW = "application/json", "application/x-ndjson", "application/octet-stream"
_STARTS = ("offset", "since", "positions", "from")
_X_KEY = "the header x-key"
_INLINE = 1 << 16
"""A longer body is read in a thread: others need not wait for it."""

Bounds = Mapping[int, tuple[int, int]]


class ChannelRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway, self._settings = gateway, gateway.settings

    async def all(self, request: Request) -> Response:
        Query(request)
        promise = self._gateway.channels.promise
        names = await self._gateway.names()
        return reply(
            {
                "channels": names,
                "promise": {"durable": promise.durable, "replay": promise.replay, "words": promise.description},
            }
        )

    async def one(self, request: Request) -> Response:
        Query(request)
        name = request.path_params["name"]
        await self._gateway.known(name)
        return reply(await self._gateway.ask(partial(_described, self._gateway.channels, name)))

    async def records(self, request: Request) -> Response:
        return await (self._send(request) if request.method == "POST" else self._fetch(request))

    # --- in

    async def _send(self, request: Request) -> Response:
        query, name = Query(request, ("format", "key")), request.path_params["name"]
        kind, told = media_type(request, JSON, LINES, RAW), Format.of(query)
        await self._gateway.writable(name)
        async with self._gateway.bodies.body(request) as body:
            read = self._reading(request, query, kind, told, body)
            records = read() if len(body) <= _INLINE else await self._gateway.ask(read)
            await self._gateway.send(name, records)
        return reply({"channel": name, "acknowledged": len(records)})

    def _reading(
        self, request: Request, query: Query, kind: str, told: Format, body: bytes
    ) -> Callable[[], list[Record]]:
        decoder = self._gateway.decoder
        if kind == RAW:
            return lambda: decoder.raw(body, *_key(request, query), told)
        for place, there in (("?key", "key" in query), (_X_KEY, "x-key" in request.headers)):
            if there:
                raise Problem(400, place, f"it goes with {RAW}", 'elsewhere each record has its own "key"')
        return partial(decoder.document if kind == JSON else decoder.lines, body, told)

    # --- out

    async def _fetch(self, request: Request) -> Response:
        query, name = Query(request, ("partition", *_STARTS, *READ_PARAMETERS)), request.path_params["name"]
        told = Format.of(query)
        async with watch_disconnect(request, self._gateway.closing) as ended:
            limits = read_limits(query, self._settings, ended)
            await self._gateway.readable(name)
            start = self._start(query, name)
            answer = partial(_answer, self._gateway.channels, name, start, limits, told, query)
            return await (self._gateway.wait(answer) if limits.wait else self._gateway.ask(answer))

    def _start(self, query: Query, name: str) -> Callable[[Bounds], Offsets]:
        if len(given := [start for start in _STARTS if start in query]) > 1:
            raise Problem(400, f"?{given[1]}", f"it contradicts ?{given[0]}", "give one of them")
        if "positions" in query:
            if "partition" in query:
                raise Problem(400, "?partition", "it contradicts ?positions", "give one of them")
            positions = query.offsets("positions")
            return lambda _: positions
        only = query.number("partition", 0) if "partition" in query else None
        if "offset" in query:
            offset = query.number("offset", 0)
            return lambda bounds: {_partition(only, bounds): offset}
        if "since" in query:
            time = self._gateway.clock.now() - round((query.seconds("since") or 0) * 1e6)
            since = partial(self._gateway.channels.since, name, max(0, time))
            return lambda _: _chosen(since(), only, name)
        edge = 1 if query.choice("from", ("beginning", "end"), "beginning") == "end" else 0
        return lambda bounds: _chosen({partition: both[edge] for partition, both in bounds.items()}, only, name)


def _key(request: Request, query: Query) -> tuple[str, str | None]:
    """Where the key of a raw body stands, and the key."""
    by_query, by_header = query.text("key"), request.headers.get("x-key")
    if by_header is None:
        return "?key", by_query
    if by_query is not None:
        raise Problem(400, "?key", "there is a header x-key as well", "give one of them")
    try:
        # The bytes of a header come as if they were Latin-1.
        return _X_KEY, by_header.encode("latin-1").decode()
    except UnicodeDecodeError as error:
        raise Problem(400, _X_KEY, "it is not UTF-8", "send it as base64, with ?format=base64") from error


def _partition(only: int | None, bounds: Bounds) -> int:
    if only is None and len(bounds) > 1:
        raise Problem(400, "?offset", f"there are {len(bounds)} partitions", "say which: ?partition=0&offset=…")
    return only or 0


def _chosen(positions: Offsets, only: int | None, name: str) -> Offsets:
    if only is not None and only not in positions:
        raise Problem(404, f"channel {name}", f"it has no partition {only}", f"there are 0 to {len(positions) - 1}")
    return positions if only is None else {only: positions[only]}


def _answer(
    channels: Channels, name: str, start: Callable[[Bounds], Offsets], limits: ReadLimits, told: Format, query: Query
) -> Response:
    fetched = fetch(channels, name, start, limits)
    return reply(
        {
            "records": [entry_json(entry, told) for entry in fetched.entries],
            "positions": {str(partition): offset for partition, offset in sorted(fetched.positions.items())},
            "next": _next(name, fetched, query),
        }
    )


def _next(name: str, fetched: Fetched, query: Query) -> str:
    """The address to go on with."""
    positions = ",".join(f"{partition}:{offset}" for partition, offset in sorted(fetched.positions.items()))
    same = {parameter: text for parameter in READ_PARAMETERS if (text := query.text(parameter)) is not None}
    return f"/channels/{quote(name, safe='')}/records?{urlencode({'positions': positions, **same}, safe=':,')}"


def _described(channels: Channels, name: str) -> dict[str, object]:
    topic, bounds = channels.topic(name), channels.bounds(name)
    return {
        "name": topic.name,
        "partitions": [
            {"partition": partition, "first": first, "end": end} for partition, (first, end) in sorted(bounds.items())
        ],
        "replicas": topic.replicas,
        "compacted": topic.compacted,
        "keep_seconds": None if topic.retention is None else topic.retention.total_seconds(),
        "settings": dict(topic.config),
    }

"""The public feeds of examples/feeds, against servers that speak as they do."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

import orjson
import pytest
import uvicorn
from examples.feeds.bluesky import bluesky
from examples.feeds.coinbase import Coinbase, timestamp
from examples.feeds.wikimedia import wikimedia
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tests.collect.waiting import until
from websockets.asyncio.server import ServerConnection, serve

from penstock.channels.memory import MemoryChannels
from penstock.core.contracts import Arrival, Entry, Guarantee, ResumeState, Source
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.record import Origin, OutageInterval
from penstock.testing.sources import Running, SourceContract


@asynccontextmanager
async def serving(*routes: Route) -> AsyncIterator[str]:
    """An HTTP server; its address without the scheme."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(Starlette(routes=list(routes)), log_level="error", timeout_graceful_shutdown=0)
        server = uvicorn.Server(config)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started)
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await asyncio.gather(running, return_exceptions=True)


@asynccontextmanager
async def attending(handle: Any) -> AsyncIterator[str]:
    """A WebSocket server, which attends to a client until that is gone; its address without the scheme."""

    async def attend(client: ServerConnection) -> None:
        tasks = [asyncio.ensure_future(one) for one in (handle(client), client.wait_closed())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async with serve(attend, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@dataclass
class Outside:
    """What all of them have in common for the contract: they keep what they have, and can be cut.

    Who tells no place hears all of it. That is for the contract: the true ones begin with what happens then.
    """

    kept: list[bytes] = field(default_factory=list)
    cuts: int = 0
    source: Source = field(init=False)

    async def add_records(self, payloads: Sequence[bytes]) -> None:
        self.kept += payloads

    async def disconnect(self) -> None:
        self.cuts += 1

    def acknowledged(self) -> None:
        return None

    async def new(self, sent: int, cuts: int) -> Sequence[bytes] | None:
        """What there is beyond the first; None once the connection is cut."""
        while self.cuts == cuts:
            if some := self.kept[sent:]:
                return some
            await asyncio.sleep(0.005)
        return None


# --- wikimedia: the id of an event is a list of places in topics, and is told back


DATACENTERS = ("eqiad", "codfw")


@dataclass
class Wikimedia(Outside):
    """Two topics in turn; an id tells how far both are."""

    asked: list[list[dict[str, Any]] | None] = field(default_factory=list)

    def payloads(self, count: int) -> list[bytes]:
        return [orjson.dumps({"title": f"Página {n}", "meta": {"offset": n}}) for n in range(1, count + 1)]

    def id_of(self, index: int) -> str:
        """Of an event: how many each topic has given, up to and with it."""
        locations = [
            {"topic": f"{name}.mediawiki.recentchange", "partition": 0, "offset": (index + 2 - turn) // 2 - 1}
            for turn, name in enumerate(DATACENTERS)
        ]
        return orjson.dumps(locations).decode()

    async def stream(self, request: Request) -> Response:
        told = request.headers.get("last-event-id")
        locations = orjson.loads(told) if told else None
        self.asked.append(locations)
        sent = sum(location["offset"] + 1 for location in locations) if locations else 0
        return StreamingResponse(self.events(sent, self.cuts), media_type="text/event-stream")

    async def events(self, sent: int, cuts: int) -> AsyncIterator[bytes]:
        yield b":ok\n\n"
        while (some := await self.new(sent, cuts)) is not None:
            for payload in some:
                yield b"event: message\nid: " + self.id_of(sent).encode() + b"\ndata: " + payload + b"\n\n"
                sent += 1


@pytest.fixture
async def wikis() -> AsyncIterator[Wikimedia]:
    outside = Wikimedia()
    async with serving(Route("/v2/stream/recentchange", outside.stream)) as address:
        url = f"http://{address}/v2/stream/recentchange"
        outside.source = wikimedia("changes", url)
        yield outside
        await outside.disconnect()


class TestWikimedia(SourceContract):
    @pytest.fixture
    def upstream(self, wikis: Wikimedia) -> Wikimedia:
        return wikis


async def test_wikimedia_is_told_the_whole_list_of_places(wikis: Wikimedia) -> None:
    channels = MemoryChannels()
    await wikis.add_records(wikis.payloads(3))
    async with Running(wikis.source, channels) as running:
        await running.until(lambda: running.count() == 3)
        await running.stop()
    await wikis.add_records(wikis.payloads(4)[3:])
    async with Running(wikis.source, channels) as running:
        await running.until(lambda: running.count() == 4)
    assert wikis.asked[0] is None
    assert wikis.asked[-1] == orjson.loads(wikis.id_of(2))


# --- bluesky: a cursor of microseconds, with which the feed begins


@dataclass
class Jetstream(Outside):
    asked: list[dict[str, list[str]]] = field(default_factory=list)

    def payloads(self, count: int) -> list[bytes]:
        return [orjson.dumps({"did": f"did:plc:{n}", "time_us": 1725911162329308 + n}) for n in range(count)]

    async def attend(self, client: ServerConnection) -> None:
        assert client.request is not None
        asked = parse_qs(urlsplit(client.request.path).query)
        self.asked.append(asked)
        cursor = int(asked.get("cursor", ["0"])[0])
        sent, cuts = sum(orjson.loads(one)["time_us"] < cursor for one in self.kept), self.cuts
        while (some := await self.new(sent, cuts)) is not None:
            for one in some:
                await client.send(one.decode())
            sent += len(some)
        client.transport.abort()


@pytest.fixture
async def jetstream() -> AsyncIterator[Jetstream]:
    outside = Jetstream()
    async with attending(outside.attend) as address:
        url = f"ws://{address}/subscribe"
        outside.source = bluesky("app.bsky.feed.post", "app.bsky.graph.*", name="posts", address=url)
        yield outside
        await outside.disconnect()


class TestBluesky(SourceContract):
    @pytest.fixture
    def upstream(self, jetstream: Jetstream) -> Jetstream:
        return jetstream


async def test_bluesky_goes_on_at_its_last_microsecond(jetstream: Jetstream) -> None:
    channels = MemoryChannels()
    await jetstream.add_records(jetstream.payloads(3))
    async with Running(jetstream.source, channels) as running:
        await running.until(lambda: running.count() == 3)
        await running.stop()
    async with Running(jetstream.source, channels) as running:
        await running.until(lambda: running.loop.figures()["duplicates"] == 1)
    wanted = ["app.bsky.feed.post", "app.bsky.graph.*"]
    assert jetstream.asked == [
        {"wantedCollections": wanted},
        {"wantedCollections": wanted, "cursor": ["1725911162329310"]},
    ]


# --- coinbase: trades that are numbered, a socket that gives none again, and a history that does


def trade(number: int, product: str = "BTC-USD") -> bytes:
    return orjson.dumps(
        {
            "type": "match",
            "product_id": product,
            "trade_id": number,
            "side": "sell",
            "size": "5.23512",
            "price": "400.23",
            "time": f"2014-11-07T08:19:{number % 60:02d}.028459Z",
        }
    )


def facts(value: bytes) -> dict[str, Any]:
    document: dict[str, Any] = orjson.loads(value)
    return document


@dataclass
class Exchange(Outside):
    """It says each trade once over its sockets, and the last one at the beginning of each."""

    history: str = ""
    subscribed: list[dict[str, Any]] = field(default_factory=list)
    queries: list[tuple[str, str, str]] = field(default_factory=list)
    left_out: set[int] = field(default_factory=set)
    """Trades that the sockets do not say."""
    forgotten: set[int] = field(default_factory=set)
    """Trades that the history does not have."""
    answer: Response | None = None

    def payloads(self, count: int) -> list[bytes]:
        return [trade(number) for number in range(501, 501 + count)]

    async def attend(self, client: ServerConnection) -> None:
        said = orjson.loads(await client.recv())
        self.subscribed.append(said)
        sent, cuts = len(self.kept), self.cuts
        await client.send(orjson.dumps({"type": "subscriptions", "channels": said["channels"]}).decode())
        # The contract wants the first connection to hear all from the beginning.
        if len(self.subscribed) == 1:
            sent = 0
        elif self.kept:
            await client.send(self.kept[-1].decode())
        while (some := await self.new(sent, cuts)) is not None:
            for one in some:
                if facts(one)["trade_id"] not in self.left_out:
                    await client.send(one.decode())
            sent += len(some)
        client.transport.abort()

    async def trades(self, request: Request) -> Response:
        product, asked = request.path_params["product"], request.query_params
        self.queries.append((product, asked["after"], asked["limit"]))
        if self.answer is not None:
            return self.answer
        found = [
            {name: told for name, told in one.items() if name not in ("type", "product_id")}
            for one in map(facts, reversed(self.kept))
            if one["product_id"] == product
            and one["trade_id"] < int(asked["after"])
            and one["trade_id"] not in self.forgotten
        ]
        return JSONResponse(found[: int(asked["limit"])])


@pytest.fixture
async def exchange() -> AsyncIterator[Exchange]:
    outside = Exchange()
    routes = Route("/products/{product}/trades", outside.trades)
    async with serving(routes) as history, attending(outside.attend) as address:
        outside.history = f"http://{history}"
        outside.source = Coinbase(["BTC-USD", "ETH-USD"], "trades", f"ws://{address}", outside.history)
        yield outside
        await outside.disconnect()


class TestCoinbase(SourceContract):
    @pytest.fixture
    def upstream(self, exchange: Exchange) -> Exchange:
        return exchange

    async def test_a_record_that_was_not_stored_is_repeated(self, upstream: Any) -> None:
        """Before the first trade that is safe there is no place behind which more could be asked for."""


def numbers(entries: Sequence[Entry]) -> list[tuple[str, int, int]]:
    origins = [Origin.read(entry.headers) for entry in entries]
    return sorted((one.sender, one.epoch, one.seq) for one in origins if one is not None)


def notices(channels: MemoryChannels) -> list[dict[str, Any]]:
    found = [facts(entry.value or b"") for entry in channels.entries("heartbeats")]
    return [one for one in found if one["kind"] == "blind"]


async def heard(exchange: Exchange, channels: MemoryChannels, count: int, source: Source | None = None) -> None:
    """Let a collector run until the channel holds so many."""
    async with Running(source or exchange.source, channels) as running:
        await running.until(lambda: running.count() >= count)
        await running.stop()


async def test_trades_keep_the_exchanges_count_from_the_first_that_was_heard(exchange: Exchange) -> None:
    channels = MemoryChannels()
    await exchange.add_records([trade(501), trade(7, "ETH-USD"), trade(502)])
    await heard(exchange, channels, 3)
    assert numbers(channels.entries("into")) == [
        ("coinbase:BTC-USD", 501, 1),
        ("coinbase:BTC-USD", 501, 2),
        ("coinbase:ETH-USD", 7, 1),
    ]
    assert exchange.subscribed == [
        {"type": "subscribe", "product_ids": ["BTC-USD", "ETH-USD"], "channels": ["matches"]}
    ]


async def test_what_was_missed_between_two_lives_is_asked_of_the_history_page_by_page(exchange: Exchange) -> None:
    channels = MemoryChannels()
    await exchange.add_records([trade(501)])
    await heard(exchange, channels, 1)
    await exchange.add_records([trade(number) for number in range(502, 2_901)])
    await heard(exchange, channels, 2_400)
    assert [entry.value for entry in channels.entries("into")] == exchange.kept
    assert exchange.queries == [
        ("BTC-USD", "1502", "1000"),
        ("BTC-USD", "2502", "1000"),
        ("BTC-USD", "2900", "398"),
    ]
    assert notices(channels) == []


async def test_a_trade_that_the_socket_left_out_is_asked_for(exchange: Exchange) -> None:
    channels = MemoryChannels()
    exchange.left_out = {502, 503}
    await exchange.add_records(exchange.payloads(5))
    await heard(exchange, channels, 5)
    assert [entry.value for entry in channels.entries("into")] == exchange.kept
    assert exchange.queries == [("BTC-USD", "504", "2")]


async def test_what_is_beyond_the_limit_is_blind_and_another_epoch_begins(exchange: Exchange) -> None:
    channels = MemoryChannels()
    assert isinstance(exchange.source, Coinbase)
    source = Coinbase(["BTC-USD"], "trades", exchange.source.address, exchange.history, fill=3)
    await exchange.add_records([trade(501)])
    await heard(exchange, channels, 1, source)
    await exchange.add_records([trade(number) for number in range(502, 511)])
    await heard(exchange, channels, 5, source)
    assert numbers(channels.entries("into")) == [
        ("coinbase:BTC-USD", 501, 1),
        *(("coinbase:BTC-USD", 507, seq) for seq in range(1, 5)),
    ]
    (blind,) = notices(channels)
    assert (blind["since"], blind["until"]) == (
        timestamp(facts(trade(501))["time"]),
        timestamp(facts(trade(507))["time"]),
    )
    # What could not be had is not asked for again.
    exchange.queries.clear()
    await exchange.add_records([trade(511), trade(512)])
    await heard(exchange, channels, 7, source)
    assert exchange.queries == [("BTC-USD", "512", "1")]


async def test_what_the_history_does_not_have_is_blind(exchange: Exchange) -> None:
    channels = MemoryChannels()
    await exchange.add_records([trade(501)])
    await heard(exchange, channels, 1)
    exchange.forgotten = {503, 504}
    await exchange.add_records([trade(number) for number in range(502, 507)])
    await heard(exchange, channels, 4)
    assert [one[1:] for one in numbers(channels.entries("into"))] == [(501, 1), (501, 2), (505, 1), (505, 2)]
    assert len(notices(channels)) == 1


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Response("slow down", 429, {"retry-after": "2"}), r"it answers 429; trying again in 2 s"),
        (Response("nothing here", 404), "it answers 404"),
        (Response("broken", 500), "it answers 500"),
        (Response("<html>"), "not JSON"),
        (Response("{}"), "no list of trades"),
        (Response(b"[" + b" " * (5 << 20) + b"]"), "too large"),
    ],
)
async def test_a_history_that_does_not_answer_well_is_unavailable(
    exchange: Exchange, answer: Response, said: str
) -> None:
    await exchange.add_records([trade(510)])
    exchange.answer = answer
    with pytest.raises(Unavailable, match=said):
        async with exchange.source.open(ResumeState({"coinbase:BTC-USD": (501, 1)})) as intakes:
            await anext(aiter(intakes))


async def test_trades_of_the_history_that_are_none_are_passed_over_and_reported_as_unknown(exchange: Exchange) -> None:
    await exchange.add_records([trade(505)])
    exchange.answer = JSONResponse([None, 5, {}, {"trade_id": "502"}, {"trade_id": True}, {"trade_id": 9}])
    async with exchange.source.open(ResumeState({"coinbase:BTC-USD": (501, 1)})) as intakes:
        found = [one for _ in range(2) for one in (await anext(aiter(intakes))).arrivals]
    assert isinstance(found[0], OutageInterval)
    assert [one.value for one in found if isinstance(one, Arrival)] == [trade(505)]


BAD = [
    (b"not JSON", "it is not JSON"),
    (b"\xff\xfe", "it is not JSON"),
    (b"[" * 100_000, "it is not JSON"),
    (b"[]", "no message of the exchange"),
    (b"5", "no message of the exchange"),
    (b'{"type":5}', "no message of the exchange"),
    (b'{"type":"match"}', "without a product or a number"),
    (b'{"type":"match","product_id":"DOGE-USD","trade_id":5}', "not asked for"),
    (b'{"type":"match","product_id":"BTC-USD","trade_id":"5"}', "no number of a trade"),
    (b'{"type":"match","product_id":"BTC-USD","trade_id":-5}', "no number of a trade"),
    (b'{"type":"match","product_id":"BTC-USD","trade_id":true}', "no number of a trade"),
    (b'{"type":"match","product_id":"BTC-USD","trade_id":9223372036854775808}', "no number of a trade"),
]


async def test_each_message_that_is_no_trade_has_a_receipt() -> None:
    async def handle(client: ServerConnection) -> None:
        await client.recv()
        for message, _ in BAD:
            await client.send(message)
        await client.send(trade(501))
        await client.wait_closed()

    channels = MemoryChannels()
    async with attending(handle) as address:
        source = Coinbase(["BTC-USD"], "trades", f"ws://{address}")
        async with Running(source, channels) as running:
            await running.until(lambda: running.count() == 1)
    dead = [dict(entry.headers)["reason"].decode() for entry in channels.entries("into.dead")]
    assert len(dead) == len(BAD)
    assert all(said in reason for (_, said), reason in zip(BAD, dead, strict=True))


async def test_what_the_exchange_complains_of_is_shown() -> None:
    async def handle(client: ServerConnection) -> None:
        await client.recv()
        complaint = {"type": "error", "message": "Failed to subscribe", "reason": "NO-USD is not\n a valid product"}
        await client.send(orjson.dumps(complaint).decode())
        await client.wait_closed()

    async with attending(handle) as address:
        source = Coinbase(["NO-USD"], "trades", f"ws://{address}")
        with pytest.raises(Unavailable, match="Failed to subscribe: NO-USD is not a valid product"):
            async with source.open(ResumeState()) as intakes:
                await anext(aiter(intakes))


@pytest.mark.parametrize("told", [None, "", "yesterday", 5, "2014-11-07T08:19:27", "9999-99-99T00:00:00Z"])
def test_a_time_that_cannot_be_read_is_now(told: object) -> None:
    assert timestamp(told) > timestamp("2020-01-01T00:00:00Z")


# --- what they can be told


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"products": []}, 'say products = \\["BTC-USD"\\]'),
        ({"products": ["BTC-USD", "BTC-USD"]}, "each once"),
        ({"products": ["../BTC"]}, 'write it like "BTC-USD"'),
        ({"products": "BTC-USD"}, 'write it like "BTC-USD"'),
        ({"fill": -1}, "fill"),
        ({"history": "ftp://x"}, "not an HTTP address"),
        ({"address": "https://x"}, "write wss://host"),
    ],
)
def test_what_coinbase_cannot_be_told_is_misconfigured(options: dict[str, Any], said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        Coinbase(**{"products": ["BTC-USD"], **options})


def test_a_collection_that_is_none_is_misconfigured() -> None:
    with pytest.raises(Misconfigured, match=r"app\.bsky\.feed\.post"):
        bluesky("a&b=c")


def test_without_collections_all_are_heard() -> None:
    assert bluesky().url == "wss://jetstream2.us-east.bsky.network/subscribe"


@pytest.mark.parametrize("source", [wikimedia(), bluesky(), Coinbase(["BTC-USD"])], ids=lambda source: source.name)
def test_the_feeds_promise_exactly_once(source: Source) -> None:
    assert source.guarantee is Guarantee.EXACTLY_ONCE

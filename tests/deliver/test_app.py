"""The web app on a real port: one address in three ways, and clients that misbehave."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path

import httpx
import psutil
import pytest
from starlette.applications import Starlette
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from penstock.deliver.app import build
from penstock.deliver.delivery import DeliverSettings, FeedSpec
from penstock.deliver.site import ChartSpec
from penstock.testing import MemoryChannels

Served = Callable[..., AbstractContextManager[str]]
CHART = ChartSpec("chart", "by_country", "A chart", "What it shows.", {"mark": "bar", "data": {"name": "rows"}})
GRAPH = {"nodes": [{"id": "page", "kind": "page", "label": "page", "note": ""}], "edges": []}


@pytest.fixture
def channels() -> MemoryChannels:
    return MemoryChannels(partitions=2)


@pytest.fixture
def app(channels: MemoryChannels, vega_cache: Path) -> Starlette:
    return make(channels, vega_cache)


def make(channels: MemoryChannels, cache: Path, **settings: object) -> Starlette:
    feeds = [FeedSpec("by_country", "by_country", "id"), FeedSpec("wide", "wide", "id")]
    set_to = DeliverSettings.model_validate(settings)
    return build(channels, feeds, [CHART], GRAPH, "status", "A <title>", settings=set_to, cache=cache)


@pytest.fixture
def address(app: Starlette, served: Served) -> Iterator[str]:
    with served(app) as at:
        yield at


def put(channels: MemoryChannels, key: str, n: object, version: int | None = None, channel: str = "by_country") -> None:
    headers = [("time", b"%d" % (time.time_ns() // 1_000))]
    if version is not None:
        headers.append(("version", b"%d" % version))
    value = None if n is None else json.dumps({"n": n}).encode()
    channels.append(channel, value, json.dumps([key]).encode(), headers)


@asynccontextmanager
async def following(address: str, after: str | None = None, **more: object) -> AsyncIterator[ClientConnection]:
    url = address.replace("http", "ws", 1) + "/feeds/by_country" + (f"?after={after}" if after else "")
    async with connect(url, max_size=None, **more) as client:  # type: ignore[arg-type] # options as they come
        yield client


async def next_message(client: ClientConnection) -> tuple[str, dict[str, object], str]:
    """(kind, rows by key, position) of the next message."""
    message = json.loads(await client.recv())
    return (
        message["kind"],
        {row["key"][0]: row["row"] and row["row"]["n"] for row in message["rows"]},
        message["position"],
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 # what is waited for has no event
            await asyncio.sleep(0.01)


def _open(port: int) -> int:
    """Connections to a port of this machine, as the side sees it that listens there."""
    return sum(
        one.status == psutil.CONN_ESTABLISHED and one.laddr[1] == port
        for one in psutil.Process().net_connections("tcp")
    )


# --- three ways -------------------------------------------------------------------------------------------------------


async def test_a_websocket_gets_a_snapshot_and_then_changes(channels: MemoryChannels, address: str) -> None:
    put(channels, "nl", 1)
    async with following(address) as client:
        kind, rows, _ = await next_message(client)
        assert kind == "snapshot"
        while rows != {"nl": 1}:
            _, rows, _ = await next_message(client)
        put(channels, "nl", 2)
        assert (await next_message(client))[:2] == ("changes", {"nl": 2})
        put(channels, "nl", None)
        assert (await next_message(client))[:2] == ("changes", {"nl": None})


async def test_a_reconnected_websocket_gets_missed_changes(channels: MemoryChannels, address: str) -> None:
    async with following(address) as client:
        put(channels, "nl", 1)
        rows: dict[str, object] = {}
        while rows != {"nl": 1}:
            _, rows, position = await next_message(client)
    put(channels, "nl", 2)
    async with following(address, position) as client:
        kind, rows, position = await next_message(client)
        assert kind == "changes"
        while rows != {"nl": 2}:
            kind, rows, position = await next_message(client)
            assert kind == "changes"
    async with following(address, "forged") as client:
        assert (await next_message(client))[:2] == ("snapshot", {"nl": 2})


async def test_a_feed_as_server_sent_events(channels: MemoryChannels, address: str) -> None:
    put(channels, "nl", 1)
    accept = {"accept": "text/event-stream"}

    async def events(headers: dict[str, str]) -> AsyncIterator[tuple[str, dict[str, object]]]:
        async with (
            httpx.AsyncClient() as client,
            client.stream("GET", f"{address}/feeds/by_country", headers=headers) as answer,
        ):
            assert answer.headers["content-type"].startswith("text/event-stream")
            token = ""
            async for line in answer.aiter_lines():
                name, _, value = line.partition(": ")
                if name == "id":
                    token = value
                elif name == "data":
                    message = json.loads(value)
                    assert message["position"] == token
                    yield token, message

    stream = events(accept)
    async for position, message in stream:
        if message["rows"]:
            token = position
            break
    await stream.aclose()  # type: ignore[attr-defined] # an async generator
    put(channels, "de", 5)
    stream = events({**accept, "last-event-id": token})
    async for _, message in stream:
        assert message["kind"] == "changes"
        if message["rows"]:
            assert [row["key"] for row in message["rows"]] == [["de"]]  # type: ignore[attr-defined] # rows are a list
            break
    await stream.aclose()  # type: ignore[attr-defined] # an async generator


async def test_a_feed_as_json(channels: MemoryChannels, address: str) -> None:
    put(channels, "nl", 1)
    async with httpx.AsyncClient(base_url=address) as client:
        message = (await client.get("/feeds/by_country")).json()
        while not message["rows"]:
            message = (await client.get("/feeds/by_country")).json()
        assert message["kind"] == "snapshot"
        again = (await client.get("/feeds/by_country", params={"after": message["position"]})).json()
        assert (again["kind"], again["rows"]) == ("changes", [])


async def test_the_first_response_has_all_earlier_rows(
    channels: MemoryChannels, app: Starlette, served: Served
) -> None:
    for n in range(12_000):
        put(channels, f"k{n}", n)
    with served(app) as address:
        async with httpx.AsyncClient() as client:
            message = (await client.get(f"{address}/feeds/by_country", timeout=30)).json()
            assert len(message["rows"]) == 12_000
            nodes = (await client.get(f"{address}/status")).json()["nodes"]
            assert nodes["feed:by_country"]["delivery"] is None


async def test_a_position_survives_a_restart(channels: MemoryChannels, vega_cache: Path, served: Served) -> None:
    put(channels, "nl", 1)
    with served(make(channels, vega_cache)) as address:
        async with following(address) as client:
            _, rows, position = await next_message(client)
            assert rows == {"nl": 1}
    put(channels, "nl", 2)
    with served(make(channels, vega_cache)) as address:
        async with following(address, position) as client:
            assert (await next_message(client))[:2] == ("changes", {"nl": 2})


async def test_clients_get_a_reason_when_the_server_stops(app: Starlette, served: Served) -> None:
    with served(app) as address:
        client = await connect(address.replace("http", "ws") + "/feeds/by_country")
        await client.recv()
    with pytest.raises(ConnectionClosed) as closed:
        await client.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1001


# --- rejected clients ------------------------------------------------------------------------------------------------


async def test_an_unknown_feed_is_answered_with_the_known_ones(address: str) -> None:
    async with httpx.AsyncClient(base_url=address) as client:
        for accept in ("application/json", "text/event-stream"):
            answer = await client.get("/feeds/../nowhere%00", headers={"accept": accept})
            assert answer.status_code == 404
            answer = await client.get("/feeds/nowhere", headers={"accept": accept})
            assert answer.status_code == 404
            assert answer.json()["feeds"] == ["by_country", "wide"]
    with pytest.raises(InvalidStatus) as refused:
        await connect(address.replace("http", "ws") + "/feeds/nowhere")
    assert refused.value.response.status_code == 404


async def test_a_cross_site_client_is_rejected(channels: MemoryChannels, vega_cache: Path, served: Served) -> None:
    with served(make(channels, vega_cache, origins="https://friend.example")) as address:
        for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "http://[bad"):
            with pytest.raises(InvalidStatus) as refused:
                async with following(address, origin=origin):
                    pass
            assert refused.value.response.status_code == 403
        for accepted in (address, "https://friend.example", None):
            async with following(address, origin=accepted) as client:
                await client.recv()


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"GET /status HTTP/1.1\r\nHost: localhost\r\n",
        b"GET /feeds/by_country HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n",
        b"GET /status HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nx",
        b"GET /status HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nx",
    ],
    ids=["nothing", "head", "handshake", "body", "chunk"],
)
async def test_an_incomplete_request_is_closed_after_the_timeout(
    channels: MemoryChannels, vega_cache: Path, served: Served, begun: bytes
) -> None:
    """Neither silent, nor with a byte now and then. Clients that follow a feed stay connected."""
    with served(make(channels, vega_cache, idle_timeout="1 second")) as address:
        port = int(address.rpartition(":")[2])
        async with following(address) as client, asyncio.timeout(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(begun)
            ended = asyncio.create_task(reader.read())
            with suppress(ConnectionError):
                while not ended.done():
                    writer.write(b"x" if begun else b"")
                    await asyncio.wait([ended], timeout=0.3)
            writer.close()
            put(channels, "nl", 1)
            rows: dict[str, object] = {}
            while rows != {"nl": 1}:
                _, rows, _ = await next_message(client)


async def test_connections_are_limited(channels: MemoryChannels, vega_cache: Path, served: Served) -> None:
    with served(make(channels, vega_cache, connections=2)) as address:
        port = int(address.rpartition(":")[2])
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        try:
            async with httpx.AsyncClient(base_url=address) as client:
                await until(lambda: _open(port) >= 3)
                assert (await client.get("/status")).status_code == 503
        finally:
            for _, writer in held:
                writer.close()
        async with httpx.AsyncClient(base_url=address) as client:
            await until(lambda: _open(port) <= 2)
            assert (await client.get("/status")).status_code == 200


async def test_an_unknown_host_name_is_rejected(channels: MemoryChannels, vega_cache: Path, served: Served) -> None:
    with served(make(channels, vega_cache, origins="https://friend.example")) as address:
        async with httpx.AsyncClient(base_url=address) as client:
            for host, status in (("localhost", 200), ("friend.example", 200), ("evil.example", 403)):
                assert (await client.get("/status", headers={"host": host})).status_code == status
        # To a browser, a name that was pointed at us is the page's own site.
        evil = address.replace("127.0.0.1", "evil.example")
        port = int(address.rpartition(":")[2])
        with pytest.raises(InvalidStatus) as refused:
            async with following(evil, origin=evil, host="127.0.0.1", port=port):
                pass
        assert refused.value.response.status_code == 403


async def test_clients_beyond_the_limit_get_503(channels: MemoryChannels, vega_cache: Path, served: Served) -> None:
    with served(make(channels, vega_cache, clients=1)) as address:
        async with following(address) as first:
            await first.recv()
            with pytest.raises(InvalidStatus) as refused:
                async with following(address):
                    pass
            assert refused.value.response.status_code == 503
            assert refused.value.response.headers["retry-after"] == "1"
            async with httpx.AsyncClient(base_url=address) as client:
                answer = await client.get("/feeds/by_country", headers={"accept": "text/event-stream"})
                assert answer.status_code == 503


# --- clients that misbehave -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("x" * 4_097, 1009),
        (b"\x00" * 4_097, 1009),
        ("not JSON", 1008),
        ("", 1008),
        (b"\xff\xfe", 1008),
        ("[" * 4_000, 1008),
        ("null", 1008),
        ('{"hello": 1}', 1008),
        ('{"ping": "x"}', 1008),
        ('{"ping": true}', 1008),
        ('{"ping": 1e400}', 1008),
        ('{"latency": 5}', 1008),
        ('{"latency": [1, "x"]}', 1008),
        ('{"latency": [NaN]}', 1008),
        ('{"latency": [true]}', 1008),
    ],
)
async def test_an_invalid_message_closes_the_connection(address: str, message: str | bytes, code: int) -> None:
    async with following(address) as client:
        await client.recv()
        await client.send(message)
        with pytest.raises(ConnectionClosed) as closed:
            await client.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == code


async def test_a_flood_closes_the_connection(address: str) -> None:
    async with following(address) as client:
        await client.recv()
        for _ in range(100):
            await client.send('{"latency": []}')
        with pytest.raises(ConnectionClosed) as closed:
            await client.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1008


@pytest.mark.parametrize(
    "asking",
    [
        b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
        b"Accept: text/event-stream\r\n\r\n",
    ],
    ids=["WebSocket", "server-sent events"],
)
async def test_a_client_that_never_reads_is_dropped(
    channels: MemoryChannels, vega_cache: Path, served: Served, asking: bytes
) -> None:
    app = make(channels, vega_cache, idle_timeout=timedelta(seconds=1))
    with served(app) as address:
        port = int(address.rpartition(":")[2])
        asleep = socket.socket()
        asleep.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        asleep.connect(("127.0.0.1", port))
        asleep.sendall(b"GET /feeds/wide HTTP/1.1\r\nHost: localhost\r\n" + asking)
        live_feed = app.state.delivery.feeds["wide"]
        await until(lambda: live_feed.clients == 1)
        async with following(address) as client:
            await client.recv()
            slowest, number = 0.0, 0
            async with asyncio.timeout(30):
                while live_feed.clients:
                    put(channels, f"k{number % 8}", "x" * 500_000, channel="wide")
                    number += 1
                    started = time.monotonic()
                    put(channels, "nl", number)
                    while (await next_message(client))[1] != {"nl": number}:
                        pass
                    slowest = max(slowest, time.monotonic() - started)
        assert slowest < 1
        # Gone from the kernel too, with all that waited to be read.
        own = asleep.getsockname()[1]
        await until(
            lambda: (
                not any(
                    peer.status == psutil.CONN_ESTABLISHED and peer.raddr and peer.raddr.port == own
                    for peer in psutil.Process().net_connections("tcp")
                )
            )
        )
        asleep.close()


# --- latency ----------------------------------------------------------------------------------------------------------


async def test_latency_is_measured_in_the_delivery_and_by_browsers(
    channels: MemoryChannels, app: Starlette, served: Served
) -> None:
    put(channels, "nl", 1)
    with served(app) as address:
        delivery = app.state.delivery
        async with following(address) as client:
            await client.recv()
            put(channels, "nl", 2)
            await client.recv()
            await client.send('{"latency": [12.5, 13, -1]}')
            await client.send('{"ping": 77.5}')
            pong = json.loads(await client.recv())
            assert pong["pong"] == 77.5
            assert abs(pong["now"] - time.time_ns() // 1_000) < 5_000_000
        node = delivery.figures()["feed:by_country"]
        assert node["delivery"]["count"] == 1
        assert node["browser"]["count"] == 3
        assert node["browser"]["max"] == 13
        assert delivery.figures()["page"]["browser"]["count"] == 3


# --- the rest ---------------------------------------------------------------------------------------------------------


async def test_the_status_has_the_last_report_of_every_process(channels: MemoryChannels, address: str) -> None:
    message = {"process": "audit", "at": 1, "nodes": {"channel:rsvps": {"rate": 5}}, "balance": {"whole": True}}
    channels.append("status", b"{}", b"audit")
    channels.append("status", json.dumps(message).encode(), b"audit")
    channels.append("status", b"not JSON", b"collect")
    async with httpx.AsyncClient(base_url=address) as client, asyncio.timeout(10):
        while "collect" not in (status := (await client.get("/status")).json())["processes"]:
            pass
    assert status["balance"] == {"whole": True}
    assert status["processes"]["audit"] == message
    assert status["nodes"]["channel:rsvps"] == {"rate": 5}
    assert status["nodes"]["page"]["state"] == "serving"


async def test_the_page_has_its_files_and_security_headers(address: str) -> None:
    async with httpx.AsyncClient(base_url=address) as client:
        page = await client.get("/")
        assert "A &lt;title&gt;" in page.text
        assert "unsafe" not in page.headers["content-security-policy"]
        assert page.headers["x-content-type-options"] == "nosniff"
        for path in ("/page.js", "/page.css", "/graph.js", "/icon.svg", "/vega.js"):
            part = await client.get(path, timeout=60)
            assert part.status_code == 200
            again = await client.get(path, headers={"if-none-match": part.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert (await client.get("/charts")).json()[0]["name"] == "chart"
        assert (await client.get("/graph")).json() == GRAPH
        while (health := (await client.get("/healthz")).json())["ready"] is False:
            assert health["trouble"] is None
        assert health == {"ready": True, "trouble": None}
        nothing = await client.get("/nothing")
        assert (nothing.status_code, list(nothing.json())) == (404, ["error"])

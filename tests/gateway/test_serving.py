"""The gateway on a real port: over Kafka, with clients that go away, and at its end."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import httpx
import pytest
from tests.gateway.conftest import until

from penstock.channels.kafka import Kafka
from penstock.core.contracts import ChannelPartition, Channels, Entry, Member, Offsets, RebalanceListener, Sender, Topic
from penstock.core.errors import Misconfigured
from penstock.core.record import Record
from penstock.core.runs import Runs
from penstock.gateway.app import serve
from penstock.gateway.gateway import Gateway
from penstock.gateway.settings import GatewaySettings
from penstock.testing import MemoryChannels

Fresh = Callable[[str], str]


@asynccontextmanager
async def serving(channels: Channels, **settings: object) -> AsyncIterator[tuple[httpx.AsyncClient, asyncio.Event]]:
    """A client of a gateway on a real port, and the event that ends it."""
    stop, address = asyncio.Event(), asyncio.get_running_loop().create_future()
    gateway = Gateway(channels, GatewaySettings(**settings))
    running = asyncio.create_task(serve(gateway, "127.0.0.1", 0, stop, address.set_result))
    try:
        await asyncio.wait([address, running], return_when=asyncio.FIRST_COMPLETED)
        async with httpx.AsyncClient(base_url=address.result(), timeout=30, trust_env=False) as client:
            yield client, stop
    finally:
        stop.set()
        async with asyncio.timeout(20):
            await running


@asynccontextmanager
async def served(channels: Channels, **settings: object) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(channels, **settings) as (client, _):
        yield client


async def join(client: httpx.AsyncClient, group: str, channel: str) -> str:
    answer = await client.post(f"/groups/{group}/members", json={"channels": [channel]})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["url"])


async def poll(client: httpx.AsyncClient, url: str, wait: str = "1s") -> dict[str, Any]:
    answer = await client.get(f"{url}/records?wait={wait}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_records_pass_through_kafka_over_http(kafka: Kafka, fresh: Fresh) -> None:
    channel = fresh("http")
    kafka.ensure([Topic(channel, partitions=4)])
    async with served(kafka) as client:
        records, polled = f"/channels/{channel}/records", f"/channels/{channel}/records?from=end&wait=30s"
        polling = asyncio.create_task(client.get(polled))
        sent = 0
        while not polling.done():
            answer = await client.post(records, json={"records": [{"key": f"k{n}", "value": n} for n in range(20)]})
            assert answer.json() == {"channel": channel, "acknowledged": 20}
            sent += 20
        assert polling.result().json()["records"], "a long poll is answered as soon as there is something"

        url, numbers, values = records, Runs(), []
        while found := (answer := (await client.get(url)).json())["records"]:
            values += [record["value"] for record in found]
            for record in found:
                assert numbers.add(record["seq"]) == 1
            url = answer["next"]
        assert list(numbers) == [(1, sent)]
        assert sorted(values) == sorted(list(range(20)) * (sent // 20))
        assert (await client.get(f"{records}?partition=0&offset=99999999")).status_code == 416


async def test_the_partitions_of_a_killed_client_are_dealt_again_by_kafka(kafka: Kafka, fresh: Fresh) -> None:
    channel, group = fresh("dealt"), fresh("group")
    kafka.ensure([Topic(channel, partitions=4)])
    async with served(kafka, session_timeout="2 seconds") as client:
        body = {"records": [{"key": f"k{n}", "value": n} for n in range(100)]}
        assert (await client.post(f"/channels/{channel}/records", json=body)).status_code == 200
        one, other = await join(client, group, channel), await join(client, group, channel)
        done: list[int] = []

        async def turn(url: str) -> dict[str, Any]:
            answer = await poll(client, url, "200ms")
            if (await client.post(answer["commit"])).status_code == 204:
                done.extend(record["value"] for record in answer["records"])
            return answer

        async with asyncio.timeout(60):
            while True:
                answers = await asyncio.gather(turn(one), turn(other))
                if [len(answer["held"]) for answer in answers] == [2, 2] and len(set(done)) == 100:
                    break
            # From here on, nothing is heard of the other.
            while len((await turn(one))["held"]) < 4:
                pass
        assert (await client.get(f"{other}/records")).status_code == 410
        told = (await client.get(f"/groups/{group}")).json()
        assert (len(told["members"]), len(told["partitions"]), told["lag"]) == (1, 4, 0)
    assert not kafka.group(group).members


async def test_a_commit_covers_what_was_given_and_no_more(kafka: Kafka, fresh: Fresh) -> None:
    """Between an answer and its commit the member beats; what Kafka would give meanwhile is not taken for read."""
    channel, group = fresh("given"), fresh("group")
    kafka.ensure([Topic(channel)])
    beating = Beating(kafka.servers)
    async with served(beating) as client:
        body = {"records": [{"value": n} for n in range(10)]}
        assert (await client.post(f"/channels/{channel}/records", json=body)).status_code == 200
        url = await join(client, group, channel)
        given: list[int] = []
        async with asyncio.timeout(60):
            while len(given) < 10:
                answer = (await client.get(f"{url}/records?max=2&wait=1s")).json()
                given += [record["value"] for record in answer["records"]]
                if len(given) < 5:
                    await beaten(beating, 2)
                assert (await client.post(answer["commit"])).status_code == 204
                committed = (await client.get(f"/groups/{group}")).json()["partitions"]
                assert [one["committed"] for one in committed] in ([len(given)], [None], [])
    assert given == list(range(10))


class Beating(Kafka):
    """Kafka, and how often members have beaten without reading."""

    beats = 0

    @contextmanager
    def join(  # type: ignore[override]  # its member has the shape of the one that it wraps
        self, group: str, channels: Sequence[str], listener: RebalanceListener, *, beginning: bool = True
    ) -> Iterator[Member]:
        with super().join(group, channels, listener, beginning=beginning) as member:
            yield BeatingMember(self, member)


async def beaten(channels: Beating, times: int) -> None:
    enough = channels.beats + times
    await until(lambda: channels.beats >= enough)


class BeatingMember:
    def __init__(self, channels: Beating, member: Member) -> None:
        self._channels, self._member = channels, member

    def read(self, most: int, wait: float) -> Sequence[Entry]:
        found = self._member.read(most, wait)
        self._channels.beats += not most
        return found

    def held(self) -> Mapping[ChannelPartition, int]:
        return self._member.held()

    def commit(self) -> None:
        self._member.commit()


async def test_a_commit_does_not_cover_an_answer_that_its_client_never_got() -> None:
    channels = Watched(None)
    channels.ensure([Topic("one")])
    async with served(channels) as client:
        url = await join(client, "g", "one")
        first = await poll(client, url, "0s")
        _, writer = await _connected(client)
        writer.write(f"GET {url}/records?wait=60s HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        channels.asked = False
        await until(lambda: channels.asked)
        writer.close()  # It has given up, and whatever comes now it never hears of.
        for number in range(3):
            channels.append("one", b"%d" % number)
        async with asyncio.timeout(20):
            while "another request" in (answer := await client.post(first["commit"])).text:
                pass
        assert (answer.status_code, "not the last one" in answer.json()["error"]) == (409, True)
        again = await poll(client, url, "5s")
        assert [record["value"] for record in again["records"]] == [0, 1, 2]
        assert (await client.post(again["commit"])).status_code == 204
        assert (await client.get("/groups/g")).json()["partitions"][0]["committed"] == 3


class Watched(MemoryChannels):
    """Channels that tell how many readers are open, and whether a member was asked for records."""

    readers = 0
    asked = False

    @contextmanager
    def reader(self, start: Mapping[str, Offsets], only: Collection[ChannelPartition] | None = None) -> Iterator[Any]:
        with super().reader(start, only) as reader:
            self.readers += 1
            try:
                yield reader
            finally:
                self.readers -= 1

    @contextmanager
    def join(  # type: ignore[override]  # its member has the shape of the one that it wraps
        self, group: str, channels: Sequence[str], listener: RebalanceListener, *, beginning: bool = True
    ) -> Iterator[Member]:
        with super().join(group, channels, listener, beginning=beginning) as member:
            yield WatchedMember(self, member)


class WatchedMember:
    def __init__(self, channels: Watched, member: Member) -> None:
        self._channels, self._member = channels, member

    def read(self, most: int, wait: float) -> Sequence[Entry]:
        self._channels.asked = self._channels.asked or most > 0
        return self._member.read(most, wait)

    def held(self) -> Mapping[ChannelPartition, int]:
        return self._member.held()

    def commit(self) -> None:
        self._member.commit()


async def test_a_client_that_goes_away_frees_its_long_poll() -> None:
    channels = Watched(None)
    channels.ensure([Topic("one")])
    async with served(channels, polls=1) as client:
        _, writer = await _connected(client)
        writer.write(b"GET /channels/one/records?wait=60s HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await until(lambda: channels.readers == 1)
        assert (await client.get("/channels/one/records?wait=1ms")).status_code == 503
        writer.close()
        await until(lambda: channels.readers == 0)
        async with asyncio.timeout(10):
            while (await client.get("/channels/one/records?wait=1ms")).status_code != 200:
                pass


async def test_a_client_that_sends_a_byte_at_a_time_hurts_nobody() -> None:
    channels = MemoryChannels(None)
    channels.ensure([Topic("one")])
    async with served(channels, upload="1 second") as client:
        reader, writer = await _connected(client)
        head = b"POST /channels/one/records HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n"
        writer.write(head + b"Content-Length: 100\r\n\r\nab")
        assert (await client.post("/channels/one/records", json={"records": [{"value": 1}]})).status_code == 200
        async with asyncio.timeout(10):
            assert b" 408 " in await reader.readline()
        writer.close()
    assert len(channels.entries("one")) == 1


async def test_what_goes_away_in_the_middle_of_a_body_is_not_sent() -> None:
    channels = MemoryChannels(None)
    channels.ensure([Topic("one")])
    async with served(channels) as client:
        _, writer = await _connected(client)
        head = b"POST /channels/one/records HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\n"
        writer.write(head + b'Content-Length: 100\r\n\r\n{"value": 1}\n')
        await writer.drain()
        writer.close()
        assert (await client.get("/channels")).status_code == 200
    assert not channels.entries("one")


async def test_no_http_at_all_gets_an_answer_and_the_gateway_lives() -> None:
    channels = MemoryChannels(None)
    async with served(channels) as client:
        for said in (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"GET " + b"/" * 100_000,
            b"\r\n\r\nHELO\r\n\r\n",
        ):
            reader, writer = await _connected(client)
            writer.write(said)
            writer.write_eof()
            async with asyncio.timeout(10):
                await reader.read()
            writer.close()
        assert (await client.get("/channels")).status_code == 200


async def test_long_polls_are_answered_and_members_leave_at_the_end() -> None:
    channels = Watched(None)
    channels.ensure([Topic("one")])
    async with serving(channels) as (client, stop):
        fetching = asyncio.create_task(client.get("/channels/one/records?wait=60s"))
        await until(lambda: channels.readers == 1)
        url = await join(client, "g", "one")
        polling = asyncio.create_task(client.get(f"{url}/records?wait=60s"))
        await until(lambda: channels.asked)
        stop.set()
        assert [(await poll).json()["records"] for poll in (fetching, polling)] == [[], []]
    assert not channels.groups()


class Late(MemoryChannels):
    """Channels that acknowledge when they are let."""

    def __init__(self) -> None:
        super().__init__(None)
        self.sending, self.go = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def sender(self) -> AsyncIterator[Any]:
        async with super().sender() as sender:
            yield LateSender(self, sender)


class LateSender:
    def __init__(self, channels: Late, sender: Sender) -> None:
        self._channels, self._sender = channels, sender

    async def send(self, channel: str, records: Sequence[Record]) -> None:
        self._channels.sending.set()
        await self._channels.go.wait()
        await self._sender.send(channel, records)


async def test_what_is_being_sent_is_acknowledged_before_the_end() -> None:
    channels = Late()
    channels.ensure([Topic("one")])
    async with serving(channels) as (client, stop):
        sending = asyncio.create_task(client.post("/channels/one/records", json={"records": [{"value": 1}]}))
        await channels.sending.wait()
        stop.set()
        with suppress(OSError):
            while True:
                (await _connected(client))[1].close()
        channels.go.set()
        assert (await sending).json()["acknowledged"] == 1
    assert len(channels.entries("one")) == 1


async def test_connections_that_ask_for_nothing_are_closed() -> None:
    channels = MemoryChannels(None)
    async with served(channels, connections=3, idle_timeout="1 second") as client:
        silent = [await _connected(client) for _ in range(3)]
        for _, writer in silent[1:]:
            writer.write(b"GET / HTTP/1.1\r\nHost: local")  # And the rest never comes.
        refused = await client.get("/channels")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"] == "too many connections: the limit is 3"
        async with asyncio.timeout(10):
            for reader, writer in silent:
                with suppress(ConnectionError):
                    assert await reader.read() == b""
                writer.close()
        assert (await client.get("/channels")).status_code == 200


async def test_an_upload_that_takes_longer_than_that_arrives() -> None:
    channels = MemoryChannels(None)
    channels.ensure([Topic("one")])
    async with served(channels, idle_timeout="1 second") as client:

        async def slow() -> AsyncIterator[bytes]:
            yield b"begun, "
            reader, writer = await _connected(client)
            assert await reader.read() == b""  # It is closed, as this would be if it asked for nothing.
            writer.close()
            yield b"done"

        headers = {"content-type": "application/octet-stream"}
        assert (await client.post("/channels/one/records", content=slow(), headers=headers)).status_code == 200
    assert [entry.value for entry in channels.entries("one")] == [b"begun, done"]


async def test_who_asks_for_a_name_that_is_not_ours_is_refused() -> None:
    channels = MemoryChannels(None)
    async with served(channels) as client:
        port = client.base_url.port
        for ours in ("127.0.0.1", "localhost", "LOCALHOST", "[::1]", f"localhost:{port}", f"[::1]:{port}"):
            assert (await client.get("/channels", headers={"host": ours})).status_code == 200
        for other in (f"evil.example:{port}", "evil.example", "127.0.0.1.evil.example", ""):
            headers = {"host": other, "origin": f"http://{other}"}
            answer = await client.get("/channels", headers=headers)
            assert (answer.status_code, answer.json()["place"]) == (403, "the header host")


async def test_pages_of_other_sites_may_not_write() -> None:
    channels = MemoryChannels(None)
    channels.ensure([Topic("one")])
    async with served(channels) as client:
        url, headers = "/channels/one/records", {"content-type": "application/octet-stream"}
        answer = await client.post(url, content=b"x", headers={**headers, "origin": "https://elsewhere.example"})
        assert (answer.status_code, answer.json()["place"]) == (403, "the header origin")
        own = str(client.base_url).rstrip("/")
        assert (await client.post(url, content=b"y", headers={**headers, "origin": own})).status_code == 200
    assert [entry.value for entry in channels.entries("one")] == [b"y"]


async def test_an_address_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(Misconfigured, match=f"127.0.0.1:{port}"):
            await serve(Gateway(MemoryChannels()), "127.0.0.1", port, asyncio.Event())


async def _connected(client: httpx.AsyncClient) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(client.base_url.host, client.base_url.port)

import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta

import orjson
import pytest
from websockets.asyncio.server import ServerConnection, serve

from penstock.collect.websocket import END, MOST_MESSAGES, WebSocketSource, read
from penstock.contracts import Arrival, Guarantee
from penstock.errors import Misconfigured, Unavailable
from penstock.record import Blind, Heartbeat, Origin

PLACE = {"sender": "meetup-07", "epoch": 5, "seq": 6, "time": 7}


@asynccontextmanager
async def saying(*messages: bytes | str, then: int | None = None) -> AsyncIterator[tuple[str, list[str]]]:
    """A server that says these messages and closes with the code, or stays; its address, and what it was told."""
    told: list[str] = []

    async def handle(client: ServerConnection) -> None:
        assert client.request is not None
        told.append(client.request.path)
        if "resume" in client.request.path:
            told.append(str(await client.recv()))
        for message in messages:
            await client.send(message)
        if then is None:
            await client.wait_closed()
        else:
            await client.close(then, "so it is")

    async with serve(handle, "127.0.0.1", 0) as server:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/rsvps", told


async def heard(
    source: WebSocketSource, most: int, found: list[Arrival | Heartbeat | Blind] | None = None
) -> list[Arrival | Heartbeat | Blind]:
    """The first arrivals, all if there are fewer before it ends; also in `found`, for when it breaks."""
    found = [] if found is None else found
    async with source.open({}) as intakes:
        async for intake in intakes:
            found += intake.arrivals
            if len(found) >= most:
                break
    return found


def numbered(seq: int) -> bytes:
    return orjson.dumps({"n": seq, "feed": {**PLACE, "seq": seq}})


async def test_messages_arrive_raw_in_order_and_with_their_numbers() -> None:
    async with saying(*(numbered(seq).decode() for seq in range(1, 2_001))) as (url, _):
        found = await heard(WebSocketSource(url, "rsvps"), 2_000)
    assert found == [Arrival(numbered(seq), Origin("meetup-07", 5, seq, 7)) for seq in range(1, 2_001)]


async def test_what_is_there_already_comes_as_one_bounded_intake() -> None:
    async with saying(*(numbered(seq) for seq in range(2_000))) as (url, _):
        sizes = []
        async with WebSocketSource(url, "rsvps").open({}) as intakes:
            async for intake in intakes:
                sizes.append(len(intake.arrivals))
                if sum(sizes) == 2_000:
                    break
    assert max(sizes) <= MOST_MESSAGES
    assert len(sizes) < 1_000


async def test_a_feed_that_ends_ends_the_source() -> None:
    async with saying(numbered(1), '{"end":true}') as (url, _):
        assert len(await heard(WebSocketSource(url, "rsvps"), 100)) == 1


async def test_a_resume_tells_what_is_safe() -> None:
    async with (
        saying('{"end":true}') as (url, told),
        WebSocketSource(f"{url}?a=b", "rsvps", resume=True).open({"meetup-07": (5, 6)}) as intakes,
    ):
        assert [intake async for intake in intakes] == []
    assert told == ["/rsvps?a=b&resume", '{"after":{"meetup-07":[5,6]}}']


async def test_nobody_at_the_address_is_unavailable() -> None:
    async with saying() as (url, _):
        pass
    with pytest.raises(Unavailable, match=r"ws://127\.0\.0\.1"):
        await heard(WebSocketSource(url, "rsvps"), 1)


async def test_a_server_that_never_answers_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"ws://127.0.0.1:{silent.getsockname()[1]}/"
        with pytest.raises(Unavailable):
            await heard(WebSocketSource(url, "rsvps", open_within=timedelta(milliseconds=50)), 1)


async def test_what_came_before_a_close_is_taken_and_the_reason_is_told() -> None:
    found: list[Arrival | Heartbeat | Blind] = []
    async with saying(numbered(1), numbered(2), then=1001) as (url, _):
        with pytest.raises(Unavailable, match=r"1001 \(going away\) so it is"):
            await heard(WebSocketSource(url, "rsvps"), 100, found)
    assert len(found) == 2


async def test_a_message_beyond_the_limit_is_named_as_the_reason() -> None:
    async with saying(b"x" * 100, b"y" * 101) as (url, _):
        found: list[Arrival | Heartbeat | Blind] = []
        with pytest.raises(Unavailable, match="1009"):
            await heard(WebSocketSource(url, "rsvps", max_size=100), 100, found)
    assert found == [Arrival(b"x" * 100)]


async def test_a_peer_that_is_half_open_is_noticed() -> None:
    """It accepted, and then neither speaks nor answers a ping."""

    async def handle(client: ServerConnection) -> None:
        client.transport.pause_reading()
        await client.wait_closed()

    async with serve(handle, "127.0.0.1", 0, ping_interval=None, close_timeout=0.1) as server:
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        quick = timedelta(milliseconds=50)
        with pytest.raises(Unavailable, match="keepalive ping timeout"):
            await heard(WebSocketSource(url, "rsvps", ping_every=quick, pong_within=quick), 1)


BAD = [
    b"",
    b"not JSON",
    b"\xff\xfe\xc0\xaf",
    b'{"feed":"\\ud800"}',
    b'{"n":"\x00"}',
    b"[" * 100_000,
    b'{"n":NaN,"feed":{"sender":"a","epoch":1,"seq":1,"time":1}}',
    b'{"n":1e400}',
    b"[]",
    b"5",
    b"null",
    b'{"feed":5}',
    b'{"feed":[]}',
    b'{"feed":{}}',
    b'{"feed":{"sender":"a","epoch":1,"seq":1}}',
    b'{"feed":{"sender":"a","epoch":1,"seq":-1,"time":1}}',
    b'{"feed":{"sender":"a","epoch":1,"seq":1.0,"time":1}}',
    b'{"feed":{"sender":"a","epoch":1,"seq":"1","time":1}}',
    b'{"feed":{"sender":"a","epoch":1,"seq":true,"time":1}}',
    b'{"feed":{"sender":"a","epoch":1,"seq":9223372036854775808,"time":1}}',
    b'{"feed":{"sender":"a","epoch":-1,"seq":1,"time":1}}',
    b'{"feed":{"sender":"a","epoch":1,"seq":1,"time":-1}}',
    b'{"feed":{"sender":5,"epoch":1,"seq":1,"time":1}}',
    b'{"feed":{"sender":"","epoch":1,"seq":1,"time":1}}',
    b'{"feed":{"sender":"a\\nb","epoch":1,"seq":1,"time":1}}',
    b'{"feed":{"sender":"\\u001b[31m","epoch":1,"seq":1,"time":1}}',
    b'{"feed":{"sender":"' + b"a" * 201 + b'","epoch":1,"seq":1,"time":1}}',
    b'{"heartbeats":5}',
    b'{"heartbeats":[]}',
    b'{"heartbeats":[{"sender":"a"}]}',
    b'{"heartbeat":null}',
    b'{"end":true,"n":1}',
    b'{"end":1}',
    orjson.dumps({str(n): n for n in range(100_000)}),
]


@pytest.mark.parametrize("message", BAD, ids=range(len(BAD)))
def test_whatever_cannot_be_read_arrives_raw_and_without_an_origin(message: bytes) -> None:
    assert tuple(read(message, "feed")) == (Arrival(message),)


async def test_bad_messages_arrive_over_the_wire_too_text_or_binary() -> None:
    texts = [message.decode() for message in BAD if message.isascii() and len(message) < 1_000]
    async with saying(*BAD[:3], *texts, numbered(1)) as (url, _):
        found = await heard(WebSocketSource(url, "rsvps", max_size=1 << 24), len(texts) + 4)
    assert [arrival.value for arrival in found if isinstance(arrival, Arrival)] == [
        *BAD[:3],
        *(text.encode() for text in texts),
        numbered(1),
    ]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (b'{"heartbeat":{"sender":"a","epoch":1,"seq":0,"time":3}}', (Heartbeat("a", 1, 0, 3),)),
        (
            b'{"heartbeats":[{"sender":"a","epoch":1,"seq":2,"time":3},{"sender":"b","epoch":1,"seq":2,"time":3}]}',
            (Heartbeat("a", 1, 2, 3), Heartbeat("b", 1, 2, 3)),
        ),
        (
            b'{"feed":{"sender":"z","epoch":1,"seq":1,"time":1},"feed":{"sender":"a","epoch":0,"seq":0,"time":0}}',
            (
                Arrival(
                    b'{"feed":{"sender":"z","epoch":1,"seq":1,"time":1},"feed":{"sender":"a","epoch":0,"seq":0,"time":0}}',
                    Origin("a", 0, 0, 0),
                ),
            ),
        ),
    ],
)
def test_what_a_feed_says_of_itself_is_read(message: bytes, said: Sequence[Arrival | Heartbeat]) -> None:
    assert tuple(read(message, "feed")) == said


def test_the_end_is_read() -> None:
    assert read(b'{"end":true}', "feed") is END


@pytest.mark.parametrize("message", [b'{"end":true}', numbered(1), b'{"heartbeat":{}}'])
def test_an_outside_without_numbers_says_nothing_of_itself(message: bytes) -> None:
    assert tuple(read(message, None)) == (Arrival(message),)


def test_the_guarantee_follows_from_the_resume() -> None:
    assert WebSocketSource("ws://x", "x", resume=True).guarantee is Guarantee.EXACTLY_ONCE
    assert WebSocketSource("ws://x", "x").guarantee is Guarantee.BEST_EFFORT


def test_a_resume_needs_numbers() -> None:
    with pytest.raises(Misconfigured, match="cannot resume without numbers"):
        WebSocketSource("ws://x", "x", numbered=None, resume=True)


@pytest.mark.parametrize("url", ["http://x/", "nonsense", "ws://a..b/"])
async def test_an_address_that_is_none_is_misconfigured(url: str) -> None:
    with pytest.raises(Misconfigured, match="the source rsvps"):
        await heard(WebSocketSource(url, "rsvps"), 1)

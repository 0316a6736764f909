import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import orjson
import pytest
from tests.collect.outside import followed
from websockets.asyncio.server import ServerConnection, serve

from penstock.channels.memory import MemoryChannels
from penstock.collect.websocket import (
    END,
    MAX_MESSAGES,
    MessageCursors,
    MessageParser,
    WebSocketSource,
    position_of,
    with_parameter,
)
from penstock.core.contracts import Arrival, Guarantee, ResumeState
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.record import Heartbeat, Origin, OutageInterval
from penstock.testing.killing import CrashContract
from penstock.testing.sources import Running, SourceContract

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
    source: WebSocketSource, most: int, found: list[Arrival | Heartbeat | OutageInterval] | None = None
) -> list[Arrival | Heartbeat | OutageInterval]:
    """The first arrivals, all if there are fewer before it ends; also in `found`, for when it breaks."""
    found = [] if found is None else found
    async with source.open(ResumeState()) as intakes:
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
        async with WebSocketSource(url, "rsvps").open(ResumeState()) as intakes:
            async for intake in intakes:
                sizes.append(len(intake.arrivals))
                if sum(sizes) == 2_000:
                    break
    assert max(sizes) <= MAX_MESSAGES
    assert len(sizes) < 1_000


async def test_a_feed_that_ends_ends_the_source() -> None:
    async with saying(numbered(1), '{"end":true}') as (url, _):
        assert len(await heard(WebSocketSource(url, "rsvps"), 100)) == 1


async def test_a_resume_tells_what_is_safe() -> None:
    async with (
        saying('{"end":true}') as (url, told),
        WebSocketSource(f"{url}?a=b", "rsvps", resume=True).open(ResumeState({"meetup-07": (5, 6)})) as intakes,
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
    found: list[Arrival | Heartbeat | OutageInterval] = []
    async with saying(numbered(1), numbered(2), then=1001) as (url, _):
        with pytest.raises(Unavailable, match=r"1001 \(going away\) so it is"):
            await heard(WebSocketSource(url, "rsvps"), 100, found)
    assert len(found) == 2


async def test_a_message_beyond_the_limit_is_named_as_the_reason() -> None:
    async with saying(b"x" * 100, b"y" * 101) as (url, _):
        found: list[Arrival | Heartbeat | OutageInterval] = []
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
    assert tuple(MessageParser("feed")(message)) == (Arrival(message),)


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
    assert tuple(MessageParser("feed")(message)) == said


def test_the_end_is_read() -> None:
    assert MessageParser("feed")(b'{"end":true}') is END


@pytest.mark.parametrize("message", [b'{"end":true}', numbered(1), b'{"heartbeat":{}}'])
def test_an_outside_without_numbers_says_nothing_of_itself(message: bytes) -> None:
    assert tuple(MessageParser(None)(message)) == (Arrival(message),)


def test_the_guarantee_follows_from_the_resume() -> None:
    assert WebSocketSource("ws://x", "x", resume=True).guarantee is Guarantee.EXACTLY_ONCE
    assert WebSocketSource("ws://x", "x", resume=False).guarantee is Guarantee.BEST_EFFORT


def test_without_numbers_there_is_nothing_to_resume_after() -> None:
    assert WebSocketSource("ws://x", "x", numbered=None).guarantee is Guarantee.BEST_EFFORT


@pytest.mark.parametrize("url", ["http://x/", "nonsense", "ws://a..b/"])
async def test_an_address_that_is_none_is_misconfigured(url: str) -> None:
    with pytest.raises(Misconfigured, match="source rsvps"):
        await heard(WebSocketSource(url, "rsvps"), 1)


class Feeding:
    """A feed that keeps all that it gives."""

    def __init__(self, source: WebSocketSource) -> None:
        self.kept: list[bytes] = []
        self.clients: set[ServerConnection] = set()
        self.source = source

    async def add_records(self, payloads: Sequence[bytes]) -> None:
        self.kept += payloads

    async def disconnect(self) -> None:
        for client in self.clients:
            client.transport.abort()

    def acknowledged(self) -> None:
        return None

    async def follow(self, client: ServerConnection, sent: int) -> None:
        self.clients.add(client)
        try:
            await followed(client, self.kept, sent)
        finally:
            self.clients.discard(client)


class Numbered(Feeding):
    """It numbers what it gives, and goes on where it is told."""

    def __init__(self) -> None:
        super().__init__(WebSocketSource("", "rsvps"))

    def payloads(self, count: int) -> list[bytes]:
        return [numbered(seq) for seq in range(1, count + 1)]

    async def attend(self, client: ServerConnection) -> None:
        after = orjson.loads(await client.recv())["after"]
        sent = after.get(PLACE["sender"], (5, 0))[1]
        await self.follow(client, sent)


@pytest.fixture
async def upstream() -> AsyncIterator[Numbered]:
    feed = Numbered()
    async with serve(feed.attend, "127.0.0.1", 0) as server:
        feed.source = WebSocketSource(f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/", "rsvps")
        yield feed


class TestContract(SourceContract):
    pass


class TestKilled(CrashContract):
    pass


# --- feeds that do not number, but can go on at a place


class Placed(Feeding):
    """A feed whose messages tell a place, three of them the same; it begins with all of the place that it is told.

    Like some that are public: asked for a place that it has no longer, it begins with the first that it has.
    """

    def __init__(self) -> None:
        super().__init__(WebSocketSource("ws://nowhere", "posts"))
        self.asked: list[str] = []

    def payloads(self, count: int) -> list[bytes]:
        return [b'{"n":%d,"meta":{"time_us":%d}}' % (n, 1_000 + n // 3) for n in range(1, count + 1)]

    async def attend(self, client: ServerConnection) -> None:
        assert client.request is not None
        (asked,) = parse_qs(urlsplit(client.request.path).query)["cursor"]
        self.asked.append(asked)
        sent = next((at for at, one in enumerate(self.kept) if self.location(one) >= int(asked)), len(self.kept))
        await self.follow(client, sent)

    def location(self, message: bytes) -> int:
        return int(orjson.loads(message)["meta"]["time_us"])


@pytest.fixture
async def placed() -> AsyncIterator[Placed]:
    feed = Placed()
    async with serve(feed.attend, "127.0.0.1", 0) as server:
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/subscribe?cursor=0&all=yes"
        feed.source = WebSocketSource(url, "posts", cursor="meta.time_us")
        yield feed


class TestContractWithPlaces(SourceContract):
    @pytest.fixture
    def upstream(self, placed: Placed) -> Placed:
        return placed


async def test_after_a_crash_it_goes_on_at_the_place_of_the_last_record(placed: Placed) -> None:
    channels, given = MemoryChannels(), placed.payloads(8)
    await placed.add_records(given)
    async with Running(placed.source, channels) as running:
        await running.until(lambda: running.count() == 8)
    async with Running(placed.source, channels) as running:
        await running.until(lambda: running.loop.figures()["duplicates"] == 3)
    assert placed.asked == ["0", "1002"]
    assert [entry.value for entry in channels.entries("into")] == given
    headers = [dict(entry.headers)["cursor"] for entry in channels.entries("into")]
    assert headers[:5] == [b"1000/0", b"1000/1", b"1001/0", b"1001/1", b"1001/2"]


def test_each_message_has_a_cursor_of_its_own_also_those_that_tell_no_place() -> None:
    messages = [b'{"at":5}', b"?", b'{"at":null}', b'{"at":5}', b'{"at":"x/y"}', b"?", b'{"at":{}}', b'{"at":true}']
    found = [_cursor(reading, message) for reading in [MessageParser(None, "at", None, (), ())] for message in messages]
    assert found == ["5/0", "5/0+1", "5/0+2", "5/1", "x/y/0", "x/y/0+1", "x/y/0+2", "true/0"]
    assert [position_of(one) for one in found] == ["5", "5", "5", "5", "x/y", "x/y", "x/y", "true"]


def test_what_comes_again_has_the_same_cursor_as_before() -> None:
    messages = [b'{"at":4}', b'{"at":5}', b'{"at":5}', b"?", b'{"at":6}']
    before = MessageParser(None, "at", None, (), ())
    first = [_cursor(before, message) for message in messages]
    for begin in range(2):
        again = MessageParser(None, "at", first[2], (), ())
        assert [_cursor(again, message) for message in messages[begin:]] == first[begin:]


def _cursor(reading: MessageParser, message: bytes) -> str | None:
    (found,) = reading(message)
    assert isinstance(found, Arrival)
    assert found.value == message
    return found.cursor


@pytest.mark.parametrize("told", ["1e20", "18446744073709551616", '""', "[]", '"' + "x" * 1_001 + '"'])
def test_what_is_no_exact_place_is_none(told: str) -> None:
    assert MessageCursors("at", None).cursor(orjson.loads(f'{{"at":{told}}}')) == "/-1+1"


def test_before_any_place_was_told_there_is_none_to_ask_for() -> None:
    assert position_of("/-1+1") == position_of(None) == ""


@pytest.mark.parametrize("message", BAD, ids=range(len(BAD)))
def test_whatever_tells_no_place_is_taken_all_the_same(message: bytes) -> None:
    (found,) = MessageParser(None, "at", "5/0", (), ())(message)
    assert found == Arrival(message, cursor="5/-1+1")


@pytest.mark.parametrize(
    ("url", "asked"),
    [
        ("ws://x/y", "ws://x/y?since=7%2F8%261"),
        ("ws://x/y?a=b&a=c", "ws://x/y?a=b&a=c&since=7%2F8%261"),
        ("ws://x/y?since=5&a=b", "ws://x/y?a=b&since=7%2F8%261"),
        ("ws://x/y?", "ws://x/y?since=7%2F8%261"),
        ("ws://x/y?sinc%65=5", "ws://x/y?since=7%2F8%261"),
    ],
)
def test_the_place_takes_the_place_of_one_in_the_address(url: str, asked: str) -> None:
    assert with_parameter(url, "since", "7/8&1") == asked


async def test_without_resume_the_feed_is_asked_for_nothing_and_nothing_is_promised() -> None:
    async with saying(b'{"at":5}') as (url, told):
        source = WebSocketSource(url, "posts", cursor="at", resume=False)
        async with source.open(ResumeState(cursor="4/0")) as intakes:
            await anext(aiter(intakes))
    assert told == ["/rsvps"]
    assert source.guarantee is Guarantee.BEST_EFFORT


def test_places_promise_exactly_once_as_far_back_as_the_feed_keeps() -> None:
    source = WebSocketSource("ws://x", "posts", cursor="at")
    assert source.guarantee is Guarantee.EXACTLY_ONCE
    assert "position" in source.description
    assert source.numbered is None


# --- what is said first, and what is no record


async def test_a_feed_is_told_its_subscriptions_and_headers_at_each_connection() -> None:
    told: list[object] = []

    async def handle(client: ServerConnection) -> None:
        assert client.request is not None
        told.append((client.request.headers["Authorization"], await client.recv(), await client.recv()))
        await client.send("x")
        await client.wait_closed()

    async with serve(handle, "127.0.0.1", 0) as server:
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        source = WebSocketSource(url, "x", None, first=["a", "b"], headers={"Authorization": "Bearer secret"})
        for _ in range(2):
            await heard(source, 1)
    assert told == [("Bearer secret", "a", "b")] * 2
    assert "secret" not in repr(source)


@pytest.mark.parametrize(
    ("only", "ignore", "taken"),
    [
        ((), (), "abcde"),
        ("type=match", (), "ade"),
        (("type=match", "type=other"), (), "abde"),
        ((), "type=match", "bcde"),
        ((), ("type=other", "n = 3"), "ade"),
        ("type=match", "deep.er=1", "de"),
    ],
)
def test_what_is_no_record_is_passed_over_and_what_cannot_be_read_never(
    only: str | Sequence[str], ignore: str | Sequence[str], taken: str
) -> None:
    messages = {
        "a": b'{"type":"match","deep":{"er":1}}',
        "b": b'{"type":"other"}',
        "c": b'{"n":3,"type":["match"]}',
        "d": b"not JSON",
        "e": b"[1]",
    }
    source = WebSocketSource("ws://x", "x", None, only=only, ignore=ignore)
    reading = MessageParser(None, None, None, source.only, source.ignore)
    assert "".join(name for name, message in messages.items() if reading(message)) == taken


def test_heartbeats_and_the_end_are_heard_though_they_are_no_match() -> None:
    reading = MessageParser("feed", None, None, ["type=match"], ())
    assert tuple(reading(b'{"heartbeat":{"sender":"a","epoch":1,"seq":0,"time":3}}')) == (Heartbeat("a", 1, 0, 3),)
    assert reading(b'{"end":true}') is END
    assert tuple(reading(b'{"feed":{"sender":"a","epoch":1,"seq":1,"time":1}}')) == ()


async def test_messages_that_are_no_records_make_no_intake() -> None:
    async with saying('{"type":"hello"}', '{"n":1}', '{"type":"hello"}', '{"n":2}', then=1000) as (url, _):
        found: list[Arrival | Heartbeat | OutageInterval] = []
        with pytest.raises(Unavailable):
            await heard(WebSocketSource(url, "x", None, ignore="type=hello"), 100, found)
    assert found == [Arrival(b'{"n":1}'), Arrival(b'{"n":2}')]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cursor": "at", "numbered": "numbers"}, "cursor: .*numbers"),
        ({"cursor": ""}, "cursor"),
        ({"cursor": "a..b"}, "a..b"),
        ({"cursor": "at", "parameter": ""}, "parameter"),
        ({"only": "match"}, "type=match"),
        ({"ignore": ["=x"]}, "type=match"),
        ({"headers": {"A": "b\r\nC: d"}}, "'A'"),
        ({"headers": {"A b": "c"}}, "A b"),
    ],
)
def test_options_that_cannot_be_are_misconfigured(options: dict[str, Any], said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        WebSocketSource("ws://x", "x", **options)


async def test_a_token_in_the_address_is_not_shown() -> None:
    async with saying() as (url, _):
        pass
    with pytest.raises(Unavailable) as error:
        await heard(WebSocketSource(f"{url.replace('://', '://ada:secret@')}?token=secret", "rsvps"), 1)
    assert "secret" not in str(error.value)

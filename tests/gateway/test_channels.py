"""Into channels and out of them, over HTTP."""

import asyncio
import base64
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from typing import Any

import httpx
import pytest
from tests.gateway.conftest import Opened, until
from tests.ports import later_port

from penstock.audit.writers import Writer
from penstock.channels.tcp import Tcp
from penstock.core.contracts import ChannelPartition, Offsets, Sender, Topic
from penstock.core.errors import Unavailable
from penstock.core.record import Origin, Record
from penstock.testing import ManualClock, MemoryChannels

RECORDS = "/channels/one/records"
LINES = {"content-type": "application/x-ndjson"}
RAW = {"content-type": "application/octet-stream"}


async def read(client: httpx.AsyncClient, url: str, **params: str) -> dict[str, Any]:
    answer = await client.get(url, params=params or None)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


# --- in


async def test_records_are_there_when_the_answer_is(client: httpx.AsyncClient, channels: MemoryChannels) -> None:
    body = {"records": [{"key": "k", "value": {"a": 1}, "headers": {"h": "x"}}, {"value": None, "key": "k"}]}
    answer = await client.post(RECORDS, json=body)
    assert (answer.status_code, answer.json()) == (200, {"channel": "one", "acknowledged": 2})
    first, second = channels.entries("one")
    assert (first.key, first.value) == (b"k", b'{"a":1}')
    assert ("h", b"x") in first.headers
    assert (second.key, second.value) == (b"k", None)


async def test_what_has_no_identity_is_numbered_in_the_name_of_the_gateway(
    client: httpx.AsyncClient, channels: MemoryChannels
) -> None:
    for _ in range(2):
        await client.post(RECORDS, json={"records": [{"value": 1}, {"value": 2}]})
    origins = [Origin.of(entry.headers) for entry in channels.entries("one")]
    assert [origin.seq for origin in origins if origin] == [1, 2, 3, 4]
    assert {(origin.sender) for origin in origins if origin} == {"gateway"}
    assert len({origin.epoch for origin in origins if origin}) == 1


async def test_an_identity_of_the_client_s_own_passes_through(
    client: httpx.AsyncClient, channels: MemoryChannels
) -> None:
    told = {"sender": "meter 7", "epoch": 3, "seq": 42, "time": 1_700_000_000_000_000}
    await client.post(RECORDS, json={"records": [{"value": 1, **told}, {"value": 2}]})
    first, second = (Origin.of(entry.headers) for entry in channels.entries("one"))
    assert first == Origin("meter 7", 3, 42, 1_700_000_000_000_000)
    assert second is not None
    assert (second.sender, second.seq) == ("gateway", 1)
    (shown, _) = (await read(client, RECORDS))["records"]
    assert {name: shown[name] for name in told} == told
    assert shown["headers"] == {}


async def test_a_record_on_each_line(client: httpx.AsyncClient, channels: MemoryChannels) -> None:
    answer = await client.post(RECORDS, content=b'{"value": 1}\r\n\n{"value": "two", "key": 2}', headers=LINES)
    assert answer.json()["acknowledged"] == 2
    assert [(entry.key, entry.value) for entry in channels.entries("one")] == [(None, b"1"), (b"2", b'"two"')]


@pytest.mark.parametrize(("url", "headers"), [("?key=k", {}), ("", {"x-key": "k"})])
async def test_a_raw_body_is_one_record(
    client: httpx.AsyncClient, channels: MemoryChannels, url: str, headers: dict[str, str]
) -> None:
    answer = await client.post(RECORDS + url, content=b"\x00\xff", headers={**RAW, **headers})
    assert answer.json()["acknowledged"] == 1
    (entry,) = channels.entries("one")
    assert (entry.key, entry.value) == (b"k", b"\x00\xff")


@pytest.mark.parametrize(
    ("url", "key", "found"),
    [
        ("?key=%C3%B1", None, "ñ".encode()),
        ("", "ñ".encode(), "ñ".encode()),
        ("?format=text", b"a2V5", b"a2V5"),
        ("?format=base64&key=/w==", None, b"\xff"),
        ("?format=base64", b"/w==", b"\xff"),
    ],
)
async def test_the_key_of_a_raw_body_is_a_text_or_base64(
    client: httpx.AsyncClient, channels: MemoryChannels, url: str, key: bytes | None, found: bytes
) -> None:
    headers = [(b"content-type", b"application/octet-stream"), *([(b"x-key", key)] if key is not None else [])]
    assert (await client.post(RECORDS + url, content=b"dmFs", headers=headers)).status_code == 200
    (entry,) = channels.entries("one")
    assert (entry.key, entry.value) == (found, b"dmFs")


@pytest.mark.parametrize(
    ("url", "kind", "key", "location"),
    [
        ("", "application/octet-stream", b"\xff", "the header x-key"),
        ("?format=base64", "application/octet-stream", b"no", "the header x-key"),
        ("?format=base64&key=no", "application/octet-stream", None, "?key"),
        ("?key=k", "application/octet-stream", b"k", "?key"),
        ("?key=k", "application/json", None, "?key"),
        ("", "application/json", b"k", "the header x-key"),
        ("", "application/x-ndjson", b"k", "the header x-key"),
    ],
)
async def test_a_key_that_is_none_or_stands_where_it_does_not_belong_is_400(
    client: httpx.AsyncClient, channels: MemoryChannels, url: str, kind: str, key: bytes | None, location: str
) -> None:
    headers = [(b"content-type", kind.encode()), *([(b"x-key", key)] if key is not None else [])]
    answer = await client.post(RECORDS + url, content=b'{"records": []}', headers=headers)
    assert (answer.status_code, answer.json()["place"]) == (400, location)
    assert answer.json()["fix"]
    assert not channels.entries("one")


async def test_nothing_is_acknowledged_of_nothing(client: httpx.AsyncClient, channels: MemoryChannels) -> None:
    assert (await client.post(RECORDS, json={"records": []})).json()["acknowledged"] == 0
    assert (await client.post(RECORDS, content=b"", headers=LINES)).json()["acknowledged"] == 0
    assert not channels.entries("one")


NUMBERS = ["18446744073709551617", "-9223372036854775809", "1e400", "0.10", "9223372036854775807", "-1", "1.0E-7"]


@pytest.mark.parametrize("text", [*NUMBERS, '{"b":[0.10,{"ä":null}],"a":1e400}'])
async def test_numbers_keep_their_text(client: httpx.AsyncClient, channels: MemoryChannels, text: str) -> None:
    answer = await client.post(RECORDS, content=f'{{"value": {text} , "key": [{text}]}}'.encode(), headers=LINES)
    assert answer.status_code == 200
    assert [(entry.value, entry.key) for entry in channels.entries("one")] == [(text.encode(), f"[{text}]".encode())]


async def test_a_value_is_stored_in_compact_form(client: httpx.AsyncClient, channels: MemoryChannels) -> None:
    await client.post(RECORDS, content=b'{"value": { "b" : [ 1 ],\t"a": "\\u00e4" } }', headers=LINES)
    assert [entry.value for entry in channels.entries("one")] == ['{"b":[1],"a":"ä"}'.encode()]


async def test_text_and_base64_are_taken_where_they_are_said(
    client: httpx.AsyncClient, channels: MemoryChannels
) -> None:
    coded = base64.b64encode(b"\xff\x00").decode()
    await client.post(f"{RECORDS}?format=text", json={"records": [{"value": "plain", "key": "k"}]})
    await client.post(f"{RECORDS}?format=base64", json={"records": [{"value": coded, "headers": {"h": coded}}]})
    await client.post(RECORDS, json={"records": [{"key": "k", "value": coded, "base64": ["value"]}]})
    text, both, value = channels.entries("one")
    assert (text.key, text.value) == (b"k", b"plain")
    assert (both.value, ("h", b"\xff\x00") in both.headers) == (b"\xff\x00", True)
    assert (value.key, value.value) == (b"k", b"\xff\x00")


async def test_what_was_read_can_be_sent_again(client: httpx.AsyncClient, channels: MemoryChannels) -> None:
    headers = [("h", b"\xff"), ("h", b"x"), ("i", b"y")]
    channels.append("one", b"\xff", b"\xfe", [*Origin("s", 1, 2, 3).headers(), *headers])
    (shown,) = (await read(client, RECORDS))["records"]
    assert shown["base64"] == ["key", "value", "headers"]
    sent = {name: shown[name] for name in shown if name not in ("channel", "partition", "offset", "appended")}
    assert (await client.post(RECORDS, json={"records": [sent]})).status_code == 200
    before, after = channels.entries("one")
    assert (after.key, after.value, list(after.headers)) == (before.key, before.value, list(before.headers))


BAD_RECORDS: list[tuple[bytes, str]] = [
    (b"", "line 1, column 1"),
    (b"[]", "the body"),
    (b"null", "the body"),
    (b"{", "line 1, column 2"),
    (b'{"records": 1}', "the body"),
    (b'{"records": [}', "line 1, column 14"),
    (b'{"records": [1]}', "records[0]"),
    (b'{"records": [{"value": 1},\n {"value": tru}]}', "line 2, column 12"),
    (b'{"records": [{"value": NaN}]}', "the body"),
    (b'{"records": [{"value": 1}]} x', "line 1, column 29"),
    (b'{"records": [], "records": []}', "the body"),
    (b'{"records": [{"value": 1, "value": 2}]}', "the body"),
    (b'{"records": [{"value": {"a": 1, "\\ud800": 2, "\\ud800": 3}}]}', "the body"),
    (b'{"records": [{"value": ' + b"[" * 100_000, "the body"),
    (b'{"records": [{"value": ' + b"[" * 300 + b"]" * 300 + b"}]}", "records[0].value"),
    (b'{"records": [{"value": "\xff"}]}', "byte 25"),
    (b'{"records": [{"value": "\xc0\x80"}]}', "byte 25"),
    (b'{"records": [{"value": "\xe2\x82', "byte 25"),
    (b'{"other": []}', "the body"),
    (b"{}", "the body"),
    (b'{"records": [{}]}', "records[0]"),
    (b'{"records": [{"value": 1, "partition": 3}]}', "records[0]"),
    (b'{"records": [{"value": 1, "\\ud800": 3}]}', "records[0]"),
    (b'{"records": [{"value": "\\ud800"}]}', "records[0].value"),
    (b'{"records": [{"value": {"\\ud800": 1}}]}', "records[0].value"),
    (b'{"records": [{"value": 1, "key": "\\ud800"}]}', "records[0].key"),
    (b'{"records": [{"value": 1, "headers": {"\\ud800": "x"}}]}', "records[0].headers"),
    (b'{"records": [{"value": 1, "headers": []}]}', "records[0].headers"),
    (b'{"records": [{"value": 1, "headers": {"h": 1}}]}', "records[0].headers.h"),
    (b'{"records": [{"value": 1, "headers": {"h": "1", "h": "2"}}]}', "the body"),
    (b'{"records": [{"value": 1, "headers": {"seq": "1"}}]}', "records[0].headers.seq"),
    (b'{"records": [{"value": 1, "headers": {"redriven": "1"}}]}', "records[0].headers.redriven"),
    (b'{"records": [{"value": 1, "headers": {"replay": "1"}}]}', "records[0].headers.replay"),
    (b'{"records": [{"value": 1, "headers": {"from": "1"}}]}', "records[0].headers.from"),
    (b'{"records": [{"value": "x", "base64": ["value"]}]}', "records[0].value"),
    (b'{"records": [{"value": 1, "base64": ["value"]}]}', "records[0].value"),
    (b'{"records": [{"value": 1, "base64": "value"}]}', "records[0].base64"),
    (b'{"records": [{"value": 1, "seq": 1}]}', "records[0]"),
    (b'{"records": [{"value": 1, "sender": "s", "epoch": 1, "seq": -1}]}', "records[0].seq"),
    (b'{"records": [{"value": 1, "sender": "s", "epoch": 1, "seq": 9223372036854775808}]}', "records[0].seq"),
    (b'{"records": [{"value": 1, "sender": "s", "epoch": true, "seq": 1}]}', "records[0].epoch"),
    (b'{"records": [{"value": 1, "sender": "s", "epoch": 1, "seq": 1.0}]}', "records[0].seq"),
    (b'{"records": [{"value": 1, "sender": "a\\nb", "epoch": 1, "seq": 1}]}', "records[0].sender"),
    (b'{"records": [{"value": 1, "sender": "\\u001b[2J", "epoch": 1, "seq": 1}]}', "records[0].sender"),
    (b'{"records": [{"value": 1, "sender": "", "epoch": 1, "seq": 1}]}', "records[0].sender"),
    (b'{"records": [{"value": 1, "sender": "gateway", "epoch": 1, "seq": 1}]}', "records[0].sender"),
    (b'{"records": [{"value": 1, "sender": "s", "epoch": 1, "seq": 1, "time": "now"}]}', "records[0].time"),
]


@pytest.mark.parametrize(("body", "location"), BAD_RECORDS, ids=range(len(BAD_RECORDS)))
async def test_a_bad_body_is_refused_whole_with_its_place(
    client: httpx.AsyncClient, channels: MemoryChannels, body: bytes, location: str
) -> None:
    answer = await client.post(RECORDS, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert location in answer.json()["place"]
    assert answer.json()["error"]
    assert not channels.entries("one")


async def test_a_bad_line_is_named_and_the_good_ones_are_not_sent_either(
    client: httpx.AsyncClient, channels: MemoryChannels
) -> None:
    answer = await client.post(RECORDS, content=b'{"value": 1}\n{"value": }\n', headers=LINES)
    assert answer.status_code == 400
    assert answer.json()["place"] == "line 2, column 11"
    answer = await client.post(RECORDS, content=b'{"value": 1}\n{"value": 1} {"value": 2}\n', headers=LINES)
    assert answer.json()["place"] == "line 2, column 14"
    answer = await client.post(RECORDS, content=b'{"value": 1}\n\xff\n', headers=LINES)
    assert answer.json()["place"] == "line 2, byte 1"
    assert not channels.entries("one")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "text/plain"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
async def test_other_kinds_of_bodies_are_415(
    client: httpx.AsyncClient, channels: MemoryChannels, headers: dict[str, str]
) -> None:
    answer = await client.post(RECORDS, content=b'{"records": []}', headers=headers)
    assert answer.status_code == 415
    assert answer.json()["fix"]


async def test_sizes_hold_to_the_byte(channels: MemoryChannels, opened: Opened) -> None:
    async with opened(channels, body=200, records=2, record=40, key=10, headers=12) as client:

        async def status(body: object) -> int:
            answer = await client.post(RECORDS, json=body)
            assert answer.status_code == 200 or answer.json()["fix"]
            return answer.status_code

        assert await status({"records": [{"value": 1}] * 2}) == 200
        assert await status({"records": [{"value": 1}] * 3}) == 413
        assert await status({"records": [{"value": "x" * 38}]}) == 200
        assert await status({"records": [{"value": "x" * 39}]}) == 413
        assert await status({"records": [{"value": 1, "key": "é" * 5}]}) == 200
        assert await status({"records": [{"value": 1, "key": "é" * 5 + "x"}]}) == 413
        assert await status({"records": [{"value": 1, "headers": {"hh": "x" * 10}}]}) == 200
        assert await status({"records": [{"value": 1, "headers": {"hh": "x" * 11}}]}) == 413
        long = b'{"value": 1}' + b" " * 188
        assert (await client.post(RECORDS, content=long, headers=LINES)).status_code == 200
        assert (await client.post(RECORDS, content=long + b" ", headers=LINES)).status_code == 413
        assert (await client.post(RECORDS, content=b"x" * 40, headers=RAW)).status_code == 200
        assert (await client.post(RECORDS, content=b"x" * 41, headers=RAW)).status_code == 413


async def test_a_body_without_an_announced_length_is_cut_off_at_the_limit(
    channels: MemoryChannels, opened: Opened
) -> None:
    async def endless() -> Any:
        while True:
            yield b"x" * 50

    async with opened(channels, body=200) as client:
        answer = await client.post(RECORDS, content=endless(), headers=RAW)
    assert answer.status_code == 413


async def test_a_body_that_does_not_come_is_408(channels: MemoryChannels, opened: Opened) -> None:
    async def stalled() -> Any:
        yield b"x"
        await asyncio.Event().wait()

    async with opened(channels, upload="100 ms") as client:
        answer = await client.post(RECORDS, content=stalled(), headers=RAW)
    assert answer.status_code == 408
    assert not channels.entries("one")


async def test_what_is_under_way_is_bounded_for_all_together(channels: MemoryChannels, opened: Opened) -> None:
    half, rest = asyncio.Event(), asyncio.Event()

    async def slow() -> Any:
        yield b"x" * 60
        half.set()
        await rest.wait()

    async with opened(channels, memory=100) as client:
        first = asyncio.create_task(client.post(RECORDS, content=slow(), headers=RAW))
        await half.wait()
        answer = await client.post(RECORDS, content=b"x" * 60, headers=RAW)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert (await client.post(RECORDS, content=b"x" * 30, headers=RAW)).status_code == 200
        rest.set()
        assert (await first).status_code == 200
        assert (await client.post(RECORDS, content=b"x" * 60, headers=RAW)).status_code == 200


async def test_channels_of_the_machinery_can_be_read_and_not_written(
    client: httpx.AsyncClient, channels: MemoryChannels
) -> None:
    channels.ensure([Topic("penstock.demo.status")])
    answer = await client.post("/channels/penstock.demo.status/records", json={"records": [{"value": 1}]})
    assert answer.status_code == 403
    assert (await client.get("/channels/penstock.demo.status/records")).status_code == 200


async def test_results_and_dead_letters_are_not_written(client: httpx.AsyncClient, channels: MemoryChannels) -> None:
    """A row forged so was shown on the page."""
    channels.ensure([Topic("rsvps.dead"), Topic("penstock.demo.bookmarks")])
    # As the query announces itself before its first row.
    writer = Writer("two", "a1b2c3d4", "by_two", 0, channels.topic_id("two"), {0: 0, 1: 0})
    channels.append("penstock.demo.bookmarks", writer.dumps(), writer.key)
    for name in ("two", "rsvps.dead"):
        answer = await client.post(f"/channels/{name}/records", json={"records": [{"value": 1}]})
        told = answer.json()
        assert (answer.status_code, told["place"]) == (403, f"channel {name}")
        assert told["error"]
        assert told["fix"]
        assert not channels.entries(name)
    assert (await client.post(RECORDS, json={"records": [{"value": 1}]})).status_code == 200


async def test_an_unknown_channel_is_not_made_by_sending(client: httpx.AsyncClient, channels: MemoryChannels) -> None:
    answer = await client.post("/channels/tow/records", json={"records": [{"value": 1}]})
    assert answer.status_code == 404
    assert '"two"' in answer.json()["fix"]
    assert channels.names() == ["one", "two"]


# --- out


async def test_records_are_read_from_an_offset_and_the_next_address_goes_on(
    client: httpx.AsyncClient, channels: MemoryChannels
) -> None:
    for number in range(5):
        channels.append("one", b"%d" % number)
    found = await read(client, RECORDS, partition="0", offset="1", max="2")
    assert [record["value"] for record in found["records"]] == [1, 2]
    assert [record["offset"] for record in found["records"]] == [1, 2]
    assert found["offsets"] == {"0": 3}
    assert found["next"] == "/channels/one/records?offsets=0:3&max=2"
    found = await read(client, found["next"])
    assert [record["value"] for record in found["records"]] == [3, 4]
    found = await read(client, found["next"])
    assert (found["records"], found["offsets"]) == ([], {"0": 5})


async def test_all_partitions_are_read_together(client: httpx.AsyncClient, channels: MemoryChannels) -> None:
    for number in range(20):
        channels.append("two", b"%d" % number, b"%d" % number)
    url, found = "/channels/two/records?max=7", []
    while records := (answer := await read(client, url))["records"]:
        found += [record["value"] for record in records]
        url = answer["next"]
    assert sorted(found) == list(range(20))
    (one,) = {record["partition"] for record in (await read(client, "/channels/two/records?partition=1"))["records"]}
    assert one == 1


async def test_an_offset_needs_its_partition_where_there_are_several(client: httpx.AsyncClient) -> None:
    answer = await client.get("/channels/two/records?offset=0")
    assert answer.status_code == 400
    assert "partition=0" in answer.json()["fix"]


async def test_an_answer_ends_soon_after_its_size(client: httpx.AsyncClient, channels: MemoryChannels) -> None:
    for _ in range(100):
        channels.append("one", b"1" * 100)
    found = await read(client, RECORDS, max_bytes="1000")
    assert 10 <= len(found["records"]) <= 26


async def test_a_long_poll_is_answered_as_soon_as_there_is_something(
    client: httpx.AsyncClient, channels: MemoryChannels
) -> None:
    polling = asyncio.create_task(read(client, f"{RECORDS}?from=end&wait=30s"))
    while not polling.done():
        channels.append("one", b"1")
        await asyncio.sleep(0.01)
    assert {record["value"] for record in polling.result()["records"]} == {1}


async def test_a_long_poll_ends_empty_after_its_time(client: httpx.AsyncClient) -> None:
    found = await read(client, f"{RECORDS}?offset=0&wait=50ms")
    assert (found["records"], found["offsets"]) == ([], {"0": 0})


async def test_long_polls_are_bounded_and_others_pass_by_them(channels: MemoryChannels, opened: Opened) -> None:
    async with opened(channels, polls=1) as client:
        both = [asyncio.create_task(client.get(f"{RECORDS}?wait=30s")) for _ in range(2)]
        (refused,), (polling,) = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        assert (refused.result().status_code, refused.result().headers["retry-after"]) == (503, "1")
        assert (await client.get(RECORDS)).status_code == 200
        await client.post(RECORDS, json={"records": [{"value": 1}]})
        assert len((await polling).json()["records"]) == 1
        assert (await client.get(f"{RECORDS}?wait=10ms")).status_code == 200


async def test_what_retention_took_is_410_with_what_is_kept(opened: Opened) -> None:
    clock = ManualClock()
    channels = MemoryChannels(None, clock)
    channels.ensure([Topic("one", retention=timedelta(minutes=1))])
    channels.append("one", b"0")
    clock.move(120)
    channels.append("one", b"1")
    async with opened(channels, clock) as client:
        answer = await client.get(f"{RECORDS}?offset=0")
        assert answer.status_code == 410
        assert {name: answer.json()[name] for name in ("partition", "first", "end")} == {
            "partition": 0,
            "first": 1,
            "end": 2,
        }
        assert [record["value"] for record in (await read(client, f"{RECORDS}?offset=1"))["records"]] == [1]


class Quick(MemoryChannels):
    """Channels whose retention is quicker than a reader: what it is asked to read has gone once already."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(None, clock)
        self._moving, self._readers = clock, 0

    @contextmanager
    def reader(self, start: Mapping[str, Offsets], only: Collection[ChannelPartition] | None = None) -> Iterator[Any]:
        self._readers += 1
        if self._readers == 1:
            self._moving.move(120)
            self.append("one", b"1")
        with super().reader(start, only) as reader:
            yield reader


@pytest.mark.parametrize(
    ("query", "status"), [("", 200), ("?from=beginning", 200), ("?since=1m", 200), ("?offset=0", 410)]
)
async def test_a_beginning_that_moves_is_followed(opened: Opened, query: str, status: int) -> None:
    clock = ManualClock()
    channels = Quick(clock)
    channels.ensure([Topic("one", retention=timedelta(minutes=1))])
    channels.append("one", b"0")
    async with opened(channels, clock) as client:
        answer = await client.get(RECORDS + query)
    assert answer.status_code == status
    if status == 200:
        assert [record["value"] for record in answer.json()["records"]] == [1]


async def test_beyond_the_end_is_416_with_the_end(client: httpx.AsyncClient, channels: MemoryChannels) -> None:
    channels.append("one", b"0")
    answer = await client.get(f"{RECORDS}?offset=2&wait=10s")
    assert (answer.status_code, answer.json()["end"]) == (416, 1)


async def test_records_are_read_from_a_moment(opened: Opened) -> None:
    clock = ManualClock()
    channels = MemoryChannels(None, clock)
    channels.ensure([Topic("one")])
    for number in range(4):
        channels.append("one", b"%d" % number)
        clock.move(60)
    async with opened(channels, clock) as client:
        found = await read(client, f"{RECORDS}?since=2m")
        assert [record["value"] for record in found["records"]] == [2, 3]
        assert len((await read(client, f"{RECORDS}?since=99999 days"))["records"]) == 4


@pytest.mark.parametrize(
    "query",
    [
        "offset=-1",
        "offset=1.5",
        "offset=",
        "offset=%D9%A1",
        "offset=9223372036854775808",
        "offset=" + "9" * 10_000,
        "offset=0&offset=0",
        "offset=0&since=1m",
        "offsets=0",
        "offsets=0:1,0:2",
        "offsets=0:x",
        "offsets=",
        "offsets=0:0&partition=0",
        "partition=x",
        "since=yesterday",
        "from=middle",
        "max=0",
        "max=10001",
        "max_bytes=0",
        "max_bytes=99999999999",
        "wait=61s",
        "wait=-1s",
        "wait=10",
        "format=xml",
    ],
)
async def test_a_wrong_question_is_400_with_its_place(client: httpx.AsyncClient, query: str) -> None:
    answer = await client.get(f"{RECORDS}?{query}")
    assert answer.status_code == 400
    assert answer.json()["place"].startswith("?")
    assert answer.json()["fix"]


@pytest.mark.parametrize("query", ["partition=1", "partition=1&offset=0", "offsets=1:0", "partition=1&since=1m"])
async def test_a_partition_that_there_is_not_is_404(client: httpx.AsyncClient, query: str) -> None:
    answer = await client.get(f"{RECORDS}?{query}")
    assert (answer.status_code, answer.json()["fix"]) == (404, "use 0")


async def test_what_cannot_be_told_as_it_is_asked_is_told_in_base64(
    client: httpx.AsyncClient, channels: MemoryChannels
) -> None:
    for value in (b"no json", b"\xff", b'{"a":1}', None, b"null"):
        channels.append("one", value, b"k")

    async def told(form: str) -> list[tuple[Any, Any]]:
        found = (await read(client, RECORDS, format=form))["records"]
        return [(record["value"], record.get("base64")) for record in found]

    assert await told("json") == [
        ("bm8ganNvbg==", ["value"]),
        ("/w==", ["value"]),
        ({"a": 1}, None),
        (None, None),
        ("bnVsbA==", ["value"]),
    ]
    assert await told("text") == [
        ("no json", None),
        ("/w==", ["value"]),
        ('{"a":1}', None),
        (None, None),
        ("null", None),
    ]
    assert [value for value, _ in await told("base64")] == [
        "bm8ganNvbg==",
        "/w==",
        "eyJhIjoxfQ==",
        None,
        "bnVsbA==",
    ]


# --- when the middleware is away, or keeps nothing


class Away(MemoryChannels):
    """Channels that do not answer."""

    def names(self) -> list[str]:
        raise Unavailable("the middleware", "it is away", 2.5)

    def groups(self) -> list[str]:
        return self.names()


@pytest.mark.parametrize("path", ["/channels", "/channels/one", RECORDS, "/groups", "/groups/g"])
async def test_middleware_that_is_away_is_503_with_when_to_come_back(opened: Opened, path: str) -> None:
    async with opened(Away()) as client:
        answer = await client.get(path)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")
        assert "it is away" in answer.json()["error"]


class Stuck(MemoryChannels):
    """Channels that take records only when they are let."""

    def __init__(self) -> None:
        super().__init__(None)
        self.go = asyncio.Event()

    @asynccontextmanager
    async def sender(self) -> AsyncIterator[Any]:
        async with super().sender() as sender:
            yield StuckSender(self.go, sender)


class StuckSender:
    def __init__(self, go: asyncio.Event, sender: Sender) -> None:
        self._go, self._sender = go, sender

    async def send(self, channel: str, records: Sequence[Record]) -> None:
        await self._go.wait()
        await self._sender.send(channel, records)


async def test_what_is_not_acknowledged_is_not_claimed_and_nobody_else_waits(opened: Opened) -> None:
    channels = Stuck()
    channels.ensure([Topic("one"), Topic("two")])
    async with opened(channels, send_timeout="100 ms") as client:
        answer = await client.post(RECORDS, json={"records": [{"value": 1}]})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "may be there" in answer.json()["error"]
        answer = await client.post(RECORDS, json={"records": [{"value": 2}]})
        assert (answer.status_code, "were not sent" in answer.json()["error"]) == (503, True)
        assert (await client.get(RECORDS)).status_code == 200
        channels.go.set()
        await until(lambda: channels.entries("one"))
        assert (await client.post(RECORDS, json={"records": [{"value": 3}]})).status_code == 200
    assert [entry.value for entry in channels.entries("one")] == [b"1", b"3"]


async def test_what_waits_to_be_acknowledged_is_bounded_for_all_channels_together(opened: Opened) -> None:
    channels = Stuck()
    channels.ensure([Topic("one"), Topic("two"), Topic("three")])
    async with opened(channels, send_timeout="100 ms", memory=100) as client:
        for channel, size, heard in (
            ("one", 90, "may be there"),
            ("two", 30, "may be there"),
            ("three", 1, "not sent"),
        ):
            answer = await client.post(f"/channels/{channel}/records", content=b"x" * size, headers=RAW)
            assert (answer.status_code, heard in answer.json()["error"]) == (503, True)
        channels.go.set()
        await until(lambda: channels.entries("one") and channels.entries("two"))
        answer = await client.post("/channels/three/records", content=b"x", headers=RAW)
        assert answer.status_code == 200
    assert len(channels.entries("three")) == 1


async def test_channels_that_keep_nothing_can_be_sent_to_and_not_be_read(opened: Opened) -> None:
    tcp = Tcp("127.0.0.1", later_port())
    async with opened(tcp) as client:
        for query in ("", "?wait=1s", "?offsets=0:0"):
            answer = await client.get(RECORDS + query)
            assert (answer.status_code, answer.json()["place"]) == (409, "channel one")
            assert answer.json()["fix"]
        joining = await client.post("/groups/g/members", json={"channels": ["one"]})
        assert joining.status_code == 409
        with tcp.reader({"one": {}}) as reader:  # Nobody else has listened there meanwhile.
            assert (await client.post(RECORDS, json={"records": [{"value": 1}]})).status_code == 200
            answer = await client.get(RECORDS)
            assert answer.status_code == 409
            assert [entry.value for entry in await asyncio.to_thread(reader.read, 10, 5)] == [b"1"]

"""Server-sent events, from bytes."""

import random
import tracemalloc

import pytest

from penstock.collect.sse import FIRST_BYTES, LONGEST_ID, LONGEST_RETRY, Event, EventStream


def read(*chunks: bytes, max_size: int = 1_000) -> list[Event]:
    stream = EventStream(max_size)
    return [event for chunk in chunks for event in stream.feed(chunk)]


def data(*chunks: bytes) -> list[bytes]:
    return [event.data for event in read(*chunks)]


def locations(*chunks: bytes, last_id: bytes | None = None) -> list[tuple[bytes | None, int]]:
    stream = EventStream(1_000, last_id)
    return [(event.id, event.index) for chunk in chunks for event in stream.feed(chunk)]


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (b"data: a\n\n", [b"a"]),
        (b"data:a\n\n", [b"a"]),
        (b"data:  a \n\n", [b" a "]),
        (b"data\n\n", [b""]),
        (b"data:\n\n", [b""]),
        (b"data\ndata\n\n", [b"\n"]),
        (b"data: a\ndata: b\ndata\n\n", [b"a\nb\n"]),
        (b"data: a:b: c\n\n", [b"a:b: c"]),
        (b"\n\n\n", []),
        (b": a comment\n:\n\ndata: a\n: another\n\n", [b"a"]),
        (b"event: x\n\ndata: a\n\n", [b"a"]),
        (b"unknown: a\nDATA: b\n data: c\ndata : d\n\n", []),
        (b"data: a\n\ndata: b\n", [b"a"]),
        (b"data: a\n\ndata: b", [b"a"]),
        (b"data: a\r\rdata: b\r\n\r\ndata: c\n\ndata: d\r\n\n", [b"a", b"b", b"c", b"d"]),
        (b"data: a\rdata: b\n\r\n", [b"a\nb"]),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\ndata: b\n\n", [b"b"]),
        (b"data: a\n\n\xef\xbb\xbfdata: b\n\n", [b"a"]),
        (b"data: \xff\xc0\xaf\xed\xa0\x80\x00\x1b[2J\n\n", [b"\xff\xc0\xaf\xed\xa0\x80\x00\x1b[2J"]),
        (b"data: \xe2\x80\xa8\x0b\x0c\x85\n\n", [b"\xe2\x80\xa8\x0b\x0c\x85"]),
    ],
)
def test_data_are_the_bytes_between_the_line_ends_however_they_are_cut(said: bytes, found: list[bytes]) -> None:
    assert data(said) == found
    assert data(*(bytes([byte]) for byte in said)) == found
    for disconnect in range(len(said)):
        assert data(said[:disconnect], b"", said[disconnect:]) == found


def test_a_long_stream_reads_the_same_in_any_pieces() -> None:
    chance = random.Random(5)
    pieces = [
        b"data: x",
        b"data",
        b"id: 7",
        b"id",
        b"event: y",
        b"\r",
        b"\n",
        b"\r\n",
        b"\n\n",
        b": c",
        b"\xef\xbb\xbf",
    ]
    said = b"".join(chance.choice(pieces) for _ in range(5_000))
    whole = read(said)
    assert len(whole) > 50
    for _ in range(5):
        cuts = sorted(chance.randrange(len(said)) for _ in range(300))
        assert read(*(said[a:b] for a, b in zip([0, *cuts], [*cuts, len(said)], strict=True))) == whole


def test_an_event_has_the_last_type_that_it_tells() -> None:
    found = read(b"event: a\nevent: b\ndata: 1\n\ndata: 2\n\nevent:\ndata: 3\n\nevent: \xff\ndata: 4\n\n")
    assert [event.type for event in found] == ["b", "message", "message", "\ufffd"]


def test_events_are_counted_behind_the_last_id() -> None:
    said = b"data: 0\n\nid: 5\ndata: a\n\ndata: b\n\nid: 5\ndata: c\n\nid: 6\n\ndata: d\n\nid\ndata: e\n\n"
    assert locations(said) == [(None, 1), (b"5", 0), (b"5", 1), (b"5", 2), (b"6", 1), (None, 0)]


def test_what_follows_an_id_counts_the_same_after_a_resume() -> None:
    following = b"data: b\n\ndata: c\n\nid: 6\ndata: d\n\n"
    assert locations(b"id: 5\ndata: a\n\n" + following)[1:] == locations(following, last_id=b"5")


def test_the_id_of_an_event_that_never_ended_is_none() -> None:
    stream = EventStream(100)
    stream.feed(b"id: 5\ndata: a\n\nid: 6\ndata: b\n")
    assert [(event.id, event.index) for event in stream.feed(b"\n")] == [(b"6", 0)]


@pytest.mark.parametrize(
    "bad", [b"a\x00b", b"\x00", b"\x1b[2J", b"a\tb", b"a\x7fb", b"x" * (LONGEST_ID + 1), b"x" * 5_000]
)
def test_an_id_that_could_not_be_sent_back_is_passed_over(bad: bytes) -> None:
    assert locations(b"id: 5\ndata: a\n\nid: " + bad + b"\ndata: b\n\n") == [(b"5", 0), (b"5", 1)]


def test_an_id_may_be_any_other_text() -> None:
    for id_ in ("x" * LONGEST_ID, "a b", "ü#%41/../", "\udcff"):
        raw = id_.encode(errors="surrogateescape")
        assert locations(b"id: " + raw + b" \ndata: a\n\n") == [(raw, 0)]


@pytest.mark.parametrize(
    ("said", "retry"),
    [
        (b"0", 0),
        (b"1500", 1_500),
        (b"9" * 500, LONGEST_RETRY),
        (b"-1", None),
        (b"1.5", None),
        (b"", None),
        (b"1s", None),
        (b" 1", None),
        ("١".encode(), None),
    ],
)
def test_a_retry_is_digits_alone(said: bytes, retry: int | None) -> None:
    stream = EventStream(100)
    stream.feed(b"retry:" + (b" " if said.startswith(b" ") else b"") + said + b"\n")
    assert stream.retry == retry


def test_data_may_have_exactly_the_limit_and_one_more_is_cut() -> None:
    for said in (b"data: " + b"x" * 100, b"data:" + b"x" * 49 + b"\ndata:" + b"x" * 50):
        (event,) = read(said + b"\n\n", max_size=100)
        assert (len(event.data), event.size) == (100, 100)
        (event,) = read(said + b"y\n\n", max_size=100)
        assert event.size == 101
        assert event.data[:49] == b"x" * 49
    assert [event.size for event in read(b"data:" + b"x" * 100 + b"\ndata\n\ndata: a\n\n", max_size=100)] == [101, 1]


def test_whatever_is_endless_takes_a_bounded_room_and_the_stream_goes_on() -> None:
    tracemalloc.start()
    try:
        stream = EventStream(1 << 17)
        for endless in (b"x" * 65_536, b": " + b"x" * 65_536, b"data: " + b"x" * 65_536, b"data: x\n" * 4_096):
            for _ in range(20 if b"\n" in endless else 200):
                assert stream.feed(endless) == []
            found = stream.feed(b"\n\ndata: a\n\n")
            assert found[-1].data == b"a"
            assert all(len(event.data) <= FIRST_BYTES for event in found)
            assert all(event.size > 1 << 17 for event in found[:-1])
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()

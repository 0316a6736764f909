"""Where a record ends."""

import random
import tracemalloc
from collections.abc import Callable

import pytest

from penstock.core.framing import KEPT, Found, Framing, Lengths, Lines


def framed(*payloads: bytes) -> bytes:
    return b"".join(len(one).to_bytes(4, "big") + one for one in payloads)


def values(found: list[Found]) -> list[bytes]:
    return [value for value, _, why in found if why is None]


def test_a_line_feed_ends_a_record_with_or_without_a_carriage_return() -> None:
    assert Lines(10).push(b"a\nb\r\nc\r\r\n\rd\n") == [
        (b"a", 2, None),
        (b"b", 5, None),
        (b"c\r", 9, None),
        (b"\rd", 12, None),
    ]


def test_an_empty_line_is_no_record() -> None:
    assert values(Lines(10).push(b"\n\r\n\na\n\n")) == [b"a"]


def test_a_line_without_end_is_no_record_until_nothing_can_follow() -> None:
    lines = Lines(10)
    assert lines.push(b"a\nbc") == [(b"a", 2, None)]
    assert lines.midway
    assert lines.end() == [(b"bc", 4, None)]
    assert not lines.midway
    assert lines.end() == []


@pytest.mark.parametrize("feed", [b"\n", b"\r\n"])
def test_a_line_of_exactly_the_limit_is_taken_and_one_byte_more_is_not(feed: bytes) -> None:
    assert values(Lines(5).push(b"12345" + feed)) == [b"12345"]
    ((value, location, why),) = Lines(5).push(b"123456" + feed)
    assert (value, location) == (b"12345", 6)
    assert why is not None
    assert "5 bytes" in why


def test_who_goes_on_behind_a_line_that_was_too_long_passes_over_its_rest() -> None:
    for stream in (b"123456\nnext\n", b"1234567890\nnext\n", b"12345\r7\nnext\n"):
        (_, location, why), (value, behind, _) = Lines(5).push(stream)
        assert why is not None
        assert value == b"next"
        assert Lines(5, location, skipping=True).push(stream[location:]) == [(b"next", behind, None)]


def test_a_line_without_end_takes_no_memory() -> None:
    lines, piece = Lines(100_000), b"x" * 50_000
    found: list[Found] = []
    tracemalloc.start()
    try:
        for _ in range(400):
            found += lines.push(piece)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert [(len(value), location) for value, location, _ in found] == [(KEPT, 100_001)]
    assert values(lines.push(b"x\nnext\n")) == [b"next"]


def test_a_length_stands_before_each_record_and_may_be_nothing() -> None:
    assert Lengths(10).push(framed(b"a\n", b"", b"0123456789")) == [
        (b"a\n", 6, None),
        (b"", 10, None),
        (b"0123456789", 24, None),
    ]


def test_a_record_that_is_too_long_is_passed_over() -> None:
    found = Lengths(10).push(framed(b"12345678901", b"next"))
    assert found == [(b"12345678901", 15, "it has 11 bytes, the limit of a record is 10"), (b"next", 23, None)]


def test_a_length_that_is_absurd_ends_it_all() -> None:
    lengths = Lengths(10)
    assert lengths.push(framed(b"a") + b"\xff\xff\xff\xff" + b"more") == [
        (b"a", 5, None),
        (b"", 9, "the length of a record is 4294967295 bytes, the limit is 10"),
    ]
    assert lengths.broken is not None
    assert lengths.push(framed(b"a")) == []


def test_a_length_that_is_announced_and_never_sent_takes_no_memory() -> None:
    lengths = Lengths(900_000)
    assert lengths.push(b"\x00\x0d\xbb\xa0") == []
    assert lengths.midway
    assert lengths.held == 4


def test_half_a_record_at_the_end_is_told() -> None:
    lengths = Lengths(10)
    assert lengths.push(b"\x00\x00\x00\x05ab") == []
    assert lengths.end() == [(b"ab", 6, "the stream ends after 2 bytes of the record")]


def stream_of_lines(chance: random.Random) -> bytes:
    parts = [
        bytes(chance.choices(b"ab\x00\xff\r", k=chance.choice((0, 1, 2, 19, 20, 21, 22, 23, 60))))
        + chance.choice((b"\n", b"\r\n"))
        for _ in range(40)
    ]
    return b"".join(parts) + b"rest" * chance.randrange(8)


def stream_of_lengths(chance: random.Random) -> bytes:
    parts = [chance.randbytes(chance.choice((0, 1, 19, 20, 21, 60, 320))) for _ in range(40)]
    far = chance.choice((b"", b"\x00\x00\x01\x41", b"\xff\xff\xff\xff"))
    return framed(*parts) + far + framed(b"x" * 9)[: chance.randrange(13)]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize(
    ("make", "stream_of"), [(lambda: Lines(20), stream_of_lines), (lambda: Lengths(20), stream_of_lengths)]
)
def test_however_the_bytes_are_cut_the_records_are_the_same(
    make: Callable[[], Framing], stream_of: Callable[[random.Random], bytes], seed: int
) -> None:
    chance = random.Random(seed)
    stream = stream_of(chance)
    whole = make()
    expected = whole.push(stream) + whole.end()
    assert expected
    for most in (1, 3, 50):
        framing, found, at = make(), list[Found](), 0
        while at < len(stream):
            step = chance.randint(1, most)
            found += framing.push(stream[at : at + step])
            at += step
        assert found + framing.end() == expected


@pytest.mark.parametrize("seed", range(10))
def test_who_goes_on_at_a_place_finds_the_records_that_follow(seed: int) -> None:
    stream = stream_of_lines(random.Random(seed))
    lines = Lines(20)
    found = lines.push(stream) + lines.end()
    for number, (_, location, why) in enumerate(found):
        again = Lines(20, location, skipping=why is not None)
        assert again.push(stream[location:]) + again.end() == found[number + 1 :]

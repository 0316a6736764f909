import pytest
from tests.operate.refusing import BEGIN, UNFIT, refused

from penstock.core.errors import Misconfigured
from penstock.core.record import Headers, Origin
from penstock.operate.dead_letters import Letter, Selection, count_reasons, dead_letters, letter_at
from penstock.testing import ManualClock, MemoryChannels

# --- reading ----------------------------------------------------------------------------------------------------------


def test_a_letter_tells_its_reason_its_origin_and_both_its_places() -> None:
    channels = MemoryChannels()
    refused(channels, 7, b"{x", key=b"k")
    (letter,) = dead_letters(channels, "rsvps.dead")
    assert (letter.reason, letter.origin) == (UNFIT, Origin("kiosk", 1, 7, BEGIN))
    assert (letter.at, letter.location) == ("rsvps.dead:0:0", "rsvps:0:100")
    assert (letter.value, letter.size, letter.cut, letter.came_back) == (b"{x", 2, False, False)


def test_a_letter_of_the_collector_tells_how_large_its_record_was() -> None:
    headers = [*Origin("feed", 2, 9, BEGIN).headers(), ("reason", b"it is too large"), ("size", b"70000")]
    letter = Letter.of(MemoryChannels().append("rsvps.dead", b"x" * 65_536, None, headers))
    assert (letter.location, letter.size, letter.cut) == (None, 70_000, True)


def test_a_null_is_null_and_not_empty_whatever_the_reason() -> None:
    channels = MemoryChannels()
    assert refused(channels, 1, None, "it has no key, and its channel is a table").value is None
    assert refused(channels, 2, b"", "it is not a JSON object").value == b""


@pytest.mark.parametrize(
    "headers",
    [
        (),
        (("sender", b"a"),),
        (("sender", b"a"), ("epoch", b"x"), ("seq", b"1"), ("time", b"1")),
        (("sender", b"\xff"), ("epoch", b"1"), ("seq", b"1"), ("time", b"1")),
        (("seq", b"1"), ("seq", b"2")),
    ],
)
def test_headers_that_tell_no_identity_are_no_obstacle(headers: Headers) -> None:
    letter = Letter.of(MemoryChannels().append("rsvps.dead", None, None, headers))
    assert (letter.origin, letter.reason, letter.value, letter.size) == (None, "no reason", None, 0)


@pytest.mark.parametrize("size", [b"", b"-1", b"1e9", b"\xd9\xa3", b"9" * 5_000, b"3"])
def test_a_size_that_makes_no_sense_is_not_believed(size: bytes) -> None:
    letter = Letter.of(MemoryChannels().append("rsvps.dead", b"four", None, [("size", size)]))
    assert (letter.size, letter.cut) == (4, False)


def test_a_reason_that_is_no_text_is_spelled_out() -> None:
    letter = Letter.of(MemoryChannels().append("rsvps.dead", b"", None, [("reason", b"a\xff")]))
    assert letter.reason == r"a\xff"


def test_the_headers_are_those_that_the_record_had() -> None:
    own = (("reason", b"of its own"), ("size", b"XL"), ("place", b"Rome"))
    assert list(refused(MemoryChannels(), None, own=own).headers) == list(own)


# --- choosing ---------------------------------------------------------------------------------------------------------


def test_letters_are_chosen_by_reason_sender_and_time() -> None:
    clock = ManualClock(BEGIN)
    channels = MemoryChannels(clock=clock)
    refused(channels, 1, reason='the field "guests" is missing')
    clock.move(60)
    refused(channels, 2)
    refused(channels, 3, sender="phone")
    refused(channels, None)

    def offsets(chosen: Selection) -> list[int]:
        return [letter.entry.offset for letter in dead_letters(channels, "rsvps.dead", chosen)]

    assert offsets(Selection(reason="GUESTS")) == [0]
    assert offsets(Selection(sender="kiosk")) == [0, 1]
    assert offsets(Selection(since=BEGIN + 1)) == [1, 2, 3]
    assert offsets(Selection(sender="kiosk", since=BEGIN + 1)) == [1]
    assert offsets(Selection(locations=frozenset({"rsvps.dead:0:1", "rsvps:0:102"}))) == [1, 2]
    assert offsets(Selection(sender="Kiosk")) == []


def test_reasons_are_counted_the_most_frequent_first() -> None:
    clock = ManualClock(BEGIN)
    channels = MemoryChannels(clock=clock)
    for seq in range(3):
        refused(channels, seq)
        clock.move(1)
    refused(channels, 4, reason="another", own=(("redriven", b"1"),))
    often, once = count_reasons(dead_letters(channels, "rsvps.dead"))
    assert (often.reason, often.count, often.first, often.last) == (UNFIT, 3, BEGIN, BEGIN + 2_000_000)
    assert (once.reason, once.count, once.came_back) == ("another", 1, 1)


def test_one_letter_is_found_by_its_place_and_by_that_of_its_record() -> None:
    channels = MemoryChannels(partitions=3)
    for seq in range(9):
        refused(channels, seq, key=b"k%d" % seq)
    for letter in dead_letters(channels, "rsvps.dead"):
        assert letter_at(channels, "rsvps.dead", letter.at) == letter
        assert letter_at(channels, "rsvps.dead", letter.location or "") == letter


@pytest.mark.parametrize("location", ["rsvps.dead:0:2", "rsvps.dead:7:0", "rsvps:0:99"])
def test_a_place_that_holds_no_letter_is_told_with_those_that_do(location: str) -> None:
    channels = MemoryChannels()
    refused(channels, 1)
    refused(channels, 2)
    told = location.removeprefix("rsvps.dead:")
    with pytest.raises(Misconfigured, match=f"there is no dead letter at {told}; it holds 0:0 to 0:1"):
        letter_at(channels, "rsvps.dead", location)


def test_an_empty_channel_holds_none() -> None:
    with pytest.raises(Misconfigured, match="it holds none"):
        letter_at(MemoryChannels(), "rsvps.dead", "rsvps.dead:0:0")

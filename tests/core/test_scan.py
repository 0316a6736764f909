"""What a channel holds, up to its end and no further."""

import pytest
from tests.audit.odd import Marked, Mute

from penstock.core.contracts import Channels
from penstock.core.errors import Unavailable
from penstock.core.scan import scan
from penstock.testing import MemoryChannels


def filled(channels: MemoryChannels, number: int = 20) -> MemoryChannels:
    for n in range(number):
        channels.append("totals", b"{}", b"%d" % n)
    return channels


def keys(channels: Channels, start: dict[int, int] | None = None) -> list[bytes]:
    return sorted((entry.key or b"" for entry in scan(channels, "totals", start)), key=int)


def test_a_channel_is_read_up_to_its_end_and_no_further() -> None:
    channels = filled(MemoryChannels(partitions=3))
    some = scan(channels, "totals")
    found = [next(some)]
    channels.append("other", b"{}")
    channels.append("totals", b"{}", b"20")
    found += some
    assert sorted(entry.key or b"" for entry in found) == sorted(b"%d" % n for n in range(20))


def test_what_came_before_the_reading_began_and_after_the_bounds_is_not_told() -> None:
    channels = filled(MemoryChannels())
    bounds = channels.bounds("totals")
    filled(channels)
    assert [entry.offset for entry in scan(channels, "totals", bounds=bounds)] == list(range(20))


def test_it_is_read_from_a_start_where_one_is_given() -> None:
    channels = filled(MemoryChannels(partitions=2))
    here = len([entry for entry in channels.entries("totals") if entry.partition == 0])
    rest = sorted((entry.key or b"" for entry in channels.entries("totals") if entry.partition == 1), key=int)
    assert keys(channels, {0: here}) == rest
    assert keys(channels, {0: here + 100}) == rest
    assert keys(channels, {5: 1}) == [b"%d" % n for n in range(20)]


def test_an_empty_channel_holds_nothing() -> None:
    assert list(scan(MemoryChannels(), "totals")) == []


def test_offsets_without_a_record_at_the_end_are_got_over() -> None:
    assert keys(filled(Marked(partitions=2))) == [b"%d" % n for n in range(20)]


def test_a_channel_that_does_not_give_what_it_holds_is_unavailable() -> None:
    some = scan(filled(Mute()), "totals")
    assert len([next(some) for _ in range(20)]) == 20
    with pytest.raises(Unavailable, match="totals is unavailable: it does not return all"):
        next(some)


def test_the_silence_of_a_broker_that_is_away_is_not_the_end() -> None:
    channels = Mute()
    some = scan(filled(channels), "totals")
    assert len([next(some) for _ in range(20)]) == 20
    channels.away = True
    with pytest.raises(Unavailable, match="it went away"):
        next(some)

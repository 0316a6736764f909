import pytest

from penstock.core.contracts import Entry
from penstock.core.errors import Misconfigured, Unavailable
from penstock.stores.loading import ahead_of, furthest, require_kept, require_topic


def entry(partition: int, offset: int) -> Entry:
    return Entry("rsvps", partition, offset, 0, None, b"", ())


def test_entries_before_the_positions_were_applied() -> None:
    some = [entry(0, 4), entry(0, 5), entry(1, 0), entry(2, 9)]
    assert ahead_of({0: 5, 2: 10}, some) == [entry(0, 5), entry(1, 0)]


def test_positions_never_go_back() -> None:
    assert furthest({0: 5, 1: 3}, {0: 4, 1: 7, 2: 1}) == {0: 5, 1: 7, 2: 1}


def test_a_store_that_went_back_is_noticed() -> None:
    require_kept("Redis", {0: 5}, {0: 6, 1: 1})
    with pytest.raises(Unavailable, match="it went back from 5 to 0 in partition 0"):
        require_kept("Redis", {0: 5}, {1: 9})


@pytest.mark.parametrize(("remembered", "topic_id"), [(None, "a"), ("a", ""), ("a", "a")])
def test_the_same_topic_or_none_is_welcome(remembered: str | None, topic_id: str) -> None:
    require_topic("Redis", "rsvps", remembered, topic_id, "empty it")


def test_another_topic_of_the_same_name_is_not() -> None:
    with pytest.raises(Misconfigured, match=r"another topic named rsvps \(a, now b\); empty it"):
        require_topic("Redis", "rsvps", "a", "b", "empty it")

"""What all stores share."""

from contextlib import closing
from pathlib import Path

import pytest
from tests.servers import RedisServer
from tests.stores.lakes import LoadedLake

from penstock.core.contracts import Entry
from penstock.core.errors import Misconfigured, Unavailable
from penstock.stores.base import Stored, ahead_of, furthest, require_kept, require_topic
from penstock.stores.lake import LakeStore
from penstock.stores.redis import RedisStore


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


ENTRIES = [
    Entry("live", 0, 0, 1, b'["a"]', b'{"n":1}', (("version", b"1"),)),
    Entry("live", 1, 0, 1, b'["b"]', b'{"n":2}', ()),
    Entry("live", 0, 1, 1, b'["a"]', b'{"n":3}', (("version", b"2"),)),
    Entry("live", 0, 2, 1, b'["c"]', b'{"n":4}', (("version", b"1"),)),
    Entry("live", 0, 3, 1, b'["c"]', None, (("version", b"2"),)),
]


def test_a_live_table_is_read_with_keys_and_versions(redis_server: RedisServer) -> None:
    store = RedisStore(redis_server.url, "live")
    with closing(store.open()) as table, closing(RedisStore(redis_server.url, "lively").open()) as other:
        table.write(ENTRIES, {})
        other.write(ENTRIES, {})
    assert list(store.rows()) == [Stored(b'{"n":3}', b'["a"]', 2), Stored(b'{"n":2}', b'["b"]', None)]
    assert store.stands() == {0: 4, 1: 1}


def test_a_lake_is_read_in_the_order_of_its_channel(tmp_path: Path) -> None:
    store = LakeStore(str(tmp_path), "live")
    table = LoadedLake(store).open()
    table.write(ENTRIES[:2], {})
    table.write(ENTRIES[2:], {})
    assert [one.row for one in store.rows()] == [b'{"n":1}', b'{"n":3}', b'{"n":4}', b'{"n":2}']
    assert store.stands() == {0: 4, 1: 1}


def test_a_store_that_is_not_there_holds_nothing_and_is_not_made(tmp_path: Path) -> None:
    store = LakeStore(str(tmp_path / "lake"), "live")
    assert (list(store.rows()), store.stands()) == ([], {})
    assert not (tmp_path / "lake").exists()


def test_a_redis_that_is_away_is_named() -> None:
    with pytest.raises(Unavailable, match=r"Redis at 127\.0\.0\.1:1 is unavailable"):
        list(RedisStore("redis://127.0.0.1:1/0", "live").rows())

"""What all stores share."""

import json
from contextlib import closing
from pathlib import Path

import pytest
from tests.servers import RedisServer
from tests.stores.lakes import LoadedLake

from penstock.audit.account import Account, Outcome, Share
from penstock.core.contracts import Entry
from penstock.core.errors import Misconfigured, Unavailable
from penstock.stores.base import Progress, Stored, Totals, furthest, require_kept, require_topic
from penstock.stores.lake import LakeStore
from penstock.stores.redis import RedisStore
from penstock.testing import ManualClock


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


NONE = {Outcome.PASSED: 0, Outcome.DUPLICATE: 0, Outcome.REFUSED: 0}


def test_nothing_is_a_share_of_nothing() -> None:
    assert Totals().share({}) == Share({}, {}, 0, NONE)


def test_a_partition_of_which_nothing_was_loaded_is_counted_from_where_it_is_read() -> None:
    assert Totals({0: 0}).share({0: 5, 1: 7}) == Share({0: 5, 1: 7}, {0: 5, 1: 7}, 0, NONE)


def test_what_was_loaded_before_it_was_counted_is_not_counted() -> None:
    assert Totals({0: 40}).share({0: 40}) == Share({0: 40}, {0: 40}, 0, NONE)


def test_a_batch_adds_up() -> None:
    totals = Totals({0: 40}).after({0: 43, 1: 9}, {0: 40, 1: 7}, {Outcome.PASSED: 3, Outcome.REFUSED: 2})
    assert totals.since == {0: 40, 1: 7}
    totals = totals.after({0: 44, 1: 9}, {0: 43, 1: 9}, {Outcome.DUPLICATE: 1})
    outcomes = {Outcome.PASSED: 3, Outcome.DUPLICATE: 1, Outcome.REFUSED: 2}
    assert totals.share({}) == Share({0: 40, 1: 7}, {0: 44, 1: 9}, 6, outcomes)


def test_what_the_channel_lost_before_the_first_entry_was_loaded_is_not_due() -> None:
    """A partition stood at its beginning, was empty, and begins later now."""
    totals = Totals().after({0: 0}, {0: 0}, {}).after({0: 101}, {0: 100}, {Outcome.PASSED: 1})
    assert totals.share({}).since == {0: 100}


def test_the_account_is_what_the_store_reported_last() -> None:
    clock = ManualClock(5)
    progress, share = Progress("rsvps", clock), Share({0: 0}, {0: 7}, 7)
    assert progress.account("store:redis/rsvps") is None
    progress.set_totals(Share({}, {}, 0), "none")
    progress.set_totals(share, "one")
    clock.move(1)
    expected = Account("store:redis/rsvps", "one", 5, {"rsvps": share}, step=7)
    assert progress.account("store:redis/rsvps") == expected
    progress.stored(1, 1, 0, [5])
    account = progress.account("store:redis/rsvps")
    assert account is not None
    assert account.latency == progress.to_json()["latency"]
    assert account.latency is not None


def test_the_figures_are_told_as_json_can_hold_them() -> None:
    clock = ManualClock(now=1_000_000_000)
    progress = Progress("rsvps", clock)
    progress.set_lag(10)
    clock.move(2)
    progress.stored(3, rows=2, refused=1, times=[1_001_000_000])
    progress.set_state("waiting", "Redis is away")
    told = json.loads(json.dumps(progress.to_json()))
    assert (told["count"], told["rate"], told["refused"], told["lag"]) == (2, 1.0, 1, 7)
    assert (told["state"], told["why"]) == ("waiting", "Redis is away")
    assert (told["latency"]["count"], told["latency"]["max"]) == (1, 1_000)

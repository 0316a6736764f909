"""What stores hold, read back."""

from contextlib import closing
from pathlib import Path

import pytest
from tests.servers import RedisServer
from tests.stores.lakes import LoadedLake

from penstock.core.contracts import Entry
from penstock.core.errors import Unavailable
from penstock.stores.contents import Stored
from penstock.stores.lake import LakeStore
from penstock.stores.redis import RedisStore

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

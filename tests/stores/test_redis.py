import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import redis
from tests.damaging import filled, small_disk
from tests.servers import RedisServer

from penstock.audit.account import Outcome
from penstock.core.contracts import Entry
from penstock.core.errors import Misconfigured, Unavailable
from penstock.stores.redis import RedisStore, RedisTable

LONG_AGO = 1_600_000_000_000_000


def now() -> int:
    return time.time_ns() // 1_000


class Table:
    """A store and the offset that comes next."""

    def __init__(self, store: RedisTable, client: redis.Redis) -> None:
        self.store = store
        self.client = client
        self._offset = 0

    def put(
        self, key: bytes | None, value: bytes | None, version: int | None = None, appended: int | None = None
    ) -> int:
        headers = () if version is None else (("version", b"%d" % version),)
        entry = Entry("live", 0, self._offset, now() if appended is None else appended, key, value, headers)
        self._offset += 1
        return self.store.write([entry], {0: self._offset})

    def row(self, key: str) -> str | None:
        found = self.client.hget(f"penstock:live:row:{key}", "row")
        return found.decode() if isinstance(found, bytes) else found

    def index(self) -> list[str]:
        return [key.decode() for key in self.client.zrange("penstock:live:index", 0, -1) if isinstance(key, bytes)]


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    with redis_server.client() as client:
        yield client


@pytest.fixture
def table(redis_server: RedisServer, client: redis.Redis) -> Iterator[Table]:
    store = RedisStore(redis_server.url, "live").open()
    yield Table(store, client)
    store.close()


@pytest.fixture
def perishable(redis_server: RedisServer, client: redis.Redis) -> Iterator[Table]:
    store = RedisStore(redis_server.url, "live", ttl=timedelta(hours=1)).open()
    yield Table(store, client)
    store.close()


def test_an_older_version_never_wins(table: Table) -> None:
    assert table.put(b"nl", b"five", 5) == 1
    assert table.put(b"nl", b"four", 4) == 0
    assert table.put(b"nl", b"five again", 5) == 0
    assert table.row("nl") == "five"
    assert table.put(b"nl", b"ten", 10) == 1
    assert table.row("nl") == "ten"
    assert table.client.hget("penstock:live:row:nl", "version") == b"10"


def test_rows_without_a_version_apply_in_order(table: Table) -> None:
    table.put(b"nl", b"one", 7)
    table.put(b"nl", b"two")
    table.put(b"nl", b"three", 1)
    assert table.row("nl") == "three"


def test_a_null_deletes(table: Table) -> None:
    table.put(b"nl", b"one")
    assert table.index() == ["nl"]
    assert table.put(b"nl", None) == 1
    assert table.row("nl") is None
    assert table.index() == []
    assert not table.client.exists("penstock:live:row:nl")


def test_an_older_row_does_not_come_back_after_its_deletion(table: Table) -> None:
    table.put(b"nl", b"five", 5)
    table.put(b"nl", None, 6)
    assert table.put(b"nl", b"four", 4) == 0
    assert table.row("nl") is None
    assert table.index() == []
    assert 0 < int(table.client.pttl("penstock:live:row:nl")) <= 86_400_000


def test_a_row_that_follows_a_deletion_stays(table: Table) -> None:
    table.put(b"nl", None, 6)
    table.put(b"nl", b"seven", 7)
    assert table.row("nl") == "seven"
    assert table.client.pttl("penstock:live:row:nl") == -1


def test_an_old_deletion_does_not_take_a_newer_row(table: Table) -> None:
    table.put(b"nl", b"five", 5)
    assert table.put(b"nl", None, 4) == 0
    assert table.row("nl") == "five"


def test_a_row_lives_on_from_the_time_it_was_appended(perishable: Table) -> None:
    perishable.put(b"nl", b"one", appended=now() - 1_800_000_000)
    left = int(perishable.client.pttl("penstock:live:row:nl"))
    assert 1_700_000 < left <= 1_800_000
    perishable.put(b"nl", b"two")
    assert int(perishable.client.pttl("penstock:live:row:nl")) > 3_500_000


def test_what_has_perished_before_it_is_loaded_is_not_shown(perishable: Table) -> None:
    perishable.put(b"nl", b"one", appended=LONG_AGO)
    assert perishable.row("nl") is None
    assert perishable.index() == []


def test_the_index_names_the_newest_last(table: Table) -> None:
    table.put(b"a", b"", appended=LONG_AGO + 1)
    table.put(b"b", b"", appended=LONG_AGO + 3)
    table.put(b"c", b"", appended=LONG_AGO + 2)
    assert table.index() == ["a", "c", "b"]


def test_what_has_no_key_is_named_by_its_place(table: Table) -> None:
    table.put(None, b"one")
    assert table.row("0-0") == "one"


def test_a_redis_that_lost_its_last_rows_is_filled_again(table: Table) -> None:
    """Without this, a server that came back with an older state would miss rows silently."""
    table.put(b"nl", b"one")
    table.client.flushall()
    with pytest.raises(Unavailable, match="it went back from 1 to 0 in partition 0"):
        table.put(b"nl", b"two")
    assert table.store.positions() == {}
    assert table.row("nl") is None


def test_a_deletion_that_is_applied_has_passed(table: Table) -> None:
    table.put(b"nl", b"five", 5)
    table.put(b"nl", None, 6)
    table.put(b"nl", None, 6)
    share = table.store.share()
    assert (share.taken, share.outcomes[Outcome.PASSED], share.outcomes[Outcome.DUPLICATE]) == (3, 2, 1)


def test_a_table_from_before_it_counted_counts_from_where_it_stands(table: Table) -> None:
    table.client.hset("penstock:live:positions", mapping={"0": 40, "1": 9_000_000_000_000_000, "topic": "t"})
    share = table.store.share()
    assert (share.since, share.until, share.taken) == (dict(share.until), {0: 40, 1: 9_000_000_000_000_000}, 0)
    table.store.positions()
    some = [Entry("live", 0, n, now(), b"%d" % n, b"{}", ()) for n in (38, 39, 40, 41)]
    assert table.store.write(some, {0: 42, 1: 9_000_000_000_000_001}) == 2
    share = table.store.share()
    assert (share.since, share.until) == (
        {0: 40, 1: 9_000_000_000_000_000},
        {0: 42, 1: 9_000_000_000_000_001},
    )
    assert share.taken == 2


def test_a_redis_that_was_emptied_has_another_life(table: Table) -> None:
    table.put(b"nl", b"one")
    first = table.store.generation
    assert table.client.hget("penstock:live:positions", "life") == first.encode()
    table.client.flushall()
    assert table.store.share().taken == 0
    second = table.store.generation
    assert second != first
    assert table.store.share().until == {}
    assert table.store.generation == second
    table.store.positions()
    table.put(b"nl", b"two")
    assert table.store.share().taken == 1
    assert table.store.generation == second


def test_a_large_batch_is_one_step(table: Table) -> None:
    entries = [Entry("live", 0, n, now(), b"%d" % n, b"{}", (("version", b"1"),)) for n in range(5_000)]
    assert table.store.write(entries, {0: 5_000}) == 5_000
    assert table.client.zcard("penstock:live:index") == 5_000


def test_a_server_that_is_away_is_unavailable(own_redis: RedisServer) -> None:
    store = RedisStore(own_redis.url, "live").open()
    own_redis.kill()
    with pytest.raises(Unavailable, match=rf"Redis at 127\.0\.0\.1:{own_redis.port} is unavailable"):
        store.positions()
    own_redis.start()
    assert store.positions() == {}
    store.close()


def test_what_was_acknowledged_survives_the_death_of_the_server(own_redis: RedisServer) -> None:
    store = RedisStore(own_redis.url, "live").open()
    assert store.write([Entry("live", 0, 0, now(), b"nl", b"one", ())], {0: 1}) == 1
    own_redis.kill()
    own_redis.start()
    assert store.positions() == {0: 1}
    store.close()


def test_a_wrong_password_is_told_with_the_fix_and_without_the_password(own_redis: RedisServer) -> None:
    with own_redis.client() as client:
        client.config_set("requirepass", "right")
    store = RedisStore(own_redis.url.replace("//", "//:wrong@"), "live").open()
    with pytest.raises(Misconfigured, match="check user and password") as caught:
        store.positions()
    assert "wrong" not in str(caught.value)
    store.close()


def test_an_address_that_is_none_is_told() -> None:
    with pytest.raises(Misconfigured, match="the URL of Redis"):
        RedisStore("http://localhost", "live").open()


def test_a_row_that_was_damaged_is_missing_until_it_is_written_again(table: Table) -> None:
    table.put(b"nl", b"one", 1)
    table.put(b"be", b"one", 1)
    table.client.delete("penstock:live:row:nl")
    table.client.set("penstock:live:row:nl", "no hash")
    table.client.hset("penstock:live:row:be", "version", "no number")
    assert [kept.row for kept in table.store.kept([b"nl", b"be"])[1]] == [None, b"one"]
    assert [stored.key for stored in table.store.rows()] == [b"be"]
    assert table.put(b"nl", b"two", 2) == 1
    assert table.put(b"be", b"two", 2) == 1
    assert (table.row("nl"), table.row("be")) == ("two", "two")


def test_a_record_from_the_end_of_time_does_not_stop_the_table(perishable: Table) -> None:
    assert perishable.put(b"nl", b"one", appended=2**63 * 1_000) == 1
    assert perishable.row("nl") == "one"


@pytest.mark.parametrize("field", ["0", "since:0", "taken"])
def test_damaged_positions_are_named_and_repaired_by_deleting_the_table(table: Table, field: str) -> None:
    table.put(b"nl", b"one", 1)
    table.client.hset("penstock:live:positions", field, "no number")
    with pytest.raises(Unavailable) as raised:
        table.store.positions()
    assert "penstock:live:positions" in raised.value.reason
    for name in table.client.scan_iter("penstock:live:*"):
        table.client.delete(name)
    assert table.store.positions() == {}


def test_a_server_whose_disk_is_full_is_waited_for(tmp_path: Path, eventually: Callable[..., None]) -> None:
    with small_disk(tmp_path / "disk", 16) as disk:
        server = RedisServer(disk)
        server.start()
        store = RedisStore(server.url, "live").open()
        with server.client() as client:
            table, value = Table(store, client), b"x" * 100_000

            def refused() -> bool:
                try:
                    table.put(b"key", value)
                except Unavailable:
                    return True
                return False

            with filled(disk):
                eventually(refused)
            eventually(lambda: not refused())
            assert table.row("key") == value.decode()
        store.close()
        server.kill()

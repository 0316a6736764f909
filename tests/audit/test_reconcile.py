"""Stores compared with their channels: what is found, and what is no finding. Real Redis, Delta and Kafka."""

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import pyarrow.parquet as parquet  # type: ignore[import-untyped]  # it ships no types
import pytest
from deltalake import DeltaTable, write_deltalake
from tests.servers import RedisServer
from tests.stores.lakes import LoadedLake
from tests.stores.tampering import LakeTampering, RedisTampering

from penstock.audit.judge import Discrepancy
from penstock.audit.reconcile import Check, Reconciler, RecordCheck, TableCheck
from penstock.channels.kafka import Kafka
from penstock.core.clock import SystemClock
from penstock.core.contracts import Channels, Topic
from penstock.core.errors import Unavailable
from penstock.core.record import Headers, Origin, Record
from penstock.stores.base import Loadable
from penstock.stores.lake import LakeStore
from penstock.stores.lake_rows import LakeRows
from penstock.stores.loader import Loader
from penstock.stores.redis import RedisStore
from penstock.testing import MemoryChannels

Fresh = Callable[[str], str]
Eventually = Callable[..., None]
CHANNEL = "rsvps"
NOW = SystemClock().now()


@pytest.fixture
def redis_server(shared_redis: RedisServer) -> RedisServer:
    with shared_redis.client() as client:
        client.flushall()
    return shared_redis


def numbered(seq: int) -> Headers:
    return Origin("kiosk", 1, seq, NOW).headers()


def filled(rows: int = 300, partitions: int = 2) -> MemoryChannels:
    channels = MemoryChannels(partitions=partitions)
    for seq in range(1, rows + 1):
        channels.append(CHANNEL, b'{"n": %d}' % seq, b"k%d" % (seq % 50), [*numbered(seq), ("version", b"%d" % seq)])
    return channels


def load(channels: Channels, store: Loadable, channel: str = CHANNEL) -> None:
    """Fill a store up to the end of its channel."""
    done = {at: end for at, (_, end) in channels.bounds(channel).items() if end}
    opened, stop = store.open(), threading.Event()
    loader = threading.Thread(target=Loader(channels, channel, store).run, args=(stop,))
    loader.start()
    while {at: end for at, end in opened.positions().items() if end} != done:
        stop.wait(0.02)
    stop.set()
    loader.join()
    opened.close()


def lake(folder: Path, typed: bool = True) -> LoadedLake:
    return LoadedLake(LakeStore(str(folder / "lake"), CHANNEL), typed, every=timedelta(milliseconds=5))


def lake_check(store: LoadedLake, channels: Channels) -> RecordCheck:
    return RecordCheck("store:delta/rsvps", CHANNEL, LakeRows(store.path, CHANNEL), channels, f"{CHANNEL}.dead")


def table_check(store: RedisStore, channels: Channels, channel: str = CHANNEL) -> TableCheck:
    return TableCheck("store:redis/rsvps", channel, store.open(), channels, SystemClock())


def compared(check: Check, times: int = 3) -> Sequence[Discrepancy]:
    for _ in range(times):
        check.turn()
    return check.discrepancies()


def kinds(found: Sequence[Discrepancy]) -> list[tuple[str, int]]:
    return [(one.kind, one.count) for one in found]


def named(found: Sequence[Discrepancy], *kinds: str) -> Discrepancy:
    """The finding of the first kind, when there is one of each kind."""
    by_kind = {one.kind: one for one in found}
    assert sorted(kinds) == sorted(one.kind for one in found)
    return by_kind[kinds[0]]  # type: ignore[index]


# --- a lake


@pytest.mark.parametrize("watching", [True, False])
def test_a_changed_value_is_found_by_its_commit(tmp_path: Path, watching: bool) -> None:
    """Only `--deep`, which compares values, saw a value that was changed."""
    channels, store = filled(), lake(tmp_path)
    load(channels, store)
    check = lake_check(store, channels)
    if watching:
        assert compared(check) == ()
    table = DeltaTable(store.path)
    table.update(predicate="_partition = 1 AND _offset = 7", updates={"n": "-1"})
    (found,) = compared(check)
    assert (found.kind, found.stage, found.count) == ("changed", "store:delta/rsvps", 300)
    (example,) = found.examples
    assert example.startswith(f"version {table.version()} wrote part-")
    last = {at: end - 1 for at, (_, end) in channels.bounds(CHANNEL).items()}
    assert example.endswith(f": partition 0, offsets 0–{last[0]}; partition 1, offsets 0–{last[1]}")


def test_a_foreign_commit_stays_a_finding_when_files_are_put_together(tmp_path: Path) -> None:
    channels, store = filled(), lake(tmp_path)
    load(channels, store)
    check = lake_check(store, channels)
    DeltaTable(store.path).update(predicate="_partition = 1 AND _offset = 7", updates={"n": "-1"})
    before = compared(check)
    store.open().table.compact()
    assert compared(check) == before
    assert compared(lake_check(store, channels))[0].kind == "changed"


def test_a_foreign_commit_that_is_undone_is_no_finding(tmp_path: Path) -> None:
    channels, store = filled(), lake(tmp_path)
    load(channels, store)
    check, version = lake_check(store, channels), DeltaTable(store.path).version()
    DeltaTable(store.path).delete()
    named(compared(check), "changed", "missing")
    DeltaTable(store.path).restore(version)
    assert compared(check) == ()


def test_a_commit_that_changes_no_data_is_no_finding(tmp_path: Path) -> None:
    channels, store = filled(), lake(tmp_path)
    load(channels, store)
    table = DeltaTable(store.path)
    table.optimize.compact()
    table.vacuum(0, dry_run=False, enforce_retention_duration=False)
    table.alter.set_table_properties({"delta.checkpointInterval": "40"})
    table.create_checkpoint()
    assert compared(lake_check(store, channels)) == ()


@pytest.mark.parametrize("watching", [True, False])
def test_a_file_that_was_modified_after_its_commit_is_a_finding(tmp_path: Path, watching: bool) -> None:
    channels, store = filled(), lake(tmp_path)
    load(channels, store)
    check = lake_check(store, channels)
    if watching:
        assert compared(check) == ()
    file = next(Path(store.path).glob("*.parquet"))
    rows = parquet.read_table(file)
    at = rows.column_names.index("n")
    parquet.write_table(rows.set_column(at, rows.field(at), [[-1] * len(rows)]), file, compression="NONE")
    (found,) = compared(check)
    assert (found.kind, found.count) == ("changed", 1)
    assert file.name in found.text


def test_a_row_that_was_missing_before_the_first_look_is_named_by_its_number(tmp_path: Path) -> None:
    """A row deleted from the lake was no finding, nor was one appended twice."""
    channels, store = filled(), lake(tmp_path)
    load(channels, store)
    gone = next(entry for entry in channels.entries(CHANNEL) if entry.offset == 7 and entry.partition == 1)
    DeltaTable(store.path).delete("_partition = 1 AND _offset = 7")
    found = named(compared(lake_check(store, channels)), "missing", "changed")
    origin = Origin.read(gone.headers)
    assert origin is not None
    assert (found.count, found.stage) == (1, "store:delta/rsvps")
    assert found.examples == (f"partition 1, offset 7 (kiosk/1: {origin.seq})",)


def test_what_was_refused_or_came_twice_is_not_missing(tmp_path: Path) -> None:
    channels, store = filled(partitions=1), lake(tmp_path)
    channels.append(CHANNEL, b'{"n": 5}', b"k5", numbered(5))
    channels.append(CHANNEL, b'{"n": "x"}', b"k", numbered(900))
    channels.append(f"{CHANNEL}.dead", b'{"n": "x"}', b"k", [*numbered(900), ("place", b"rsvps:0:301")])
    load(channels, store)
    check = lake_check(store, channels)
    assert compared(check) == ()
    DeltaTable(store.path).delete("_offset = 11")
    found = named(compared(lake_check(store, channels)), "missing", "changed")
    assert (found.count, found.examples) == (1, ("partition 0, offset 11 (kiosk/1: 12)",))


def test_a_row_that_is_there_twice_is_named_and_forgotten_when_it_is_not(tmp_path: Path) -> None:
    channels, store = filled(), lake(tmp_path)
    load(channels, store)
    check, tampering = lake_check(store, channels), LakeTampering(store.path)
    assert compared(check) == ()
    harm = tampering.harm("doubled", random.Random(1))
    found = named(compared(check), "doubled", "changed")
    assert (found.count, found.examples) == (1, (harm.name,))
    harm.heal()
    assert compared(check) == ()


def test_files_put_together_are_no_finding(tmp_path: Path) -> None:
    channels, store = filled(), lake(tmp_path)
    load(channels, store)
    table = store.open()
    check = lake_check(store, channels)
    assert compared(check) == ()
    for seq in range(301, 305):
        channels.append(CHANNEL, b'{"n": %d}' % seq, b"k", numbered(seq))
        entries = [entry for entry in channels.entries(CHANNEL) if entry.offset >= table.positions()[entry.partition]]
        table.write(entries, {})
        assert compared(check, 2) == ()
    table.table.compact()
    assert compared(check) == ()


def test_a_file_that_is_gone_or_damaged_is_named(tmp_path: Path) -> None:
    channels, store = filled(), lake(tmp_path)
    load(channels, store)
    check = lake_check(store, channels)
    assert compared(check) == ()
    file = next(Path(store.path).glob("*.parquet"))
    kept, times = file.read_bytes(), file.stat()
    file.write_bytes(b"x" * 100)
    assert any(file.name in one.text for one in compared(check))
    file.unlink()
    found = compared(check)
    assert any(file.name in one.text for one in found)
    assert "missing" in [one.kind for one in found]
    file.write_bytes(kept)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert compared(check) == ()


def test_a_row_of_no_loaded_record_is_a_finding(tmp_path: Path) -> None:
    channels, store = filled(), lake(tmp_path)
    load(channels, store)
    table = DeltaTable(store.path)
    row = table.to_pyarrow_table(filters=[("_offset", "=", 3)]).slice(0, 1)
    at = row.column_names.index("_offset")
    write_deltalake(table, row.set_column(at, row.field(at), [[10_000]]), mode="append")
    found = named(compared(lake_check(store, channels)), "forged", "changed")
    assert found.count == 1
    assert found.examples[0].endswith("offset 10000")


def test_a_lake_that_is_not_there_yet_holds_nothing(tmp_path: Path) -> None:
    check = lake_check(lake(tmp_path), filled())
    assert compared(check) == ()
    assert check.complete


# --- a live table


def test_a_removed_and_a_changed_row_are_named_until_they_are_mended(redis_server: RedisServer) -> None:
    """Both were silent."""
    channels, store = filled(), RedisStore(redis_server.url, CHANNEL)
    load(channels, store)
    check = table_check(store, channels)
    assert compared(check) == ()
    with redis_server.client() as client:
        client.delete("penstock:rsvps:row:k7")
        client.hset("penstock:rsvps:row:k9", "row", b'{"n": 1}')
        found = {one.kind: one for one in compared(check)}
        assert found["missing"].examples == ("key k7, version 257",)
        assert found["changed"].examples == ("key k9, version 259",)
        channels.append(CHANNEL, b'{"n": 307}', b"k7", [("version", b"307")])
        channels.append(CHANNEL, b'{"n": 309}', b"k9", [("version", b"309")])
        load(channels, store)
        assert compared(check) == ()
    check.close()


def test_rows_are_compared_while_they_change(redis_server: RedisServer, eventually: Eventually) -> None:
    """Whatever the loader does meanwhile, there is no false alarm; and what is removed then is found."""
    channels = filled()
    store = RedisStore(redis_server.url, CHANNEL, every=timedelta(milliseconds=2))
    stop, version = threading.Event(), 1_000
    loader = threading.Thread(target=Loader(channels, CHANNEL, store).run, args=(stop,))
    loader.start()
    check = table_check(store, channels)
    for _ in range(60):
        for _ in range(200):
            version += 1
            value = None if version % 17 == 0 else b'{"n": %d}' % version
            channels.append(CHANNEL, value, b"k%d" % (version % 40), [("version", b"%d" % version)])
        assert compared(check, 1) == ()
    channels.append(CHANNEL, b"{}", b"still", [("version", b"1")])
    with redis_server.client() as client:
        eventually(lambda: client.exists("penstock:rsvps:row:still"))
        client.delete("penstock:rsvps:row:still")
    assert kinds(compared(check)) == [("missing", 1)]
    stop.set()
    loader.join()
    check.close()


def test_rows_that_perish_in_time_and_rows_that_are_deleted_are_not_missing(redis_server: RedisServer) -> None:
    channels, store = filled(20), RedisStore(redis_server.url, CHANNEL, timedelta(hours=1))
    channels.append(CHANNEL, None, b"k3", [("version", b"500")])
    load(channels, store)
    assert compared(table_check(store, channels)) == ()
    short = RedisStore(redis_server.url, CHANNEL, timedelta(seconds=3))
    with redis_server.client() as client:
        client.flushall()
    load(channels, short)
    with redis_server.client() as client:
        client.delete("penstock:rsvps:row:k7")
    assert compared(table_check(short, channels)) == (), "it is about to perish"
    with redis_server.client() as client:
        client.flushall()


def test_rows_that_perish_by_an_earlier_time_to_live_are_not_missing(redis_server: RedisServer) -> None:
    channels = filled(20)
    load(channels, RedisStore(redis_server.url, CHANNEL, timedelta(hours=1)))
    longer = RedisStore(redis_server.url, CHANNEL, timedelta(days=1))
    with redis_server.client() as client:
        client.delete("penstock:rsvps:row:k3")  # As when its hour is over.
        assert compared(table_check(longer, channels)) == ()
        channels.append(CHANNEL, b"{}", b"k4", [("version", b"500")])
        load(channels, longer)
        assert compared(table_check(longer, channels)) == ()
        time.sleep(0.01)
        channels.append(CHANNEL, b"{}", b"k5", [("version", b"501")])
        load(channels, longer)
        client.delete("penstock:rsvps:row:k5")
        assert kinds(compared(table_check(longer, channels))) == [("missing", 1)]


def test_a_deleted_row_that_is_there_again_is_changed(redis_server: RedisServer) -> None:
    channels, store = filled(20), RedisStore(redis_server.url, CHANNEL)
    channels.append(CHANNEL, None, b"k3", [("version", b"500")])
    load(channels, store)
    with redis_server.client() as client:
        client.hset("penstock:rsvps:row:k3", "row", b"{}")
    assert kinds(compared(table_check(store, channels))) == [("changed", 1)]


def test_a_table_that_went_back_is_waited_for(redis_server: RedisServer) -> None:
    channels, store = filled(), RedisStore(redis_server.url, CHANNEL)
    load(channels, store)
    check = table_check(store, channels)
    assert compared(check) == ()
    with redis_server.client() as client:
        client.flushall()
    assert compared(check) == ()
    assert not check.complete
    load(channels, store)
    assert compared(check) == ()
    assert check.complete
    check.close()


def test_rows_without_key_and_version_are_compared_too(redis_server: RedisServer) -> None:
    channels, store = MemoryChannels(), RedisStore(redis_server.url, CHANNEL)
    for number in range(5):
        channels.append(CHANNEL, b"%d" % number, None if number % 2 else b"k")
    load(channels, store)
    with redis_server.client() as client:
        client.delete("penstock:rsvps:row:0-1")
    (found,) = compared(table_check(store, channels))
    assert found.examples == ("key 0-1",)


def test_a_value_written_again_under_one_version_is_as_good_as_the_first(redis_server: RedisServer) -> None:
    channels, store = MemoryChannels(), RedisStore(redis_server.url, CHANNEL)
    channels.append(CHANNEL, b"1.0", b"k", [("version", b"3")])
    load(channels, store)
    channels.append(CHANNEL, b"1.00000001", b"k", [("version", b"3")])
    load(channels, store)
    with redis_server.client() as client:
        client.hset("penstock:rsvps:row:k", "row", b"1.00000001")
    assert compared(table_check(store, channels)) == ()


def test_it_works_on_kafka(kafka: Kafka, fresh: Fresh, redis_server: RedisServer) -> None:
    channel = fresh("result")
    kafka.ensure([Topic(channel, 2, compacted=True)])

    async def send() -> None:
        rows = [Record(b'{"n": %d}' % n, None, b'["%d"]' % (n % 20), [("version", b"%d" % n)]) for n in range(100)]
        async with kafka.sender() as sender:
            await sender.send(channel, rows)

    asyncio.run(send())
    store = RedisStore(redis_server.url, channel)
    load(kafka, store, channel)
    check = table_check(store, kafka, channel)
    assert compared(check) == ()
    with redis_server.client() as client:
        harm = RedisTampering(client, channel).harm("missing", random.Random(2))
    (found,) = compared(check)
    assert found.kind == "missing"
    assert harm.name in found.examples[0]
    check.close()


# --- all of them


class Away:
    stage, complete = "store:x", False

    def turn(self) -> None:
        raise Unavailable("x", "it is away")

    def discrepancies(self) -> tuple[Discrepancy, ...]:
        return ()

    def close(self) -> None: ...


def test_a_store_that_is_not_compared_is_a_doubt(tmp_path: Path) -> None:
    store, elapsed = lake(tmp_path), [0.0]
    channels = filled()
    load(channels, store)
    reconciler = Reconciler([Away, lambda: lake_check(store, channels)], ["store:x", "store:y"], lambda: elapsed[0])
    assert [doubt.subject for doubt in reconciler.doubts] == ["store:x", "store:y"]
    reconciler.turn()
    assert [(doubt.kind, doubt.subject) for doubt in reconciler.doubts] == [("store", "store:x")]
    elapsed[0] = 60
    reconciler.turn()
    assert "away" in reconciler.doubts[0].text
    reconciler.close()


def test_a_check_that_cannot_report_does_not_stop_the_others() -> None:
    class Broken:
        stage, complete = "store:x", False

        def turn(self) -> None:
            pass

        def discrepancies(self) -> tuple[Discrepancy, ...]:
            raise ValueError("broken")

        def close(self) -> None:
            pass

    class Whole(Broken):
        stage, complete = "store:y", True

        def discrepancies(self) -> tuple[Discrepancy, ...]:
            return (Discrepancy("missing", "store:y", 1, "one row is missing"),)

    reconciler = Reconciler([Broken, Whole], ["store:x", "store:y"])
    for _ in range(2):
        reconciler.turn()
        assert [one.stage for one in reconciler.discrepancies] == ["store:y"]
        assert [doubt.subject for doubt in reconciler.doubts] == ["store:x"]

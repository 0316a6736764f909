"""Channels in SQLite: addresses, senders, damage, cleaning, processes that die. The rest is in the contract."""

import asyncio
import os
import pickle
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path
from random import Random

import pytest
from tests.channels.traffic import Noted, eventually, everything, lines, number, numbered, numbers, process, read, send

from penstock.channels.binders import bind
from penstock.channels.sqlite import SqliteChannels, at
from penstock.channels.sqlite.database import Connect, Database, connect, encode, translate
from penstock.channels.sqlite.repairing import DamagedLog, damaged_logs
from penstock.channels.sqlite.sending import SqliteSender
from penstock.core.clock import SystemClock
from penstock.core.contracts import EnsureResult, Entry, Reader, Topic
from penstock.core.errors import Misconfigured, PenstockError, Refused, Unaccounted, Unavailable
from penstock.core.record import Origin, Record

HOUR = 3_600_000_000


def database(files: SqliteChannels, channel: str) -> Path:
    (file,) = (files.folder / channel).glob("*.db")
    return file


def changed(files: SqliteChannels, channel: str, statement: str) -> None:
    """Change a database behind our back, as a bit that flips on the disk does."""
    with closing(sqlite3.connect(database(files, channel))) as db, db:
        db.execute(statement)


@pytest.fixture
def files(tmp_path: Path) -> SqliteChannels:
    return SqliteChannels(tmp_path / "channels")


# --- the address


def test_an_address_tells_the_folder_and_how_to_be_sure(tmp_path: Path) -> None:
    assert bind(f"file://{tmp_path}") == SqliteChannels(tmp_path)
    assert at("file:///a%20b?sync=no") == SqliteChannels(Path("/a b"), sync=False)
    assert at("file://localhost/x").folder == Path("/x")
    assert at(SqliteChannels(tmp_path / "a b", sync=False).where) == SqliteChannels(tmp_path / "a b", sync=False)


@pytest.mark.parametrize(
    ("address", "fix"),
    [
        ("file://", "write file:///absolute/path"),
        ("file://relative/path", "write file:///absolute/path"),
        ("file:///a/../b", "write file:///absolute/path"),
        ("file:///a?snyc=no", 'did you mean "sync"'),
        ("file:///a?segment=64MB", "sync"),
        ("file:///a?sync=maybe", "sync=yes or sync=no"),
    ],
)
def test_a_wrong_address_is_told_with_the_fix(address: str, fix: str) -> None:
    with pytest.raises(Misconfigured) as raised:
        at(address)
    assert fix in raised.value.fix


def test_what_is_promised_depends_on_the_sync(files: SqliteChannels) -> None:
    assert "synced" in files.promise.description
    assert "sync=no" in SqliteChannels(files.folder, sync=False).promise.description


# --- the folder


def test_a_folder_that_cannot_be_is_told_with_the_fix(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(Misconfigured, match=str(file)):
        SqliteChannels(file).ensure([Topic("a")])
    for ask in (lambda files: files.ensure([Topic("a")]), SqliteChannels.names):
        with pytest.raises(Misconfigured, match=f"{tmp_path}/away"):
            ask(SqliteChannels(tmp_path / "away" / "channels"))
    assert SqliteChannels(tmp_path / "new").names() == []
    error = translate(tmp_path, PermissionError(13, "Permission denied", str(file)))
    assert isinstance(error, Misconfigured)
    assert (str(file) in error.problem, bool(error.fix)) == (True, True)


@pytest.mark.parametrize("name", ["", ".", "..", "../out", "a/b", "/etc", ".groups", "a\n", "é", "a\x00", "x" * 201])
def test_no_name_leads_out_of_the_folder(files: SqliteChannels, name: str) -> None:
    asked: list[Callable[[], object]] = [
        lambda: files.ensure([Topic("good"), Topic(name)]),
        lambda: files.bounds(name),
        lambda: files.remove(name),
        lambda: files.topic(name),
        lambda: send(files, name, numbered(1)),
    ]
    for ask in asked:
        with pytest.raises(Misconfigured, match="name"):
            ask()
    assert files.names() == []


def test_copies_that_are_not_to_be_had_are_told(files: SqliteChannels) -> None:
    done = files.ensure([Topic("a", replicas=3)])
    assert (done.made, done.differences) == (("a",), ("channel a has 1 copy, and 3 replicas are declared",))


def test_a_setting_that_is_no_duration_is_told(files: SqliteChannels) -> None:
    with pytest.raises(Misconfigured, match=r"compact\.after"):
        files.ensure([Topic("a", compacted=True, config={"compact.after": "soon"})])


def test_a_setting_of_ours_is_spelled_right_and_that_of_others_is_told(files: SqliteChannels) -> None:
    with pytest.raises(Misconfigured, match=r'"compact\.afer" is not a setting; did you mean "compact\.after"'):
        files.ensure([Topic("a", compacted=True, config={"compact.afer": "1h"})])
    assert files.names() == []
    declared = Topic(
        "a", compacted=True, config={"compact.after": "1h", "max.message.bytes": "5", "compaction.lag": "1s"}
    )
    said = [
        f"channel a has no {word}, which is declared: file:// knows compact.after"
        for word in ("max.message.bytes", "compaction.lag")
    ]
    assert list(files.ensure([declared]).differences) == said
    assert files.topic("a").config == {"compact.after": "1h"}
    assert files.ensure([Topic("a", compacted=True, config={"compact.after": "60 minutes"})]) == EnsureResult()
    (other,) = files.ensure([Topic("a", compacted=True, config={"compact.after": "2h"})]).differences
    assert other == "channel a has compact.after=1 hours, and 2h is declared"


def test_a_channel_of_an_earlier_format_is_refused_and_not_ignored(files: SqliteChannels) -> None:
    files.ensure([Topic("a")])
    old = files.folder / "b"
    (old / "0").mkdir(parents=True)
    (old / "meta.json").write_text("{}")
    asked: list[Callable[[], object]] = [
        files.names,
        lambda: files.ensure([Topic("b")]),
        lambda: files.bounds("b"),
        lambda: send(files, "b", numbered(1)),
    ]
    for ask in asked:
        with pytest.raises(Misconfigured) as raised:
            ask()
        assert (str(old) in raised.value.problem, str(old) in raised.value.fix) == (True, True)
    assert (old / "meta.json").exists()


def test_what_was_left_half_made_goes(files: SqliteChannels) -> None:
    files.ensure([Topic("a")])
    (files.folder / "b").mkdir()
    (files.folder / "b" / ".new").write_bytes(b"half")
    (files.folder / ".removed-half" / "0").mkdir(parents=True)
    assert files.names() == ["a"]
    assert files.ensure([Topic("b")]).made == ("b",)
    assert {path.name for path in files.folder.iterdir()} == {".lock", "a", "b"}
    assert [path.suffix for path in (files.folder / "b").glob("[!.]*.db")] == [".db"]
    assert not (files.folder / "b" / ".new").exists()


def test_who_asks_for_a_group_that_is_not_there_leaves_nothing(files: SqliteChannels) -> None:
    files.ensure([Topic("a")])
    with pytest.raises(Unavailable, match="typo"):
        files.group("typo")
    assert {path.name for path in files.folder.iterdir()} == {".lock", "a"}


def test_a_group_of_any_name_stays_in_its_folder(files: SqliteChannels) -> None:
    files.ensure([Topic("a")])
    for name in ("../../out", ".", "a/b", "é\n", "x" * 300):
        files.move(name, {"a": {0: 3}})
        assert files.group(name).committed == {("a", 0): 3}
    assert files.groups() == sorted(["../../out", ".", "a/b", "é\n", "x" * 300])
    assert {path.name for path in files.folder.iterdir()} == {".groups.db", ".lock", "a"}


def test_a_removed_channel_is_told_to_its_readers(files: SqliteChannels) -> None:
    files.ensure([Topic("a")])
    send(files, "a", numbered(3))
    with files.reader({"a": {}}) as reader:
        assert numbers(reader.read(10, 5)) == [1, 2, 3]
        files.remove("a")
        with pytest.raises(Unavailable, match="removed"):
            reader.read(1, 0)


def _unless_removed(reader: Reader) -> Sequence[Entry] | None:
    try:
        return reader.read(100, 0)
    except Unavailable:
        return None


def test_a_reader_takes_no_other_channel_for_its_own(files: SqliteChannels) -> None:
    files.ensure([Topic("a")])
    send(files, "a", numbered(100), at_once=10)
    with files.reader({"a": {}}) as late, files.reader({"a": {}}) as reader:
        assert numbers(reader.read(1, 5)) == [1]
        files.remove("a")
        files.ensure([Topic("a")])
        send(files, "a", numbered(100, first=201), at_once=10)
        found = [entry for some in iter(lambda: _unless_removed(reader), None) for entry in some]
        assert max(numbers(found), default=0) <= 100
        with pytest.raises(Unavailable, match="removed"):
            late.read(100, 0)


@pytest.mark.parametrize("damage", ["{", "[]", '{"members": 1}'])
def test_a_damaged_group_is_refused(files: SqliteChannels, damage: str) -> None:
    files.ensure([Topic("a")])
    files.move("g", {"a": {0: 3}})
    with closing(sqlite3.connect(files.folder / ".groups.db")) as db, db:
        db.execute("UPDATE groups SET standing = ?", (damage.encode(),))
    for ask in (files.groups, lambda: files.group("g"), lambda: files.move("g", {})):
        with pytest.raises(Unaccounted, match=r"\.groups\.db is damaged"):
            ask()


def test_a_sender_goes_on_with_a_channel_that_was_made_again(files: SqliteChannels) -> None:
    async def go() -> None:
        async with files.sender() as sender:
            for _ in range(2):
                files.ensure([Topic("a")])
                await sender.send("a", numbered(3))
                assert files.bounds("a") == {0: (0, 3)}
                files.remove("a")
            with pytest.raises(Unavailable, match="channel a"):
                await sender.send("a", numbered(3))

    asyncio.run(go())


def test_a_sender_lets_go_of_channels_that_are_gone(files: SqliteChannels) -> None:
    def opened() -> int:
        return len([link for link in Path("/proc/self/fd").iterdir() if str(files.folder) in os.path.realpath(link)])

    async def go() -> None:
        async with files.sender() as sender:
            for _ in range(3):
                files.ensure([Topic("a", 4)])
                await sender.send("a", numbered(50, keys=20))
                assert opened() > 0
                files.remove("a")
            with pytest.raises(Unavailable):
                await sender.send("a", numbered(1))
            assert opened() == 0

    asyncio.run(go())


def test_a_sender_uses_partitions_that_are_added(files: SqliteChannels) -> None:
    async def go() -> None:
        async with files.sender() as sender:
            files.ensure([Topic("a")])
            await sender.send("a", numbered(10))
            files.ensure([Topic("a", 4)])
            await sender.send("a", numbered(50, keys=20, first=11))

    asyncio.run(go())
    assert all(end > 0 for _, end in files.bounds("a").values())
    assert sorted(numbers(everything(files, "a"))) == list(range(1, 61))


# --- senders


def test_what_has_no_key_keeps_the_order_of_its_sender(files: SqliteChannels) -> None:
    files.ensure([Topic("a", 3)])
    senders = [f"s{n}" for n in range(10)]
    send(files, "a", [Record(b"%d" % n, Origin(name, 1, n, 1)) for n in range(20) for name in senders])
    entries = everything(files, "a")
    assert len({entry.partition for entry in entries}) == 3
    for name in senders:
        mine = [entry for entry in entries if dict(entry.headers)["sender"] == name.encode()]
        assert numbers(mine) == list(range(20))


def writing(files: SqliteChannels, connect: Connect) -> SqliteSender:
    return SqliteSender(lambda channel: Database(database(files, channel), sync=True, connect=connect), SystemClock())


class Counting(sqlite3.Connection):
    commits = 0

    def execute(self, sql: str, *args: object) -> sqlite3.Cursor:
        if sql == "COMMIT":
            type(self).commits += 1
            self.commit_fails()
        return super().execute(sql, *args)  # type: ignore[arg-type]

    def commit_fails(self) -> None: ...


def connecting(kind: type[sqlite3.Connection]) -> Connect:
    def opened(uri: str) -> sqlite3.Connection:
        return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, factory=kind)

    return opened


def test_one_transaction_serves_all_who_wait(files: SqliteChannels) -> None:
    class Ours(Counting): ...

    files.ensure([Topic("a")])

    async def go() -> None:
        sender = writing(files, connecting(Ours))
        await asyncio.gather(*(sender.send("a", [record]) for record in numbered(300)))
        await sender.aclose()

    asyncio.run(go())
    assert numbers(everything(files, "a")) == list(range(1, 301))
    assert 1 <= Ours.commits <= 3


def test_after_an_io_error_a_sender_acknowledges_nothing_more(files: SqliteChannels) -> None:
    class Failing(Counting):
        def commit_fails(self) -> None:
            if self.commits == 3:
                error = sqlite3.OperationalError("disk I/O error")
                error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
                raise error

    files.ensure([Topic("a")])

    async def go() -> None:
        sender = writing(files, connecting(Failing))
        for record in numbered(2):
            await sender.send("a", [record])
        for record in numbered(3, first=90):
            with pytest.raises(Unavailable, match="final"):
                await sender.send("a", [record])
        await sender.aclose()

    asyncio.run(go())
    assert Failing.commits == 3
    assert numbers(everything(files, "a")) == [1, 2]
    send(files, "a", numbered(1, first=3))
    assert numbers(everything(files, "a")) == [1, 2, 3]


def test_a_full_disk_is_unavailable_and_a_sender_goes_on_when_there_is_room(files: SqliteChannels) -> None:
    files.ensure([Topic("a")])
    opened: list[sqlite3.Connection] = []

    def small(uri: str) -> sqlite3.Connection:
        opened.append(connect(uri))
        opened[0].execute("PRAGMA max_page_count = 40")
        return opened[0]

    async def go() -> None:
        sender = writing(files, small)
        await sender.send("a", numbered(5))
        for _ in range(3):
            with pytest.raises(Unavailable, match="the disk is full"):
                await sender.send("a", [Record(bytes(1_000)) for _ in range(200)])
        await sender.send("a", numbered(5, first=6))
        opened[0].execute("PRAGMA max_page_count = 100000")
        await sender.send("a", [Record(b"11", extra=(("large", bytes(500_000)),))])
        await sender.aclose()

    asyncio.run(go())
    assert numbers(everything(files, "a")) == list(range(1, 12))


def test_a_refused_record_does_not_fail_the_batches_of_others(files: SqliteChannels) -> None:
    files.ensure([Topic("a")])
    bad = Record(b"", extra=(("\ud800", b""),))

    async def go() -> list[object]:
        async with files.sender() as sender:
            return list(
                await asyncio.gather(
                    *(sender.send("a", [record]) for record in [*numbered(5), bad, *numbered(5, first=6)]),
                    return_exceptions=True,
                )
            )

    outcomes = asyncio.run(go())
    assert [type(outcome) for outcome in outcomes if outcome is not None] == [Refused]
    assert sorted(numbers(everything(files, "a"))) == list(range(1, 11))


def test_a_record_that_is_too_large_is_refused() -> None:
    for record in (Record(bytes(900_000_001)), Record(b"", extra=tuple((f"{n}", b"") for n in range(40_000)))):
        with pytest.raises(Refused):
            encode(record)


def test_time_never_steps_back(files: SqliteChannels) -> None:
    files.ensure([Topic("a")])
    with closing(Database(database(files, "a"), sync=True)) as log:
        for n, now in enumerate([1_000, 500, 2_000]):
            log.append([encode(Record(b"%d" % n))], now)
    assert [entry.appended for entry in everything(files, "a")] == [1_000, 1_000, 2_000]


# --- readers


def test_a_flipped_bit_in_one_partition_takes_nothing_from_the_others(files: SqliteChannels) -> None:
    files.ensure([Topic("a", 2)])
    send(files, "a", numbered(100, keys=20))
    broken = files.bounds("a")[0][1] - 1
    changed(files, "a", f"UPDATE records SET value = x'00' WHERE id = {broken}")
    found: list[Entry] = []
    with files.reader({"a": {}}) as reader:
        while len(found) < 99:
            found += reader.read(1_000, 1)
        for _ in range(2):
            with pytest.raises(Unaccounted, match=f"{database(files, 'a')} is damaged: offset {broken} "):
                reader.read(1_000, 1)
        assert reader.positions("a")[0] == broken
    assert len({number(entry) for entry in found}) == 99
    go_on = {partition: end for partition, (_, end) in files.bounds("a").items()}
    send(files, "a", numbered(100, keys=20, first=101))
    assert sorted(numbers(read(files, "a", 100, go_on))) == list(range(101, 201))


@pytest.mark.parametrize("offset", [0, 4, 9])
def test_a_missing_record_is_damage_and_no_hole(files: SqliteChannels, offset: int) -> None:
    files.ensure([Topic("a")])
    send(files, "a", numbered(10))
    changed(files, "a", f"DELETE FROM records WHERE id = {offset}")
    with files.reader({"a": {}}) as reader:
        assert numbers(reader.read(20, 1) if offset else []) == list(range(1, offset + 1))
        with pytest.raises(Unaccounted, match=f"offset {offset} of partition 0 is missing"):
            reader.read(20, 1)


def test_a_file_that_is_cut_off_is_refused_with_its_name(files: SqliteChannels) -> None:
    files.ensure([Topic("a"), Topic("b")])
    send(files, "a", numbered(2_000))
    file = database(files, "a")
    os.truncate(file, file.stat().st_size // 2 // 4096 * 4096)
    with files.poster() as post:
        post("a", b"k", b"lost")
        for ask in (files.bounds, files.topic, lambda name: files.ensure([Topic(name)])):
            with pytest.raises(Unaccounted, match=f"{file} is damaged: .* penstock repair"):
                ask("a")
        with pytest.raises(Unaccounted, match=str(file)):
            send(files, "a", numbered(1))
        post("b", b"k", b"1")
    assert numbers(everything(files, "b")) == [1]
    files.remove("a")
    assert files.names() == ["b"]


# --- repair


def repaired(files: SqliteChannels, aside: Path) -> tuple[DamagedLog, int]:
    (log,) = damaged_logs(files.folder)
    assert log.readable
    copy, left = log.repair(aside)
    assert copy.stat().st_size
    assert list(damaged_logs(files.folder)) == []
    return log, left


def test_what_is_whole_is_not_damaged(files: SqliteChannels) -> None:
    files.ensure([Topic("a", 2), Topic("b", compacted=True)])
    for channel in ("a", "b"):
        send(files, channel, numbered(100))
    assert list(damaged_logs(files.folder)) == []


@pytest.mark.parametrize(
    "statement", ["UPDATE records SET value = x'00' WHERE id = 50", "DELETE FROM records WHERE id = 50"]
)
def test_one_damaged_record_is_taken_out_and_readers_pass_over_it(
    files: SqliteChannels, tmp_path: Path, statement: str
) -> None:
    files.ensure([Topic("a", retention=timedelta(days=1))])
    send(files, "a", numbered(100))
    before = files.topic_id("a"), files.topic("a"), files.bounds("a")
    changed(files, "a", statement)
    log, left = repaired(files, tmp_path / "damaged")
    assert (log.file, left) == (database(files, "a"), 99)
    assert (files.topic_id("a"), files.topic("a"), files.bounds("a")) == before
    assert numbers(everything(files, "a")) == [n for n in range(1, 101) if n != 51]
    send(files, "a", numbered(1, first=101))
    assert files.bounds("a") == {0: (0, 101)}


@pytest.mark.parametrize("seed", range(5))
def test_what_lies_on_pages_that_are_whole_is_saved(files: SqliteChannels, tmp_path: Path, seed: int) -> None:
    files.ensure([Topic("a", 2)])
    send(files, "a", numbered(5_000))
    file, random = database(files, "a"), Random(seed)
    pages = file.stat().st_size // 4096
    with file.open("r+b") as opened:
        for page in random.sample(range(pages // 3, pages - 1), 3):
            opened.seek(page * 4096)
            opened.write(random.randbytes(4096))
    ends = {partition: end for partition, (_, end) in files.bounds("a").items()}
    _, left = repaired(files, tmp_path / "damaged")
    found = numbers(everything(files, "a"))
    assert 4_000 < len(found) == left < 5_000
    assert len(set(found)) == left
    assert {partition: end for partition, (_, end) in files.bounds("a").items()} == ends


def test_a_file_that_was_cut_off_is_repaired_up_to_there(files: SqliteChannels, tmp_path: Path) -> None:
    files.ensure([Topic("a")])
    send(files, "a", numbered(5_000))
    file = database(files, "a")
    os.truncate(file, file.stat().st_size * 3 // 4)
    _, left = repaired(files, tmp_path / "damaged")
    assert 2_000 < left < 5_000
    assert set(numbers(everything(files, "a"))) <= set(range(1, 5_001))
    assert files.bounds("a") == {0: (0, 5_000)}


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: bytes(len(data))], ids=["empty", "zeros"])
def test_a_database_without_its_offsets_is_moved_away(
    files: SqliteChannels, damage: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    files.ensure([Topic("a")])
    send(files, "a", numbered(3))
    before, file = files.topic_id("a"), database(files, "a")
    file.write_bytes(damage(file.read_bytes()))
    (log,) = damaged_logs(files.folder)
    assert (log.file, log.readable) == (file, False)
    with pytest.raises(Unaccounted, match=str(file)):
        files.bounds("a")
    copy, left = log.repair(tmp_path / "damaged")
    assert (left, [path.name for path in copy.glob("*.db")]) == (0, [file.name])
    assert files.ensure([Topic("a")]).made == ("a",)
    assert files.topic_id("a") != before


# --- retention and compaction


@pytest.fixture
def log(files: SqliteChannels) -> Iterator[Database]:
    files.ensure([Topic("a", retention=timedelta(hours=2)), Topic("c", compacted=True)])
    with closing(Database(database(files, "c"), sync=True)) as opened:
        yield opened


def test_what_is_older_than_is_kept_goes(files: SqliteChannels, log: Database) -> None:
    with closing(Database(database(files, "a"), sync=True)) as kept:
        for hour in range(1, 6):
            kept.append([encode(record) for record in numbered(10, first=10 * hour)], hour * HOUR)
        kept.clean(5 * HOUR)
        assert kept.bounds() == {0: (30, 50)}
        assert numbers(kept.read(0, 30, 100)[0]) == list(range(40, 60))
        with pytest.raises(Unaccounted, match="30"):
            kept.read(0, 0, 1)
        kept.clean(100 * HOUR)
        assert kept.bounds() == {0: (50, 50)}


def test_the_last_record_of_each_key_stays_where_it_was(files: SqliteChannels, log: Database) -> None:
    random, written = Random(5), list[Record]()
    for turn in range(5):
        some = [Record(b"%d" % n, key=b"k%d" % random.randrange(40 + 10 * turn)) for n in range(100 * (turn + 1))]
        written += some
        log.append([encode(record) for record in some], (2 * turn + 1) * HOUR)
        log.clean((2 * turn + 2) * HOUR)
    last = {record.key: offset for offset, record in enumerate(written)}
    entries = everything(files, "c")
    assert [entry.offset for entry in entries] == sorted(last.values())
    assert all(entry.value == written[entry.offset].value for entry in entries)
    assert log.bounds() == {0: (0, len(written))}
    for offset in range(0, len(written), 97):
        assert log.read(0, offset, 1_000)[0] == [entry for entry in entries if entry.offset >= offset]


def test_what_was_replaced_an_hour_ago_or_less_stays(files: SqliteChannels, log: Database) -> None:
    log.append([encode(Record(b"1", key=b"k")), encode(Record(b"2", key=b"k"))], HOUR)
    log.clean(2 * HOUR - 1)
    assert numbers(everything(files, "c")) == [1, 2]
    log.clean(2 * HOUR)
    assert numbers(everything(files, "c")) == [2]


def test_a_deletion_stays_for_a_day(files: SqliteChannels, log: Database) -> None:
    log.append([encode(Record(b"1", key=b"a")), encode(Record(b"1", key=b"b"))], HOUR)
    log.append([encode(Record(None, key=b"a"))], 2 * HOUR)
    log.clean(5 * HOUR)
    assert [(entry.key, entry.value) for entry in everything(files, "c")] == [(b"b", b"1"), (b"a", None)]
    log.clean(27 * HOUR)
    assert [entry.key for entry in everything(files, "c")] == [b"b"]
    assert log.read(0, 2, 10) == ([], 3)


def test_records_without_a_key_stay(files: SqliteChannels, log: Database) -> None:
    log.append([encode(Record(b"1")), encode(Record(None)), encode(Record(b"1"))], HOUR)
    log.clean(100 * HOUR)
    assert [entry.value for entry in everything(files, "c")] == [b"1", None, b"1"]


def test_what_is_forgotten_gives_its_room_back(files: SqliteChannels) -> None:
    files.ensure([Topic("a")])
    empty = files.size("a")
    send(files, "a", [Record(os.urandom(10_000)) for _ in range(1_000)])
    file = database(files, "a")
    full = file.stat().st_size
    assert files.size("a") > 10_000_000
    files.forget("a", {0: 999})
    assert files.bounds("a") == {0: (999, 1_000)}
    files.forget("a", {0: 1_000})
    assert files.size("a") < empty + 50_000
    assert file.stat().st_size < full // 4
    files.forget("a", {0: 5_000})
    assert files.bounds("a") == {0: (1_000, 1_000)}


# --- groups


def test_a_group_that_lets_its_lease_run_out_can_commit_nothing(files: SqliteChannels) -> None:
    short = SqliteChannels(files.folder, lease=timedelta(milliseconds=50))
    short.ensure([Topic("a")])
    send(short, "a", numbered(3))
    with short.join("g", ["a"], Noted()) as member:
        assert numbers(member.read(10, 5)) == [1, 2, 3]
        eventually(lambda: "g" not in short.groups())
        with pytest.raises(PenstockError, match="a/0"):
            member.commit()


# --- processes


def test_what_was_acknowledged_is_there_however_often_writers_are_killed(tmp_path: Path) -> None:
    """Several at once, killed at any moment."""
    files = SqliteChannels(tmp_path / "channels")
    files.ensure([Topic("a", 2)])
    random = Random(3)
    for turn in range(3):
        acknowledged: dict[str, list[int]] = {f"{turn}-{one}": [] for one in range(2)}
        with ExitStack() as stack:
            running = {name: stack.enter_context(process("writer.py", files, "a", name, "0")) for name in acknowledged}
            for name, one in running.items():
                told = lines(one)
                acknowledged[name] += [next(told) for _ in range(random.randrange(20, 200))]
                one.kill()
                acknowledged[name] += told
        there = everything(files, "a")
        for name, numbers_ in acknowledged.items():
            assert set(numbers_) <= {number(entry) for entry in there if dict(entry.headers)["sender"] == name.encode()}
        for partition, (low, end) in files.bounds("a").items():
            assert [entry.offset for entry in there if entry.partition == partition] == list(range(low, end))


def test_a_description_tells_the_same_in_another_process(files: SqliteChannels) -> None:
    assert pickle.loads(pickle.dumps(files)) == files
    assert os.fspath(files.folder) in files.where

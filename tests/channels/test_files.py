"""Channels in a folder: its addresses, its names, its senders, and processes that die. The rest is in the contract."""

import asyncio
import os
import pickle
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from random import Random

import pytest
from tests.channels.traffic import Noted, eventually, everything, lines, number, numbered, numbers, process, read, send

from penstock.channels.binders import bind
from penstock.channels.files import Files, at
from penstock.channels.files.folder import in_words
from penstock.channels.files.log import Log
from penstock.channels.files.sending import FilesSender, Writers
from penstock.channels.files.topics import Known
from penstock.core.clock import SystemClock
from penstock.core.contracts import EnsureResult, Entry, Reader, Topic
from penstock.core.errors import Misconfigured, PenstockError, Refused, Unaccounted, Unavailable
from penstock.core.record import Origin, Record


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "channels")


# --- the address


def test_an_address_tells_the_folder_and_how_to_be_sure(tmp_path: Path) -> None:
    assert bind(f"file://{tmp_path}") == Files(tmp_path)
    assert at("file:///a%20b?sync=no&segment=2MB") == Files(Path("/a b"), sync=False, segment=2 << 20)
    assert at("file://localhost/x").folder == Path("/x")
    assert at(Files(tmp_path / "a b", sync=False).where) == Files(tmp_path / "a b", sync=False)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("file://", "no absolute path; write file:///absolute/path"),
        ("file://relative/path", "no absolute path; write file:///absolute/path"),
        ("file:///a/../b", "no absolute path"),
        ("file:///a?snyc=no", 'did you mean "sync"'),
        ("file:///a?other=no", "the options are sync and segment"),
        ("file:///a?sync=maybe", "write sync=yes or sync=no"),
        ("file:///a?segment=much", "such as 64MB"),
        ("file:///a?segment=1", "such as 64MB"),
    ],
)
def test_a_wrong_address_is_told_with_the_fix(address: str, said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        at(address)


def test_what_is_promised_depends_on_the_sync(files: Files) -> None:
    assert "synced to disk" in files.promise.description
    assert "no power cut" in Files(files.folder, sync=False).promise.description


# --- the folder


def test_a_folder_that_cannot_be_is_told_with_the_fix(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(Misconfigured, match="it is no folder; tell a folder"):
        Files(file).ensure([Topic("a")])
    with pytest.raises(Misconfigured, match=f"there is no folder {tmp_path}/away; make it, or tell another"):
        Files(tmp_path / "away" / "channels").ensure([Topic("a")])
    with pytest.raises(Misconfigured, match=f"there is no folder {tmp_path}/away"):
        Files(tmp_path / "away" / "channels").names()
    assert Files(tmp_path / "new").names() == []
    barred = in_words(tmp_path, PermissionError(13, "Permission denied", str(file)))
    assert isinstance(barred, Misconfigured)
    assert "let this user write there" in str(barred)


@pytest.mark.parametrize("name", ["", ".", "..", "../out", "a/b", "/etc", ".groups", "a\n", "é", "a\x00", "x" * 201])
def test_no_name_leads_out_of_the_folder(files: Files, name: str) -> None:
    asked: list[Callable[[], object]] = [
        lambda: files.ensure([Topic("good"), Topic(name)]),
        lambda: files.bounds(name),
        lambda: files.remove(name),
        lambda: files.topic(name),
        lambda: send(files, name, numbered(1)),
    ]
    for ask in asked:
        with pytest.raises(Misconfigured, match="a folder cannot have this name; a name has"):
            ask()
    assert files.names() == []


def test_copies_that_are_not_to_be_had_are_told(files: Files) -> None:
    done = files.ensure([Topic("a", replicas=3)])
    assert (done.made, done.differences) == (("a",), ("channel a has 1 copy, and 3 replicas are declared",))


def test_a_setting_that_is_no_duration_is_told(files: Files) -> None:
    with pytest.raises(Misconfigured, match=r"compact\.after: .* is not a duration"):
        files.ensure([Topic("a", compacted=True, config={"compact.after": "soon"})])


def test_a_setting_of_ours_is_spelled_right_and_that_of_others_is_told(files: Files) -> None:
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


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b'{"id":"x","partitions":"2","keep":null,"compacted":false,"config":{}}',
        b'{"id":"x","partitions":0,"keep":null,"compacted":false,"config":{}}',
        b'{"id":"x","partitions":1,"keep":1e300,"compacted":false,"config":{}}',
    ],
)
def test_a_damaged_description_is_told_and_the_channel_can_be_removed(files: Files, damage: bytes) -> None:
    files.ensure([Topic("a"), Topic("b")])
    (files.folder / "a" / "meta.json").write_bytes(damage)
    with files.poster() as post:
        post("a", b"k", b"lost")
        for ask in (files.bounds, files.topic, lambda name: files.ensure([Topic(name)])):
            with pytest.raises(Unaccounted, match=r"a/meta\.json is damaged: .*; set it right, or remove the channel"):
                ask("a")
        post("b", b"k", b"1")
    assert numbers(everything(files, "b")) == [1]
    files.remove("a")
    assert files.names() == ["b"]


def test_what_was_left_half_made_goes(files: Files) -> None:
    files.ensure([Topic("a")])
    (files.folder / ".half.new" / "0").mkdir(parents=True)
    (files.folder / ".removed-half" / "0").mkdir(parents=True)
    files.ensure([Topic("b")])
    assert {path.name for path in files.folder.iterdir()} == {".lock", "a", "b"}


def test_who_asks_for_a_group_that_is_not_there_leaves_nothing(files: Files) -> None:
    files.ensure([Topic("a")])
    with pytest.raises(Unavailable, match="there is none of that name"):
        files.group("typo")
    assert {path.name for path in files.folder.iterdir()} == {".lock", "a"}


def test_a_moment_is_found_where_somebody_took_the_files_away(files: Files) -> None:
    files.ensure([Topic("a")])
    send(files, "a", numbered(3))
    for file in (files.folder / "a" / "0").glob("*.log"):
        file.unlink()
    assert files.since("a", 0) == {0: 3}


def test_a_group_of_any_name_stays_in_its_folder(files: Files) -> None:
    files.ensure([Topic("a")])
    for name in ("../../out", ".", "a/b", "é\n"):
        files.move(name, {"a": {0: 3}})
        assert files.group(name).committed == {("a", 0): 3}
    assert files.groups() == sorted(["../../out", ".", "a/b", "é\n"])
    assert {path.name for path in files.folder.iterdir()} == {".groups", ".lock", "a"}
    with pytest.raises(Misconfigured, match="a file cannot have this name"):
        files.move("x" * 300, {"a": {0: 3}})


def test_a_removed_channel_is_told_to_those_who_hold_it(files: Files) -> None:
    files.ensure([Topic("a")])
    send(files, "a", numbered(3))
    with files.reader({"a": {}}) as reader, Log(files.folder / "a" / "0") as log:
        assert numbers(reader.read(10, 5)) == [1, 2, 3]
        files.remove("a")
        with pytest.raises(Unavailable, match="removed"):
            log.append(numbered(1))
        with pytest.raises(Unavailable, match="it was removed while it was read"):
            reader.read(1, 0)


def _unless_removed(reader: Reader) -> Sequence[Entry] | None:
    try:
        return reader.read(100, 0)
    except Unavailable:
        return None


def test_a_reader_takes_no_other_channel_for_its_own(tmp_path: Path) -> None:
    files = Files(tmp_path / "channels", segment=2_000)
    files.ensure([Topic("a")])
    send(files, "a", numbered(100), at_once=10)
    with files.reader({"a": {}}) as late, files.reader({"a": {}}) as reader:
        assert numbers(reader.read(1, 5)) == [1]
        files.remove("a")
        files.ensure([Topic("a")])
        send(files, "a", numbered(100, first=201), at_once=10)
        found = [entry for some in iter(lambda: _unless_removed(reader), None) for entry in some]
        assert max(numbers(found), default=0) <= 100
        with pytest.raises(Unavailable, match="it was removed while it was read"):
            late.read(100, 0)


def test_a_damaged_group_is_said_and_not_begun_anew(files: Files) -> None:
    files.ensure([Topic("a")])
    files.move("g", {"a": {0: 3}})
    for damage in (b"{", b"[]", b'{"members": 1}'):
        (files.folder / ".groups" / "g.json").write_bytes(damage)
        with pytest.raises(Unaccounted, match=r"g\.json is damaged"):
            files.group("g")


def test_a_sender_goes_on_with_a_channel_that_was_made_again(files: Files) -> None:
    async def go() -> None:
        async with files.sender() as sender:
            for _ in range(2):
                files.ensure([Topic("a")])
                await sender.send("a", numbered(3))
                assert files.bounds("a") == {0: (0, 3)}
                files.remove("a")
            with pytest.raises(Unavailable, match="channel a is unavailable: there is none of that name"):
                await sender.send("a", numbered(3))

    asyncio.run(go())


def test_a_sender_lets_go_of_channels_that_are_gone(files: Files) -> None:
    def opened() -> int:
        return len([link for link in Path("/proc/self/fd").iterdir() if str(files.folder) in os.path.realpath(link)])

    async def go() -> None:
        async with files.sender() as sender:
            for _ in range(3):
                files.ensure([Topic("a", 4)])
                await sender.send("a", numbered(50, keys=20))
                assert opened() == 8
                files.remove("a")
            with pytest.raises(Unavailable):
                await sender.send("a", numbered(1))
            assert opened() == 0

    asyncio.run(go())


def test_a_sender_uses_partitions_that_are_added(files: Files) -> None:
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


def test_what_has_no_key_keeps_the_order_of_its_sender(files: Files) -> None:
    files.ensure([Topic("a", 3)])
    senders = [f"s{n}" for n in range(10)]
    send(files, "a", [Record(b"%d" % n, Origin(name, 1, n, 1)) for n in range(20) for name in senders])
    entries = everything(files, "a")
    assert len({entry.partition for entry in entries}) == 3
    for name in senders:
        mine = [entry for entry in entries if dict(entry.headers)["sender"] == name.encode()]
        assert numbers(mine) == list(range(20))


def writing(files: Files, sync: Callable[[int], None]) -> FilesSender:
    def opened(folder: Path, _: Known) -> Log:
        return Log(folder, sync=sync)

    return FilesSender(files.folder, Writers(files.folder, opened, SystemClock()))


def test_one_sync_serves_all_who_wait(files: Files) -> None:
    files.ensure([Topic("a")])
    syncs: list[int] = []

    async def go() -> None:
        sender = writing(files, syncs.append)
        await asyncio.gather(*(sender.send("a", [record]) for record in numbered(300)))
        await sender.close()

    asyncio.run(go())
    assert numbers(everything(files, "a")) == list(range(1, 301))
    assert len(syncs) <= 3


def test_after_a_sync_that_failed_a_sender_acknowledges_nothing_more(files: Files) -> None:
    files.ensure([Topic("a")])
    calls: list[int] = []

    def third_fails(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 3:
            raise OSError(5, "Input/output error")

    async def go() -> None:
        sender = writing(files, third_fails)
        for record in numbered(2):
            await sender.send("a", [record])
        for record in numbered(3, first=90):
            with pytest.raises(Unavailable, match="which is final"):
                await sender.send("a", [record])
        await sender.close()

    asyncio.run(go())
    assert len(calls) == 3
    assert numbers(everything(files, "a")) == [1, 2]
    send(files, "a", numbered(1, first=3))
    assert numbers(everything(files, "a")) == [1, 2, 3]


def test_nobody_pays_for_a_record_of_somebody_else(files: Files) -> None:
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


def test_nothing_is_there_twice_for_a_record_of_somebody_else(tmp_path: Path) -> None:
    """What is refused comes behind the turn of a segment, before which all was safe already."""
    files = Files(tmp_path / "channels", segment=1 << 20)
    files.ensure([Topic("a")])
    large = [Record(b"%d" % n, extra=(("x", bytes(1_000)),)) for n in range(1, 2_501)]
    bad = Record(b"", extra=(("\ud800", b""),))

    async def go() -> list[object]:
        async with files.sender() as sender:
            sent = [sender.send("a", some) for some in (numbered(1, first=0), large, [bad])]
            return list(await asyncio.gather(*sent, return_exceptions=True))

    assert [type(outcome) for outcome in asyncio.run(go())] == [type(None), type(None), Refused]
    assert numbers(everything(files, "a")) == list(range(2_501))


# --- readers


def test_damage_in_one_partition_takes_nothing_from_the_others(files: Files) -> None:
    files.ensure([Topic("a", 2)])
    send(files, "a", numbered(100, keys=20))
    file = files.folder / "a" / "0" / f"{0:020d}.log"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    broken = files.bounds("a")[0][1] - 1
    found: list[Entry] = []
    with files.reader({"a": {}}) as reader:
        while len(found) < 99:
            found += reader.read(1_000, 1)
        for _ in range(2):
            with pytest.raises(Unaccounted, match=f"{file} is damaged at byte .* offset {broken} "):
                reader.read(1_000, 1)
        assert reader.positions("a")[0] == broken
    assert len({number(entry) for entry in found}) == 99
    go_on = {partition: end for partition, (_, end) in files.bounds("a").items()}
    send(files, "a", numbered(100, keys=20, first=101))
    assert sorted(numbers(read(files, "a", 100, go_on))) == list(range(101, 201))


def test_entries_that_may_linger_come_together(files: Files) -> None:
    files.ensure([Topic("a")])
    send(files, "a", numbered(10), at_once=1)
    with files.reader({"a": {}}, linger=0.05) as reader:
        assert numbers(reader.read(100, 5)) == list(range(1, 11))
        assert reader.read(100, 0) == []


def test_a_group_that_lets_its_lease_run_out_can_commit_nothing(files: Files) -> None:
    short = Files(files.folder, lease=timedelta(milliseconds=50))
    short.ensure([Topic("a")])
    send(short, "a", numbered(3))
    with short.join("g", ["a"], Noted()) as member:
        assert numbers(member.read(10, 5)) == [1, 2, 3]
        eventually(lambda: "g" not in short.groups())
        with pytest.raises(PenstockError, match="held by others"):
            member.commit()


# --- processes


def test_what_was_acknowledged_is_there_however_often_writers_are_killed(tmp_path: Path) -> None:
    """Several at once, with segments that turn all the time, killed at any moment."""
    files = Files(tmp_path / "channels", segment=4_096)
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


def test_a_description_tells_the_same_in_another_process(files: Files) -> None:
    assert pickle.loads(pickle.dumps(files)) == files
    assert os.fspath(files.folder) in files.where

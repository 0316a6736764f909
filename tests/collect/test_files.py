"""Records from files."""

import asyncio
import ctypes
import gzip
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.collect.test_ingest import Slow

from penstock.collect import file_progress, files
from penstock.collect.dedup import cursor_of
from penstock.collect.file_progress import FileStat, Progress, tail
from penstock.collect.files import FilesSource, Folder
from penstock.core.contracts import Arrival, Intake, ResumeState, Sender, SourceContext
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.record import Record
from penstock.testing import MemoryChannels
from penstock.testing.killing import CrashContract
from penstock.testing.sources import QUIET, Running, SourceContract, lines, plain

OFTEN = timedelta(milliseconds=5)


def of(path: Path, **options: Any) -> FilesSource:
    return FilesSource(f"file://{path}", "logs", **{"every": OFTEN, **options})


def arrived(intake: Intake) -> list[Arrival]:
    return [one for one in intake.arrivals if isinstance(one, Arrival)]


async def taken(intakes: AsyncIterator[Intake], count: int) -> list[Arrival]:
    found: list[Arrival] = []
    async with asyncio.timeout(20):
        while len(found) < count:
            intake = await anext(intakes)
            found += arrived(intake)
            await intake.settle(None)
    return found


async def all_of(source: FilesSource, cursor: str | None = None) -> list[Arrival]:
    """All that is there."""
    async with asyncio.timeout(20), replace(source, follow=False).open(ResumeState(cursor=cursor)) as intakes:
        return [one async for intake in intakes for one in arrived(intake)]


def cursor_in(channels: MemoryChannels) -> str | None:
    """That of the last record."""
    return cursor_of(channels.entries("into")[-1].headers)


def values(found: Sequence[Arrival]) -> list[bytes]:
    return [one.value for one in found]


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


@contextmanager
def bound_by_permissions() -> Iterator[None]:
    """Root may read anything. This thread gives that up for a while, and those that it starts never have it."""
    if sys.platform != "linux" or os.geteuid() != 0:
        yield
        return
    libc, version = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 2)(0x20080522, 0)
    before = (ctypes.c_uint32 * 6)()
    assert libc.capget(version, before) == 0, os.strerror(ctypes.get_errno())
    after = (ctypes.c_uint32 * 6)(*before)
    after[0] &= ~0b110  # Of what is in effect: to pass over permissions, and over those to read and search.
    assert libc.capset(version, after) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        assert libc.capset(version, before) == 0, os.strerror(ctypes.get_errno())


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def older(path: Path, seconds: float) -> None:
    """As if it had been written earlier."""
    timestamp = path.stat().st_mtime - seconds
    os.utime(path, (timestamp, timestamp))


@dataclass
class Writers:
    """Some that append to files of one folder, of which one is replaced now and then."""

    source: FilesSource
    into: Path
    given: int = 0

    def payloads(self, count: int) -> list[bytes]:
        return plain(count)

    async def add_records(self, payloads: Sequence[bytes]) -> None:
        if self.source.format == "whole":
            for payload in payloads:
                self.given += 1
                (self.into / f"{self.given:06}").write_bytes(payload)
            return
        self.given += 1
        append(self.into / "a.log", b"".join(payload + b"\n" for payload in payloads))
        if self.given % 3 == 0:
            (self.into / "a.log").rename(self.into / f"a.log.{self.given}")

    async def disconnect(self) -> None:
        """There is nothing that could be cut."""

    def acknowledged(self) -> None:
        return None


@pytest.fixture(params=["folder", "file", "whole"])
def upstream(request: pytest.FixtureRequest, tmp_path: Path) -> Writers:
    (tmp_path / "a.log").touch()
    if request.param == "whole":
        return Writers(of(tmp_path, format="whole", settled=timedelta(milliseconds=20)), tmp_path)
    return Writers(of(tmp_path if request.param == "folder" else tmp_path / "a.log"), tmp_path)


class TestContract(SourceContract):
    def supports(self, payload: bytes) -> bool:
        return lines(payload)


class TestKilled(CrashContract):
    pass


class Leaky(MemoryChannels):
    """Channels into which some records do not come: whoever sends them waits for ever, as until a crash."""

    def __init__(self) -> None:
        super().__init__(2)
        self.lost: set[bytes | None] = set()

    @asynccontextmanager
    async def sender(self) -> AsyncIterator[Any]:
        async with super().sender() as inner:
            yield _Leaking(inner, self)

    def holds(self, values: Sequence[bytes]) -> bool:
        return set(values) <= {entry.value for entry in self.entries("into")}


@dataclass
class _Leaking:
    inner: Sender
    channels: Leaky

    async def send(self, channel: str, records: Sequence[Record]) -> None:
        kept = [record for record in records if record.value not in self.channels.lost]
        await self.inner.send(channel, kept)
        if len(kept) < len(records):
            await asyncio.Event().wait()


def leave(inside: Path) -> list[bytes]:
    return []


def grow(inside: Path) -> list[bytes]:
    append(inside / "a.log", b"a5\na6\n")
    return [b"a5", b"a6"]


def rotate(inside: Path) -> list[bytes]:
    (inside / "b.log").rename(inside / "b.log.1")
    return grow(inside)


def compress(inside: Path) -> list[bytes]:
    (inside / "b.log.gz").write_bytes(gzip.compress((inside / "b.log").read_bytes()))
    (inside / "b.log").unlink()
    return grow(inside)


def copy_back(inside: Path) -> list[bytes]:
    shutil.copytree(inside, inside.parent / "copy")
    shutil.rmtree(inside)
    (inside.parent / "other").touch()
    shutil.copytree(inside.parent / "copy", inside)
    return grow(inside)


def cut_others(inside: Path) -> list[bytes]:
    (inside / "c.log").write_bytes(b"c2\n")
    (inside / "d.log").write_bytes(b"d2\n")
    return [b"c2", b"d2", *grow(inside)]


@pytest.mark.parametrize("change", [leave, grow, rotate, compress, copy_back, cut_others])
async def test_what_survived_a_crash_behind_a_gap_is_not_taken_again(
    tmp_path: Path, change: Callable[[Path], list[bytes]]
) -> None:
    """A record is known by its own place, whatever has become of other files and of the name of its own."""
    inside, channels = tmp_path / "in", Leaky()
    inside.mkdir()
    for name in "abcd":
        (inside / f"{name}.log").write_bytes(b"%s, the first\n" % name.encode())
    async with Running(of(inside), channels) as running:
        await running.until(lambda: running.count() == 4)
        await running.stop()
    channels.lost = {b"a3"}
    append(inside / "a.log", b"a2\na3\na4\n")
    append(inside / "b.log", b"b2\nb3\n")
    async with Running(of(inside), channels) as running:
        await running.until(lambda: channels.holds([b"a2", b"a4", b"b2", b"b3"]))
    channels.lost = set()
    fresh = change(inside)
    (inside / "new.log").write_bytes(b"new\n")
    async with Running(of(inside), channels) as running:
        await running.until(lambda: channels.holds([b"a3", b"new", *fresh]))
        await running.stop()
    assert max(running.values().values()) == 1


@pytest.mark.parametrize("path", ["a.log", "*.log"])
@pytest.mark.parametrize("back", [True, False])
async def test_a_file_that_is_rotated_before_its_turn_comes_is_read_although_the_reader_died(
    tmp_path: Path, path: str, back: bool
) -> None:
    channels, log = MemoryChannels(), tmp_path / "a.log"
    append(log, b"a1\n")
    async with Running(of(tmp_path / path), channels) as running:
        await running.until(lambda: running.count() == 1)
    append(log, b"a2\na3\n")
    log.rename(tmp_path / "a.log.1")
    append(log, b"b1\n")
    # It has met both, and dies with the first record of the first.
    async with of(tmp_path / path).open(ResumeState(cursor=cursor_in(channels))) as intakes:
        first = arrived(await anext(intakes))[0]
    assert first.value == b"a2"
    log.rename(tmp_path / "a.log.2")
    if back:
        append(log, b"c1\n")
    async with of(tmp_path / path, follow=False).open(ResumeState(cursor=first.cursor)) as intakes:
        found = [one async for intake in intakes for one in arrived(intake)]
    assert values(found) == [b"a3", b"b1", *([b"c1"] if back else [])]


async def test_an_inode_that_is_another_files_by_now_is_not_read(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    append(log, b"a1\na2\n")
    log.rename(tmp_path / "a.log.1")
    append(log, b"b1\n")
    reading = Progress("logs", None, 1.0, renamed=True)
    inside = Folder("logs", tmp_path, "a.log", True, 100)
    (met,) = reading.update(inside.list_files(reading.is_tracked), time.time(), inside.same)
    cursor = reading.begin(met, time.time()) + tail(0, "", 0)
    again = Progress("logs", cursor, 1.0, renamed=True)
    inode = log.stat().st_ino
    assert again.is_tracked(inode, "a.log.2")
    assert again.is_tracked(inode, "a.log-20261116")
    assert not again.is_tracked(inode, "secret.txt")


@pytest.mark.parametrize("seed", range(6))
async def test_crashes_that_leave_gaps_lose_and_double_nothing(tmp_path: Path, seed: int) -> None:
    """Files that grow in parallel and are rotated, under collectors of which each leaves some of its records behind."""
    chance, channels, given = random.Random(seed), Leaky(), list[bytes]()
    for generation in range(15):
        for _ in range(chance.randrange(1, 6)):
            name = chance.choice("abcd")
            some = [
                b"%s %d %d" % (name.encode(), generation, len(given) + n) for n in range(chance.choice((1, 3, 200)))
            ]
            given += some
            append(tmp_path / f"{name}.log", b"".join(line + b"\n" for line in some))
        if chance.random() < 0.4 and (log := tmp_path / f"{chance.choice('abcd')}.log").exists():
            log.rename(tmp_path / f"{log.name}.{generation}")
        held = {entry.value for entry in channels.entries("into")}
        left = [value for value in given if value not in held] if generation < 14 else []
        channels.lost = set(chance.sample(left, min(3, len(left))))
        due = [value for value in given if value not in channels.lost]
        async with Running(of(tmp_path / "*.log*"), channels) as running:
            await running.until(lambda due=due: channels.holds(due))  # type: ignore[misc]
    assert running.values() == Counter(given)


async def test_a_folder_that_is_away_while_records_are_on_their_way_gives_none_of_them_again(tmp_path: Path) -> None:
    """Others may be written meanwhile, and come first: so it is opened again behind all that it gave."""
    inside = tmp_path / "in"
    inside.mkdir()
    (inside / "a.log").write_bytes(b"a1\n")
    (inside / "b.log").write_bytes(b"b1\n")
    channels = Slow("into")
    async with Running(of(inside), channels) as running:
        await running.until(lambda: channels.waiting == 2)
        inside.rename(tmp_path / "away")
        await running.until(lambda: not running.loop.figures()["connected"])
        append(tmp_path / "away" / "a.log", b"a2\n")
        (tmp_path / "away").rename(inside)
        await asyncio.sleep(QUIET)
        assert channels.waiting == 2
        channels.go.set()
        await running.until(lambda: running.count() >= 3)
        await running.stop()
    assert running.values() == {b"a1": 1, b"b1": 1, b"a2": 1}
    cursor = cursor_in(channels)
    assert values(await all_of(of(inside), cursor)) == []


async def test_a_whole_file_that_holds_again_what_it_held_before_is_another_record(tmp_path: Path) -> None:
    channels, source = MemoryChannels(), of(tmp_path, format="whole", settled=timedelta(milliseconds=20))
    async with Running(source, channels) as running:
        for count, state in enumerate((b"up", b"down", b"up", b"down"), 1):
            (tmp_path / "state").write_bytes(state)
            await running.until(lambda count=count: running.count() == count)  # type: ignore[misc]
        await running.stop()
    assert running.values() == {b"up": 2, b"down": 2}


def test_a_file_that_comes_while_others_are_looked_for_is_not_taken_for_done() -> None:
    """The look misses one, and sees others that came later. Long after it, and before the next, the reader ends."""
    now = 1_000_000.0
    missed, *late = (FileStat(f"{n:03}.log", n, int(now * 1e9) + n, 0, 9) for n in range(1, 100))
    reading, cursor = Progress("logs", None, 1.0), ""
    for file in reading.update(late, now, lambda info, file: True):
        cursor = reading.begin(file, now + 60) + tail(0, "", 9)
        file.offset, file.visited, file.complete = 9, (9, 0), True
        reading.end(file)
    again = Progress("logs", cursor, 1.0)
    assert [file.info for file in again.update([missed, *late], now + 70, lambda info, file: True) if file.unread] == [
        missed
    ]


def read_on(reading: Progress, name: str) -> tuple[str, str]:
    """The cursor and the mark of a record that comes now, the same bytes at the same place in each file."""
    (file,) = (one for one in reading.files.values() if one.name == name)
    cursor, dedup_key = reading.begin(file, 0) + tail(7, "", 9), file.dedup_key(7, "", 9)
    file.offset, file.check = 9, 7
    reading.end(file)
    return cursor, dedup_key


def lying(**inodes: int) -> list[FileStat]:
    return [FileStat(name, inode, 1, 1, 9) for name, inode in inodes.items()]


def test_no_two_files_that_have_had_the_same_inode_have_the_same_marks() -> None:
    reading = Progress("logs", None, 1.0)
    reading.update(lying(a=1, b=2), 0, lambda info, file: True)
    marks = [read_on(reading, "a")[1], read_on(reading, "b")[1]]
    reading.drop(reading.files[2])
    reading.update(lying(a=3), 0, lambda info, file: True)
    reading.update(lying(a=3, c=1, d=2), 0, lambda info, file: True)
    cursor, dedup_key = read_on(reading, "a")
    assert dedup_key == marks[0], "it was copied, and is the same"
    assert Progress("logs", cursor, 1.0).files[3].dedup_key(7, "", 9) == dedup_key
    marks += [read_on(reading, "c")[1], read_on(reading, "d")[1]]
    for inode in (1, 1, 3):
        reading.reset(file := reading.files[inode])
        marks.append(read_on(reading, file.name)[1])
    assert len(set(marks)) == len(marks) == 7


def test_a_new_start_gives_the_same_marks_as_the_one_before() -> None:
    """It does not know when a file was met, nor in which order others have gone."""
    reading = Progress("logs", None, 1.0)
    reading.update([*lying(a=1, b=2, c=3, d=4), FileStat("new", 9, 1, 1, 0)], 0, lambda info, file: True)
    for name in "abcd":
        read_on(reading, name)
    reading.drop(reading.files[2])
    cursor, _ = read_on(reading, "a")
    marks = {}
    for inode, name in ((4, "d"), (3, "c")):
        reading.reset(reading.files[inode])
        marks[name] = read_on(reading, name)[1]
    reading.update(lying(a=1, c=3, d=4, new=9), 0, lambda info, file: True)
    marks["new"] = read_on(reading, "new")[1]
    again = Progress("logs", cursor, 1.0)
    again.update(lying(a=1, c=3, d=4, new=9), 0, lambda info, file: file.name == "a")
    assert {name: read_on(again, name)[1] for name in ("new", "c", "d")} == marks


async def test_each_line_has_a_cursor_behind_which_the_rest_is_found(tmp_path: Path) -> None:
    chance = random.Random(1)
    for name in ("b.log", "a.log", "c.log.gz"):
        lines = b"".join(b"%s %d %s\r\n" % (name.encode(), n, b"x" * chance.randrange(99)) for n in range(40))
        (tmp_path / name).write_bytes(gzip.compress(lines) if name.endswith("gz") else lines + b"\nlast")
    found = await all_of(of(tmp_path))
    assert len(found) == 122
    assert len({one.cursor for one in found}) == 122
    for number in range(0, 122, 7):
        assert await all_of(of(tmp_path), found[number].cursor) == found[number + 1 :]
    assert await all_of(of(tmp_path), found[-1].cursor) == []


async def test_what_is_appended_comes_and_a_line_only_once_it_ends(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"one\ntw")
    async with of(log).open(ResumeState()) as intakes:
        assert values(await taken(intakes, 1)) == [b"one"]
        waiting = asyncio.ensure_future(taken(intakes, 1))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        append(log, b"o\nthree\nfo")
        found = await waiting
        assert values(found) == [b"two", b"three"]
    append(log, b"ur\n")
    assert values(await all_of(of(log), found[-1].cursor)) == [b"four"]


async def test_files_that_are_written_to_in_parallel_are_all_followed(tmp_path: Path) -> None:
    names = [f"{n}.log" for n in range(20)]
    found: list[Arrival] = []
    expected: set[bytes] = set()
    cursor = None
    for generation in range(3):
        async with of(tmp_path).open(ResumeState(cursor=cursor)) as intakes:
            for turn in range(3):
                for name in names:
                    append(tmp_path / name, line := f"{name} {generation} {turn}\n".encode())
                    expected.add(line[:-1])
                some = await taken(intakes, 20)
                found += some
                cursor = some[-1].cursor
    assert sorted(values(found)) == sorted(expected)


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_is_written_and_wherever_it_ends_each_line_comes_once(tmp_path: Path, seed: int) -> None:
    """Files that grow in parallel, are rotated and compressed, under a reader that crashes again and again."""
    chance, found, given, cursor = random.Random(seed), list[bytes](), list[bytes](), None
    source = of(tmp_path / "*.log*", max_size=100)
    for generation in range(30):
        for _ in range(chance.randrange(8)):
            name = chance.choice("abcd")
            some = [b"%s %d %d" % (name.encode(), generation, len(given) + n) for n in range(chance.choice((1, 2, 90)))]
            given += some
            append(tmp_path / f"{name}.log", b"".join(line + b"\n" for line in some))
        if chance.random() < 0.3 and (log := tmp_path / f"{chance.choice('abcd')}.log").exists():
            log.rename(rotated := tmp_path / f"{log.name}.{generation}")
            if chance.random() < 0.5:
                # It was seen under its new name before that.
                all_found = await all_of(source, cursor)
                found += values(all_found)
                cursor = all_found[-1].cursor if all_found else cursor
                (tmp_path / f"{rotated.name}.gz").write_bytes(gzip.compress(rotated.read_bytes()))
                rotated.unlink()
        some_found = (await all_of(source, cursor))[: chance.choice((0, 1, 7, 50, 10_000))]
        if some_found:
            found += values(some_found)
            cursor = some_found[-1].cursor
    found += values(await all_of(source, cursor))
    assert sorted(found) == sorted(given)


async def test_a_file_that_is_rotated_is_finished_before_the_new_one(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"1\n2\n")
    async with of(log).open(ResumeState()) as intakes:
        found = await taken(intakes, 2)
        append(log, b"3\n")
        log.rename(tmp_path / "a.log.1")
        log.write_bytes(b"1\n2\n")
        found += await taken(intakes, 3)
        append(tmp_path / "a.log.1", b"4\n")
        found += await taken(intakes, 1)
    assert values(found) == [b"1", b"2", b"3", b"1", b"2", b"4"]
    assert len({one.cursor for one in found}) == 6


async def test_a_file_that_was_rotated_while_nobody_read_is_finished_too(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"1\n2\n")
    (_, last) = await all_of(of(log))
    append(log, b"3\n")
    log.rename(tmp_path / "a.log.1")
    log.write_bytes(b"4\n")
    assert values(await all_of(of(log), last.cursor)) == [b"3", b"4"]


async def test_a_file_that_was_compressed_meanwhile_is_not_read_again(tmp_path: Path) -> None:
    log = tmp_path / "a.log.1"
    log.write_bytes(b"1\n2\n3\n")
    first = (await all_of(of(tmp_path)))[0]
    (tmp_path / "a.log.1.gz").write_bytes(gzip.compress(log.read_bytes()))
    log.unlink()
    assert values(await all_of(of(tmp_path), first.cursor)) == [b"2", b"3"]


async def test_a_file_that_is_cut_is_read_from_its_beginning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same line at the same place is another record then, and has another cursor."""
    log = tmp_path / "a.log"
    log.write_bytes(b"begin\nmore\n")
    async with of(log).open(ResumeState()) as intakes:
        found = await taken(intakes, 2)
        log.write_bytes(b"begin\n")
        found += await taken(intakes, 1)
    assert values(found) == [b"begin", b"more", b"begin"]
    assert len({one.cursor for one in found}) == 3
    assert "was replaced; it is read from its beginning" in caplog.text
    for begins in (b"else, and longer than it was\n", b"begin\n"):
        caplog.clear()
        log.write_bytes(begins)
        found += await all_of(of(log), found[-1].cursor)
        assert found[-1].value == begins[:-1]
        assert "it is read from its beginning" in caplog.text
    assert len({one.cursor for one in found}) == 5


async def test_a_file_that_is_removed_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "REMOVED_AFTER", 0.05)
    log = tmp_path / "a.log"
    log.write_bytes(b"1\n")
    async with of(tmp_path).open(ResumeState()) as intakes:
        found = await taken(intakes, 1)
        with log.open("ab") as writing:
            log.unlink()
            writing.write(b"2\nno end")
        found += await taken(intakes, 2)
        (tmp_path / "b.log").write_bytes(b"3\n")
        found += await taken(intakes, 1)
    assert values(found) == [b"1", b"2", b"no end", b"3"]
    assert "a.log" not in (found[-1].cursor or "")


async def test_a_folder_that_was_copied_back_is_not_read_again(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in "abc":
        (tmp_path / "in" / name).write_bytes(name.encode() * 9 + b"\n")
    last = (await all_of(of(tmp_path / "in")))[-1]
    shutil.copytree(tmp_path / "in", tmp_path / "copy")
    shutil.rmtree(tmp_path / "in")
    (tmp_path / "other").touch()
    shutil.copytree(tmp_path / "copy", tmp_path / "in")
    append(tmp_path / "in" / "b", b"new\n")
    assert values(await all_of(of(tmp_path / "in"), last.cursor)) == [b"new"]


async def test_many_files_do_not_make_the_cursor_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_progress, "TICK", 0.0)
    for n in range(300):
        (tmp_path / f"{n:04}.log").write_bytes(b"%d\n" % n)
        older(tmp_path / f"{n:04}.log", 7_200)
    found = await all_of(of(tmp_path))
    assert values(found) == [b"%d" % n for n in range(300)]
    assert max(len(one.cursor or "") for one in found) < 1_300
    for number in (0, 100, 299):
        assert await all_of(of(tmp_path), found[number].cursor) == found[number + 1 :]
    (tmp_path / "0000.new").write_bytes(b"new\n")
    append(tmp_path / "0299.log", b"more\n")
    assert sorted(values(await all_of(of(tmp_path), found[-1].cursor))) == [b"more", b"new"]


async def test_a_file_that_was_forgotten_is_gone_on_with_when_it_grows_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_progress, "TICK", 0.0)
    for n in range(60):
        (tmp_path / f"{n:04}.log").write_bytes(b"%d\n" % n)
        older(tmp_path / f"{n:04}.log", 7_200)
    async with of(tmp_path).open(ResumeState()) as intakes:
        cursor = (await taken(intakes, 60))[-1].cursor
    assert "0000.log" not in (cursor or "")
    async with of(tmp_path).open(ResumeState(cursor=cursor)) as intakes:
        await asyncio.sleep(0.05)
        waiting = asyncio.ensure_future(taken(intakes, 1))
        await asyncio.sleep(0.05)
        append(tmp_path / "0000.log", b"more\n")
        (found,) = await waiting
    assert found.value == b"more"
    assert await all_of(of(tmp_path), found.cursor) == []


async def test_too_many_files_that_may_still_grow_are_misconfigured(tmp_path: Path) -> None:
    for n in range(400):
        (tmp_path / f"{n:04}.log").write_bytes(b"%d\n" % n)
    with pytest.raises(Misconfigured, match=r'source logs: \d+ files may still grow.*closed_after = "1 s"'):
        await all_of(of(tmp_path))


async def test_files_that_have_just_come_wait_until_their_time_tells_them_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_progress, "TICK", 0.2)
    for n in range(400):
        (tmp_path / f"{n:04}.log").write_bytes(b"%d\n" % n)
    found = await all_of(of(tmp_path, closed_after=timedelta()))
    assert sorted(values(found)) == sorted(b"%d" % n for n in range(400))
    assert max(len(one.cursor or "") for one in found) < 9_000


async def test_each_whole_file_is_a_record_once_it_is_settled(tmp_path: Path) -> None:
    source = of(tmp_path, format="whole", settled=timedelta(milliseconds=200))
    (tmp_path / "a").write_bytes(b"one\ntwo\n")
    (tmp_path / "empty").touch()
    async with source.open(ResumeState()) as intakes:
        assert values(await taken(intakes, 1)) == [b"one\ntwo\n"]
        with (tmp_path / "b").open("wb", buffering=0) as writing:
            for _ in range(5):
                writing.write(b"x")
                await asyncio.sleep(0.03)
        found = await taken(intakes, 1)
        assert values(found) == [b"xxxxx"]
        (tmp_path / "new").write_bytes(b"another one")
        (tmp_path / "new").replace(tmp_path / "a")
        found += await taken(intakes, 1)
        assert values(found)[1:] == [b"another one"]
        (tmp_path / "b").write_bytes(b"yyyyy")
        found += await taken(intakes, 1)
        assert values(found)[2:] == [b"yyyyy"]
    assert await all_of(source, found[-1].cursor) == []
    assert await all_of(source, found[0].cursor) != []


async def test_a_whole_file_may_be_compressed_and_may_be_too_large(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"packed"))
    (tmp_path / "b.gz").write_bytes(gzip.compress(bytes(20_000_000)))
    (tmp_path / "c").write_bytes(b"x" * 101)
    (tmp_path / "d").write_bytes(b"x" * 100)
    found = await all_of(of(tmp_path, format="whole", max_size=100, settled=timedelta()))
    assert sorted((one.value[:6], len(one.value), one.refused is None) for one in found) == [
        (bytes(6), 101, False),
        (b"packed", 6, True),
        (b"xxxxxx", 100, True),
        (b"xxxxxx", 101, False),
    ]
    assert "100 bytes" in {one.refused for one in found if one.refused}.pop()


async def test_a_line_that_is_too_long_has_a_receipt_and_a_place(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"x" * 11 + b"\nnext\n" + b"y" * 1_000_000 + b"\nlast\n")
    found = await all_of(of(tmp_path / "a.log", max_size=10))
    assert [(one.value, one.refused is None) for one in found] == [
        (b"x" * 10, False),
        (b"next", True),
        (b"y" * 10, False),
        (b"last", True),
    ]
    for number in range(4):
        assert await all_of(of(tmp_path / "a.log", max_size=10), found[number].cursor) == found[number + 1 :]


def spoil(data: bytes) -> bytes:
    return data[: len(data) // 2] + b"\xff" * 20 + data[len(data) // 2 + 20 :]


@pytest.mark.parametrize("harm", [spoil, lambda data: data[:-10], lambda data: b"not compressed at all"])
@pytest.mark.parametrize("form", ["lines", "whole"])
async def test_compressed_data_that_is_damaged_has_a_receipt_and_the_others_go_on(
    tmp_path: Path, harm: Callable[[bytes], bytes], form: str
) -> None:
    lines = b"".join(random.Random(5).randbytes(20).hex().encode() + b"\n" for _ in range(2_000))
    (tmp_path / "a.gz").write_bytes(harm(gzip.compress(lines)))
    (tmp_path / "b").write_bytes(b"good\n")
    source = of(tmp_path, format=form, settled=timedelta())
    found = await all_of(source)
    assert [one.refused for one in found if one.refused] == [
        next(one.refused for one in found if one.refused and "a.gz cannot be read after byte" in one.refused)
    ]
    assert found[-1].value.strip() == b"good"
    assert await all_of(source, found[-1].cursor) == []


async def test_compressed_data_that_is_still_being_written_is_awaited(tmp_path: Path) -> None:
    data = gzip.compress(b"one\ntwo\n")
    (tmp_path / "a.gz").write_bytes(data[:-12])
    async with of(tmp_path).open(ResumeState()) as intakes:
        waiting = asyncio.ensure_future(taken(intakes, 2))
        await asyncio.sleep(0.05)
        append(tmp_path / "a.gz", data[-12:])
        found = await waiting
    assert values(found) == [b"one", b"two"]
    assert all(one.refused is None for one in found)


async def test_only_regular_files_that_are_meant_are_read(tmp_path: Path) -> None:
    inside = tmp_path / "in"
    inside.mkdir()
    (tmp_path / "secret").write_bytes(b"secret\n")
    os.mkfifo(inside / "fifo")
    (inside / "link").symlink_to(tmp_path / "secret")
    (inside / "folder").mkdir()
    (inside / ".hidden").write_bytes(b"hidden\n")
    (inside / "a.log").write_bytes(b"a\n")
    (inside / "b.txt").write_bytes(b"b\n")
    os.link(inside / "b.txt", inside / "c.txt")
    assert sorted(values(await all_of(of(inside)))) == [b"a", b"b"]
    assert values(await all_of(of(inside / "*.log"))) == [b"a"]
    assert values(await all_of(of(inside / "link"))) == [b"secret"]


@pytest.mark.parametrize("path", ["inbox/*.log", "{folder}/inbox/*.log"])
async def test_a_relative_path_begins_where_the_pipeline_lies(tmp_path: Path, path: str) -> None:
    (tmp_path / "inbox").mkdir()
    (tmp_path / "inbox" / "a.log").write_bytes(b"a\n")
    home = SourceContext(MemoryChannels(), "into", "into.dead", "bookmarks", tmp_path / ".penstock")
    source = of(Path(path.format(folder=tmp_path))).with_context(home)
    assert values(await all_of(source)) == [b"a"]


async def test_names_of_any_kind_have_cursors(tmp_path: Path) -> None:
    for name in (b"a\nb", b'"\\', b"\xff\xfe", "ß€".encode(), b"\x1b[2J"):
        (tmp_path / os.fsdecode(name)).write_bytes(name.replace(b"\n", b"") + b"\n")
    found = await all_of(of(tmp_path))
    assert len(found) == 5
    for number in range(5):
        assert (found[number].cursor or "").isascii()
        assert await all_of(of(tmp_path), found[number].cursor) == found[number + 1 :]


async def test_a_file_that_may_not_be_read_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a\n")
    (tmp_path / "a").chmod(0)
    (tmp_path / "b").write_bytes(b"b\n")
    with bound_by_permissions():
        async with of(tmp_path, follow=False).open(ResumeState()) as intakes:
            assert values(await taken(intakes, 1)) == [b"b"]
            with pytest.raises(Unavailable, match="Permission denied"):
                await anext(intakes)


async def test_what_is_not_there_may_come(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path / "nowhere" / "*.log"):
        with pytest.raises(Unavailable):
            await all_of(of(path))
    assert await all_of(of(tmp_path / "*.log")) == []


async def test_too_many_files_are_misconfigured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_FILES", 3)
    for n in range(4):
        (tmp_path / str(n)).touch()
    with pytest.raises(Misconfigured, match="more than 3 files"):
        await all_of(of(tmp_path))


async def test_a_cursor_of_another_source_is_misconfigured(tmp_path: Path) -> None:
    for cursor in ("", "17", "[]", "{}", '{"done":5,"life":0,"files":[]}', '{"done":null,"life":0,"files":[[]]}'):
        with pytest.raises(Misconfigured, match="give it another name"):
            await all_of(of(tmp_path), cursor)


async def test_intakes_are_bounded_and_no_file_stays_open(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"x\n" * 200_000)
    before = open_files()
    source = of(tmp_path / "a.log")
    async with source.open(ResumeState()) as intakes:
        sizes = [len((await anext(intakes)).arrivals) for _ in range(20)]
    assert max(sizes) <= 2_000
    async with source.open(ResumeState()) as intakes, aclosing(intakes):  # type: ignore[type-var]
        waiting = asyncio.ensure_future(anext(intakes))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert open_files() == before


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("file://", {}, "no path"),
        ("file://a/*/b", {}, "only the last part"),
        ("file://a", {"format": "words"}, "source logs, format: .*one of lines, whole"),
        ("file://a", {"max_size": 0}, "source logs, max_size"),
        ("file://a", {"every": timedelta()}, "source logs, every"),
    ],
)
def test_what_cannot_be_meant_is_misconfigured(url: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        FilesSource(url, "logs", **options)

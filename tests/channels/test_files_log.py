"""One log on disk: what is torn, damaged, full or not synced is never taken for what was acknowledged."""

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
from tests.channels.traffic import numbered, numbers

from penstock.channels.files import mark as marks
from penstock.channels.files import segments
from penstock.channels.files.cleaning import clean
from penstock.channels.files.cursor import Cursor
from penstock.channels.files.frames import pack
from penstock.channels.files.log import Log
from penstock.channels.files.mark import Mark
from penstock.core.contracts import Entry
from penstock.core.errors import Refused, Unaccounted, Unavailable
from penstock.core.record import Origin, Record
from penstock.testing.clock import ManualClock


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Log.make(tmp_path / "log")
    return tmp_path / "log"


def read_all(folder: Path, offset: int = 0) -> list[Entry]:
    with Log(folder) as log:
        found: list[Entry] = []
        while some := log.read(offset):
            found += some
            offset = found[-1].offset + 1
        return found


def only_file(folder: Path) -> Path:
    (base,) = segments.bases(folder)
    return segments.path(folder, base)


def forget_mark(folder: Path) -> None:
    marks.path(folder).write_bytes(b"")


def test_what_is_appended_is_read_as_it_was(folder: Path) -> None:
    records = [
        Record(b"value", Origin("é", 1, 2, 3), b"key", (("x", b""), ("", b"\x00"))),
        Record(None, None, b""),
        Record(b"", None, None),
        Record(b"x" * 3_000_000),
    ]
    with Log(folder) as log:
        assert log.append(records) == range(4)
        found = log.read(0, 1 << 30)
        assert log.bounds() == (0, 4)
    assert [(entry.key, entry.value, list(entry.headers)) for entry in found] == [
        (record.key, record.value, record.headers()) for record in records
    ]


def test_a_torn_tail_is_cut_at_the_last_whole_record_wherever_it_is_torn(folder: Path) -> None:
    with Log(folder) as log:
        log.append(numbered(3))
    file, mark = only_file(folder), marks.path(folder).read_bytes()
    whole, (torn, _) = file.read_bytes(), pack(numbered(1, first=4), 0, 3, 1, 1)
    for known in (mark, b""):
        for length in range(len(torn) + 1):
            file.write_bytes(whole + torn[:length])
            marks.path(folder).write_bytes(known)
            kept = 4 if length == len(torn) else 3
            with Log(folder) as log:
                assert log.append(numbered(1, first=9)) == range(kept, kept + 1)
            assert numbers(read_all(folder)) == [*range(1, kept + 1), 9]


def test_a_reader_sees_nothing_of_what_is_being_appended(folder: Path) -> None:
    with Log(folder) as reader, Log(folder, sync=lambda _: seen.append(numbers(reader.read(3)))) as log:
        seen: list[list[int]] = []
        with Log(folder) as before:
            before.append(numbered(3))
        assert numbers(reader.read(0)) == [1, 2, 3]
        log.append(numbered(2, first=4))
        assert seen == [[]]
        assert numbers(reader.read(3)) == [4, 5]


def test_what_was_on_disk_when_the_mark_was_not_is_found_again(folder: Path) -> None:
    """After a power cut the mark may be old, or empty."""
    old = []
    with Log(folder, segment=1_000) as log:
        for first in range(1, 101, 10):
            old.append(marks.path(folder).read_bytes())
            log.append(numbered(10, first=first))
    for mark in (*old, b"", b"\x00" * 36, b"garbage"):
        marks.path(folder).write_bytes(mark)
        assert numbers(read_all(folder)) == list(range(1, 101))
        with Log(folder) as log:
            assert log.bounds() == (0, 100)


def test_a_flipped_bit_is_named_with_file_byte_and_offset_and_hides_nothing_else(folder: Path) -> None:
    with Log(folder) as log:
        for number in range(1, 6):
            log.append(numbered(1, first=number))
    file = only_file(folder)
    whole = file.read_bytes()
    with segments.opened(folder, 0) as fd:
        third = next(record for record in segments.walk(fd, segments.HEADER, len(whole)) if record.offset == 2)
    for position in range(third.position, third.stop):
        for bit in (0, 7):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            file.write_bytes(damaged)
            with Log(folder) as log:
                assert numbers(log.read(0, 1)) == [1, 2]
                for _ in range(2):
                    with pytest.raises(Unaccounted, match=rf"{file} is damaged at byte {third.position}.* offset 2 "):
                        log.read(2)
                assert numbers(log.read(3)) == [4, 5]


def test_damage_behind_a_mark_that_lags_takes_nothing_from_what_follows(folder: Path) -> None:
    """After a power cut, of which nobody knows what was acknowledged behind the mark."""
    old = marks.path(folder).read_bytes()
    with Log(folder) as log:
        for number in range(1, 101):
            log.append(numbered(1, first=number))
    file = only_file(folder)
    whole = file.read_bytes()
    with segments.opened(folder, 0) as fd:
        places = {record.offset: record for record in segments.walk(fd, segments.HEADER, len(whole))}
    for first, last in ((0, 0), (40, 40), (40, 60), (98, 98)):
        damaged = bytearray(whole)
        damaged[places[first].position : places[last].stop] = bytes(places[last].stop - places[first].position)
        file.write_bytes(damaged + b"torn")
        marks.path(folder).write_bytes(old)
        with Log(folder) as log:
            assert log.append(numbered(1, first=101)) == range(100, 101)
        assert file.read_bytes() == damaged
        with pytest.raises(
            Unaccounted, match=rf"is damaged at byte {places[first].position}, where the offset {first} "
        ):
            read_all(folder)
        assert numbers(read_all(folder, last + 1)) == list(range(last + 2, 102))
        segments.path(folder, 100).unlink()


def test_a_segment_that_is_closed_and_compacted_meanwhile_is_no_damage(folder: Path) -> None:
    clock = ManualClock()
    with Log(folder, turn=timedelta(hours=1), clock=clock) as log:
        log.append(numbered(1_000, keys=1))
        cursor = Between(folder, "x", 0, 0)
        try:

            def meanwhile() -> None:
                for number in (1_001, 1_002, 1_003):
                    clock.move(2 * 3600)
                    log.append(numbered(1, keys=1, first=number))
                clean(folder, clock.now(), None, timedelta(hours=1))

            cursor.between = meanwhile
            assert numbers(cursor.take(10)) == [1_002, 1_003]
        finally:
            cursor.close()


class Between(Cursor):
    """Something happens between its look at the mark and what it does then."""

    between: Callable[[], None] | None = None

    def mark(self) -> Mark:
        found = super().mark()
        if (happens := self.between) is not None:
            self.between = None
            happens()
        return found


def test_damage_is_no_end_for_those_who_append(folder: Path) -> None:
    with Log(folder) as log:
        log.append(numbered(3))
    file = only_file(folder)
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    with Log(folder) as log:
        assert log.append(numbered(1, first=4)) == range(3, 4)
    with pytest.raises(Unaccounted, match="the offset 2 should lie: its checksum is another"):
        read_all(folder)
    assert numbers(read_all(folder, 3)) == [4]


def test_what_was_acknowledged_and_is_gone_is_unaccounted_and_its_numbers_are_not_given_again(folder: Path) -> None:
    with Log(folder) as log:
        log.append(numbered(5))
    file = only_file(folder)
    whole = file.read_bytes()
    for length in range(len(whole) - 150, len(whole), 7):
        file.write_bytes(whole[:length])
        with pytest.raises(Unaccounted, match=str(file)):
            read_all(folder)
    with Log(folder) as log:
        assert log.append(numbered(1, first=6)) == range(5, 6)
    assert file.read_bytes() == whole[:length]
    assert numbers(read_all(folder, 5)) == [6]
    with pytest.raises(Unaccounted):
        read_all(folder)


def test_records_are_safe_before_they_are_acknowledged(folder: Path) -> None:
    synced: list[int] = []
    with Log(folder, sync=lambda fd: synced.append(os.fstat(fd).st_size)) as log:
        log.append(numbered(500))
        assert synced == [only_file(folder).stat().st_size]


def failing(_: int) -> None:
    raise OSError(5, "Input/output error")


def test_a_sync_that_fails_is_final(folder: Path) -> None:
    calls: list[int] = []

    def fails(fd: int) -> None:
        calls.append(fd)
        failing(fd)

    with Log(folder) as log:
        log.append(numbered(3))
    size = only_file(folder).stat().st_size
    with Log(folder, sync=fails) as dead:
        for _ in range(3):
            with pytest.raises(Unavailable, match=r"could not be synced, which is final: Input/output error"):
                dead.append(numbered(2, first=90))
        assert len(calls) == 1
        assert only_file(folder).stat().st_size == size
        assert numbers(read_all(folder)) == [1, 2, 3]
        with Log(folder) as log:
            assert log.append(numbered(1, first=4)) == range(3, 4)
    assert numbers(read_all(folder)) == [1, 2, 3, 4]


@contextmanager
def little_room(most: int) -> Iterator[None]:
    """A file cannot become larger: what a disk that is full does, without one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_unavailable_and_leaves_nothing_half_done(folder: Path) -> None:
    with Log(folder) as log:
        log.append(numbered(3))
        size = only_file(folder).stat().st_size
        for room in (0, 1, 50, 300):
            with little_room(size + room), pytest.raises(Unavailable, match="there is no room"):
                log.append(numbered(100, first=50))
            assert only_file(folder).stat().st_size == size
        assert log.append(numbered(2, first=4)) == range(3, 5)
    assert numbers(read_all(folder)) == [1, 2, 3, 4, 5]


def test_a_full_disk_at_the_turn_of_a_segment_is_got_over(folder: Path) -> None:
    with Log(folder, segment=1_000) as log:
        log.append(numbered(20))
        with little_room(4), pytest.raises(Unavailable, match="there is no room"):
            log.append(numbered(1, first=21))
        assert log.append(numbered(1, first=21)) == range(20, 21)
    assert numbers(read_all(folder)) == list(range(1, 22))


def test_segments_follow_each_other_and_every_offset_is_found(folder: Path) -> None:
    with Log(folder, segment=100_000) as log:
        for first in range(1, 4_001, 40):
            log.append(numbered(40, first=first))
    known = segments.bases(folder)
    assert len(known) > 3
    assert any(segments.index_path(folder, base).exists() for base in known)
    for offset in (*range(0, 4_000, 317), *known, *(base - 1 for base in known[1:]), 3_999):
        with Log(folder) as log:
            assert numbers(log.read(offset, 1))[0] == offset + 1
    assert numbers(read_all(folder)) == list(range(1, 4_001))


@pytest.mark.parametrize("damage", [lambda told: told[:-5], lambda told: bytes(len(told)), lambda told: b"\x01" + told])
def test_an_index_that_lies_misleads_nobody(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    with Log(folder) as log:
        for first in range(1, 4_001, 400):
            log.append(numbered(400, first=first))
    index = segments.index_path(folder, 0)
    index.write_bytes(damage(index.read_bytes()))
    for offset in range(0, 4_000, 333):
        with Log(folder) as log:
            assert numbers(log.read(offset, 1))[0] == offset + 1


def test_time_never_steps_back(folder: Path) -> None:
    clock = ManualClock(2_000_000)
    with Log(folder, clock=clock) as log:
        log.append(numbered(1))
        clock.move(-1)
        log.append(numbered(1, first=2))
    with Log(folder, clock=clock) as log:
        log.append(numbered(1, first=3))
    assert all(one.appended <= other.appended for one, other in pairwise(read_all(folder)))


def test_several_logs_of_one_folder_take_turns(folder: Path) -> None:
    with Log(folder, segment=2_000) as one, Log(folder, segment=3_000) as other:
        for first in range(1, 201, 2):
            one.append(numbered(1, first=first))
            other.append(numbered(1, first=first + 1))
    assert numbers(read_all(folder)) == list(range(1, 201))
    assert [entry.offset for entry in read_all(folder)] == list(range(200))


def test_what_cannot_be_written_down_is_refused_and_the_rest_goes_on(folder: Path) -> None:
    with Log(folder) as log:
        log.append(numbered(1))
        with pytest.raises(Refused, match="the name of a header is no text"):
            log.append([*numbered(1, first=2), Record(b"", extra=(("\ud800", b""),))])
        with pytest.raises(Refused, match="70000 headers"):
            log.append([Record(b"", extra=(("h", b""),) * 70_000)])
        assert log.append(numbered(1, first=2)) == range(1, 2)
    assert numbers(read_all(folder)) == [1, 2]


def test_without_sync_it_can_be_synced_by_hand(folder: Path) -> None:
    with Log(folder, sync=None) as log:
        log.append(numbered(3))
        log.sync()
        assert numbers(log.read(0)) == [1, 2, 3]


def test_a_file_that_is_no_segment_is_said(folder: Path) -> None:
    with Log(folder) as log:
        log.append(numbered(3))
    file = only_file(folder)
    file.write_bytes(b"something" + file.read_bytes()[9:])
    with pytest.raises(Unaccounted, match="does not begin as a segment does"):
        read_all(folder)
    forget_mark(folder)
    with Log(folder) as log, pytest.raises(Unaccounted, match="does not begin as a segment does"):
        log.append(numbered(1))

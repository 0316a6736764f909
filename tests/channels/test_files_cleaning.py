"""What goes from a log on disk, what stays, and that readers are right all the while."""

import random
from datetime import timedelta
from pathlib import Path

import pytest
from tests.channels.traffic import numbered, numbers

from penstock.channels.files import segments
from penstock.channels.files.cleaning import clean
from penstock.channels.files.frames import Damaged
from penstock.channels.files.log import Log
from penstock.core.contracts import Entry
from penstock.core.errors import Unaccounted
from penstock.core.record import Record
from penstock.testing.clock import ManualClock

HOUR = timedelta(hours=1)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def log(tmp_path: Path, clock: ManualClock) -> Log:
    Log.make(tmp_path / "log")
    return Log(tmp_path / "log", turn=HOUR, clock=clock)


def read_all(log: Log, offset: int = 0) -> list[Entry]:
    found: list[Entry] = []
    with Log(log.folder) as reader:
        while some := reader.read(offset):
            found += some
            offset = found[-1].offset + 1
    return found


def close_segment(log: Log, clock: ManualClock, key: bytes = b"tick") -> None:
    """So that all before lies in closed segments that are older than an hour."""
    clock.move(2 * 3600)
    log.append([Record(b"tick", key=key)])


def test_what_is_older_than_is_kept_goes_by_whole_segments(log: Log, clock: ManualClock) -> None:
    for first in range(1, 6):
        log.append(numbered(10, first=10 * first))
        clock.move(4_000)
    log.append(numbered(1, first=99))
    clean(log.folder, clock.now(), timedelta(seconds=9_000), None)
    low, end = log.bounds()
    assert (low, end) == (30, 51)
    assert numbers(read_all(log, low)) == [*range(40, 60), 99]
    with pytest.raises(Unaccounted, match="is to be read from 0, and begins at 30: retention was quicker"):
        log.read(0)


def test_the_segment_that_is_appended_to_stays(log: Log, clock: ManualClock) -> None:
    log.append(numbered(3))
    clock.move(1e6)
    clean(log.folder, clock.now(), HOUR, HOUR)
    assert numbers(read_all(log)) == [1, 2, 3]


def test_who_reads_a_segment_that_goes_reads_it_to_its_end_and_is_told_then(log: Log, clock: ManualClock) -> None:
    log.append(numbered(2_000))
    for first in (3_001, 4_001, 5_001):
        close_segment(log, clock)
        log.append(numbered(1, first=first))
    with Log(log.folder) as reader:
        found = list(reader.read(0, 1))
        assert 0 < len(found) < 2_000
        clean(log.folder, clock.now(), HOUR, None)
        while len(found) < 2_000:
            found += reader.read(len(found), 1)
        assert numbers(found) == list(range(1, 2_001))
        with pytest.raises(Unaccounted, match="retention was quicker"):
            reader.read(2_000)


def test_the_last_record_of_each_key_stays_where_it_was(log: Log, clock: ManualClock) -> None:
    written: dict[int, Record] = {}
    random.seed(5)
    for turn in range(5):
        some = [
            Record(b"%d" % number, key=b"k%d" % random.randrange(40 + 10 * turn)) for number in range(100 * (turn + 1))
        ]
        written |= dict(zip(log.append(some), some, strict=True))
        clock.move(2 * 3600)
        clean(log.folder, clock.now(), None, HOUR)
    close_segment(log, clock)
    clean(log.folder, clock.now(), None, HOUR)
    entries = read_all(log)[:-1]
    last = {record.key: offset for offset, record in written.items()}
    assert [entry.offset for entry in entries] == sorted(last.values())
    assert all(entry.value == written[entry.offset].value for entry in entries)
    assert log.bounds() == (0, len(written) + 1)


def test_every_position_is_good_in_a_log_with_holes(log: Log, clock: ManualClock) -> None:
    for turn in range(3):
        log.append([Record(b"x" * 2_000, key=b"k%d" % (number % 50)) for number in range(200 + turn)])
        close_segment(log, clock)
    clean(log.folder, clock.now(), None, HOUR)
    there = [entry.offset for entry in read_all(log)]
    assert len(there) < 100
    for offset in range(0, log.bounds()[1], 7):
        assert [entry.offset for entry in read_all(log, offset)] == [other for other in there if other >= offset]


def test_a_record_that_deletes_its_key_stays_for_a_day(log: Log, clock: ManualClock) -> None:
    log.append([Record(b"1", key=b"a"), Record(b"1", key=b"b")])
    close_segment(log, clock)
    log.append([Record(None, key=b"a")])
    close_segment(log, clock)
    clean(log.folder, clock.now(), None, HOUR)
    entries = [entry for entry in read_all(log) if entry.key != b"tick"]
    assert [(entry.key, entry.value) for entry in entries] == [(b"b", b"1"), (b"a", None)]
    clock.move(86_400)
    for _ in range(2):
        close_segment(log, clock)
        clean(log.folder, clock.now(), None, HOUR)
    assert {entry.key for entry in read_all(log)} == {b"b", b"tick"}


def test_records_without_a_key_stay(log: Log, clock: ManualClock) -> None:
    log.append([Record(b"1"), Record(None), Record(b"1")])
    close_segment(log, clock)
    clock.move(2 * 86_400)
    close_segment(log, clock)
    clean(log.folder, clock.now(), None, HOUR)
    assert [entry.value for entry in read_all(log)][:3] == [b"1", None, b"1"]


def test_who_reads_a_segment_that_is_compacted_reads_it_as_it_was(log: Log, clock: ManualClock) -> None:
    log.append([Record(b"%d" % number, key=b"same") for number in range(1, 2_001)])
    close_segment(log, clock, b"same")
    with Log(log.folder) as reader:
        found = list(reader.read(0, 1))
        clean(log.folder, clock.now(), None, HOUR)
        while len(found) < 2_000:
            found += reader.read(found[-1].offset + 1, 1)
        assert numbers(found) == list(range(1, 2_001))
        assert [entry.value for entry in reader.read(2_000)] == [b"tick"]
    assert [entry.value for entry in read_all(log)] == [b"2000", b"tick"]


def test_who_reads_a_compacted_segment_is_told_of_those_behind_it_that_went(log: Log, clock: ManualClock) -> None:
    for first in (0, 1_000, 2_000, 3_000):
        log.append([Record(b"", key=b"%d" % (first + number % 400)) for number in range(500)])
        clock.move(4_000)
    log.append([Record(b"tick", key=b"tick")])
    clean(log.folder, clock.now(), None, HOUR)
    with Log(log.folder) as reader:
        found = list(reader.read(0, 1))
        assert found
        clock.move(4_000)
        clean(log.folder, clock.now(), timedelta(seconds=12_500), None)
        assert log.bounds()[0] == 1_000
        while found[-1].offset < 499:
            found += reader.read(found[-1].offset + 1, 1)
        assert found[-1].offset == 499
        with pytest.raises(Unaccounted, match="begins at 1000: retention was quicker"):
            reader.read(500)


def test_segments_of_which_nothing_is_left_go_and_nobody_misses_them(log: Log, clock: ManualClock) -> None:
    log.append([Record(b"first", key=b"other")])
    close_segment(log, clock)
    log.append(numbered(1_000, keys=1))
    with Log(log.folder) as late, Log(log.folder) as reader:
        assert late.read(0, 1)
        found = list(reader.read(2, 1))  # It stands in a segment that is still whole.
        for _ in range(50):
            close_segment(log, clock, b"k0")
            clean(log.folder, clock.now(), None, HOUR)
        assert len(segments.bases(log.folder)) <= 5
        left = [entry.offset for entry in read_all(log)]
        assert left[0] == 0
        assert left[-1] == log.bounds()[1] - 1
        while some := reader.read(found[-1].offset + 1, 1):
            found += some
        assert numbers(found[:1_000]) == list(range(1, 1_001))
        assert found[-1].offset == left[-1]
        for offset in range(log.bounds()[1]):
            assert [entry.offset for entry in read_all(log, offset)] == [other for other in left if other >= offset]
        assert [entry.offset for entry in late.read(1)][-1] == left[-1]


def test_damage_is_not_compacted_away_and_is_kept_no_longer_than_the_rest(log: Log, clock: ManualClock) -> None:
    log.append(numbered(10, keys=1))
    close_segment(log, clock)
    file = segments.path(log.folder, 0)
    damaged = bytearray(file.read_bytes())
    damaged[300] ^= 1
    file.write_bytes(damaged)
    clock.move(2 * 3600)
    with pytest.raises(Damaged):
        clean(log.folder, clock.now(), None, HOUR)
    assert file.read_bytes() == damaged
    clean(log.folder, clock.now(), HOUR, None)
    assert not file.exists()


def test_what_a_cleaner_left_that_died_goes_with_the_next(log: Log, clock: ManualClock) -> None:
    rest = log.folder / ".half.new"
    rest.write_bytes(b"half")
    clean(log.folder, clock.now(), HOUR, None)
    assert not rest.exists()

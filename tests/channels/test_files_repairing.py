"""Damaged logs in files: found by themselves, and written anew without what is damaged."""

import random
from pathlib import Path

import pytest
from tests.channels.traffic import numbered
from tests.damaging import deleted, emptied, flipped, overwritten, truncated

from penstock.channels.files import segments
from penstock.channels.files.log import Log
from penstock.channels.files.repairing import damaged_logs
from penstock.core.contracts import Entry
from penstock.core.errors import Unaccounted


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The one partition of a channel in a folder of channels."""
    (tmp_path / "channels" / "rsvps").mkdir(parents=True)
    Log.make(tmp_path / "channels" / "rsvps" / "0")
    return tmp_path / "channels" / "rsvps" / "0"


def read_all(folder: Path) -> list[Entry]:
    with Log(folder) as log:
        found: list[Entry] = []
        while some := log.read(found[-1].offset + 1 if found else 0):
            found += some
        return found


def test_what_is_whole_is_not_damaged(folder: Path, tmp_path: Path) -> None:
    with Log(folder) as log:
        log.append(numbered(50))
    assert list(damaged_logs(tmp_path / "channels")) == []
    assert list(damaged_logs(tmp_path / "nothing")) == []


@pytest.mark.parametrize("damage", [truncated, flipped, overwritten, emptied])
@pytest.mark.parametrize("seed", range(5))
def test_all_but_the_damaged_records_can_be_read_after_a_repair(
    folder: Path, tmp_path: Path, damage: object, seed: int
) -> None:
    with Log(folder) as log:
        log.append(numbered(200))
    before = {entry.offset: entry.value for entry in read_all(folder)}
    (base,) = segments.bases(folder)
    damage(segments.path(folder, base), random.Random(seed))  # type: ignore[operator]
    with pytest.raises(Unaccounted):
        read_all(folder)
    found = list(damaged_logs(tmp_path / "channels"))
    assert [one.channel for one in found] == ["rsvps"]
    for one in found:
        copy, _ = one.repair(tmp_path / "aside")
        assert copy.exists()
    assert list(damaged_logs(tmp_path / "channels")) == []
    after = read_all(folder)
    assert all(before[entry.offset] == entry.value for entry in after)
    assert len(after) >= (199 if damage is flipped else 0)
    with Log(folder) as log:
        assert log.append(numbered(3)) == range(200, 203)
    assert [entry.offset for entry in read_all(folder)][-3:] == [200, 201, 202]


def test_a_segment_that_is_gone_is_said_by_whoever_reads(folder: Path) -> None:
    with Log(folder) as log:
        log.append(numbered(20))
    (base,) = segments.bases(folder)
    deleted(segments.path(folder, base), random.Random(0))
    with pytest.raises(Unaccounted):
        read_all(folder)

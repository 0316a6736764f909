"""Which numbers a lake lacks: a real table, and what a ledger would hold."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from tests.stores.lakes import LoadedLake

from penstock.audit.content import Content, Run
from penstock.audit.hops import Gap
from penstock.core.contracts import Entry
from penstock.core.errors import Unavailable
from penstock.core.record import Origin
from penstock.operate.deep_audit import absent
from penstock.stores.lake import LakeStore

Seen = Mapping[tuple[str, str, int], Sequence[tuple[int, int]]]


def content(seen: Seen) -> Content:
    runs = {numbering: [Run(first, last, 0) for first, last in some] for numbering, some in seen.items()}
    return Content({}, {}, {}, runs, {}, [], {})


@pytest.fixture
def lake(tmp_path: Path) -> LakeStore:
    """Holds 1–3, 6 and 8–10 of a sender, and one record without a number."""
    store = LakeStore(str(tmp_path / "lake"), "things")
    headers = [Origin("kiosk", 2, seq, 0).headers() for seq in (1, 2, 3, 6, 8, 9, 10)]
    entries = [Entry("things", 0, at, 0, None, b"{}", some) for at, some in enumerate([*headers, []])]
    with closing(LoadedLake(store).open()) as table:
        table.write(entries, {})
    return store


def test_what_the_channel_holds_and_the_lake_does_not_is_named(lake: LakeStore) -> None:
    seen = {("things", "kiosk", 2): [(1, 6), (8, 12)], ("things", "other", 1): [(4, 5)]}
    assert absent(lake, content(seen), "things") == (
        Gap("kiosk", 2, 4, 5),
        Gap("kiosk", 2, 11, 12),
        Gap("other", 1, 4, 5),
    )


def test_dead_letters_and_other_channels_are_not_missed(lake: LakeStore) -> None:
    seen = {
        ("things", "kiosk", 2): [(1, 6), (8, 10)],
        ("things.dead", "kiosk", 2): [(4, 5)],
        ("others", "kiosk", 2): [(1, 100)],
    }
    assert absent(lake, content(seen), "things") == ()


def test_a_lake_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    store = LakeStore(str(tmp_path / "nowhere"), "things")
    assert absent(store, content({("things", "kiosk", 2): [(1, 3)]}), "things") == (Gap("kiosk", 2, 1, 3),)
    assert not (tmp_path / "nowhere").exists()


def test_a_lake_that_cannot_be_read_is_unavailable(lake: LakeStore) -> None:
    next(Path(lake.path).glob("*.parquet")).unlink()
    with pytest.raises(Unavailable, match="the lake"):
        absent(lake, content({("things", "kiosk", 2): [(1, 3)]}), "things")

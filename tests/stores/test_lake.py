import datetime
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from tests.damaging import truncated
from tests.stores.lakes import LoadedLake

from penstock.audit.account import Outcome
from penstock.core.contracts import Entry
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.record import Origin
from penstock.core.runs import Runs
from penstock.stores.lake import LakeStore, runs_in

NOON = 1_700_000_000_000_000


@pytest.fixture
def lake(tmp_path: Path) -> LoadedLake:
    return LoadedLake(LakeStore(str(tmp_path / "lakes" / "rsvps"), "rsvps"), typed=True)


def entry(offset: int, value: bytes | None = None, seq: int | None = None, time: int = NOON) -> Entry:
    seq = offset if seq is None else seq
    return Entry("rsvps", 0, offset, NOON, None, value or b'{"n": %d}' % seq, Origin("a", 1, seq, time).headers())


def changed(lake: LoadedLake, **other: Any) -> LoadedLake:
    return replace(lake, store=replace(lake.store, **other))


def rows(lake: LoadedLake) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = DeltaTable(lake.path).to_pyarrow_table().to_pylist()
    return sorted(found, key=lambda row: row["_offset"])


def test_a_record_that_comes_again_after_a_restart_is_absorbed(lake: LoadedLake) -> None:
    """The table itself is what remembers: another offset, the same origin."""
    lake.open().write([entry(n) for n in range(10)], {0: 10})
    again = lake.open()
    assert again.write([entry(10, seq=3), entry(11, seq=11), entry(12, seq=11)], {0: 13}) == 1
    assert [row["_seq"] for row in rows(lake)] == [*range(10), 11]


@pytest.mark.parametrize("time", [0, -1, 253_402_300_800_000_000, 2**62, -(2**62)])
def test_a_sender_with_a_wild_clock_does_no_harm(lake: LoadedLake, time: int) -> None:
    assert lake.open().write([entry(0, time=time), entry(1)], {0: 2}) == 2
    assert lake.open().write([entry(0, time=time), entry(2)], {0: 3}) == 1
    assert DeltaTable(lake.path).count() == 3


def test_small_files_are_put_together(lake: LoadedLake) -> None:
    lake = changed(lake, compact_every=10)
    table = lake.open()
    for n in range(25):
        table.write([entry(n)], {0: n + 1})
    assert len(DeltaTable(lake.path).file_uris()) == 6
    assert table.positions() == {0: 25}
    assert [row["n"] for row in rows(lake)] == list(range(25))
    assert lake.open().positions() == {0: 25}


def test_files_that_nobody_needs_any_more_are_removed(lake: LoadedLake) -> None:
    kept, removed = (
        changed(lake, compact_every=1),
        changed(lake, path=f"{lake.path}2", compact_every=1, keep=datetime.timedelta(0)),
    )
    for one in (kept, removed):
        table = one.open()
        for n in range(12):
            table.write([entry(n)], {0: n + 1})
        assert [row["n"] for row in rows(one)] == list(range(12))
    assert len(list(Path(kept.path).glob("*.parquet"))) > 12
    assert len(list(Path(removed.path).glob("*.parquet"))) == 1


def test_the_log_has_checkpoints(lake: LoadedLake) -> None:
    table = lake.open()
    for n in range(60):
        table.write([entry(n)], {0: n + 1})
    assert list(Path(lake.path, "_delta_log").glob("*.checkpoint.parquet"))
    assert lake.open().positions() == {0: 60}


def test_the_totals_outlive_the_log_before_a_checkpoint(lake: LoadedLake) -> None:
    """Where counting began is written once, and lies in no later commit."""
    table = lake.open()
    table.begin({0: 5})
    for n in range(5, 65):
        table.write([entry(n)], {0: n + 1})
    log = Path(lake.path, "_delta_log")
    last = max(int(path.name.partition(".")[0]) for path in log.glob("*.checkpoint.parquet"))
    for path in log.glob("*.json"):
        if int(path.stem) <= last:
            path.unlink()
    share = lake.open().share()
    assert (share.since, share.until, share.taken) == ({0: 5}, {0: 65}, 60)


def test_what_does_not_fit_is_counted_as_refused(lake: LoadedLake) -> None:
    table = lake.open()
    table.write([entry(0), entry(1, b"?"), entry(2, seq=0), entry(3, b"{}")], {0: 4})
    table.write([entry(4, b"?")], {0: 5})
    assert lake.open().share().outcomes == {Outcome.PASSED: 1, Outcome.DUPLICATE: 1, Outcome.REFUSED: 3}
    assert lake.open().share().taken == 5


def test_a_table_from_before_it_counted_counts_from_where_it_stands(lake: LoadedLake) -> None:
    lake.open()
    before = [Transaction("penstock/rsvps/0", 40), Transaction("penstock/rsvps/count", 1)]
    table = DeltaTable(lake.path)
    nothing = lake.columns.empty_table()
    write_deltalake(table, nothing, mode="append", commit_properties=CommitProperties(app_transactions=before))
    counting = lake.open()
    assert (counting.share().since, counting.share().until, counting.share().taken) == ({0: 40}, {0: 40}, 0)
    counting.write([entry(39), entry(40), entry(41)], {0: 42})
    share = lake.open().share()
    assert (share.since, share.until, share.taken) == ({0: 40}, {0: 42}, 2)


def test_a_table_that_was_moved_away_has_another_life(lake: LoadedLake) -> None:
    first = lake.open().generation
    Path(lake.path).rename(f"{lake.path}.old")
    assert lake.open().generation != first


def test_other_columns_are_refused_with_the_fix(lake: LoadedLake) -> None:
    lake.open()
    with pytest.raises(Misconfigured, match=r"its columns are not those of the schema of rsvps; move the table away"):
        replace(lake, typed=False).open()


def test_a_folder_that_cannot_be_made_is_unavailable(lake: LoadedLake, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="the lake"):
        changed(lake, path=str(tmp_path / "file" / "lake")).open()


def test_a_write_that_fails_leaves_no_trace(lake: LoadedLake) -> None:
    one, two = lake.open(), lake.open()
    one.write([entry(0)], {0: 1})
    with pytest.raises(Unavailable):
        two.write([entry(0), entry(1)], {0: 2})
    assert two.positions() == {0: 1}
    assert two.write([entry(0), entry(1)], {0: 2}) == 1
    assert [row["n"] for row in rows(lake)] == [0, 1]


READER = """
import sys
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from tests.damaging import truncated
for _ in sys.stdin:
    table = DeltaTable(sys.argv[1])
    numbers = sorted(table.to_pyarrow_table(columns=["n"])["n"].to_pylist())
    print(len(numbers) if numbers == list(range(len(numbers))) else "broken", flush=True)
"""


def test_another_process_reads_it_while_it_grows(lake: LoadedLake) -> None:
    """Each look sees a whole number of batches, also while files are put together."""
    lake = changed(lake, compact_every=3)
    table = lake.open()
    with subprocess.Popen(
        [sys.executable, "-c", READER, lake.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdin
        assert reader.stdout
        for batch in range(30):
            reader.stdin.write("look\n")
            reader.stdin.flush()
            table.write([entry(10 * batch + n) for n in range(10)], {0: 10 * batch + 10})
            if batch % 5 == 0:
                seen = [reader.stdout.readline().strip()]
                assert all(number.isdecimal() and int(number) % 10 == 0 for number in seen)
        # All that came before was asked for while a batch was written: it may have seen it, or not.
        reader.stdin.write("look\n")
        reader.stdin.close()
        rest = reader.stdout.read().split()
    assert all(number.isdecimal() and int(number) % 10 == 0 for number in rest)
    assert rest[-1] == "300"


@pytest.mark.parametrize("seed", range(10))
def test_islands_found_by_arrow_are_the_runs(seed: int) -> None:
    chance = random.Random(seed)
    some: Sequence[tuple[str, int, int]] = [
        (chance.choice("ab"), chance.randrange(2), chance.choice([chance.randrange(40), -(2**63), 2**63 - 1]))
        for _ in range(chance.randrange(80))
    ]
    expected: dict[tuple[str, int], Runs] = {}
    for sender, epoch, seq in some:
        expected.setdefault((sender, epoch), Runs()).add(seq)
    found: dict[tuple[str, int], Runs] = {}
    kinds = pa.schema([("_sender", pa.string()), ("_epoch", pa.int64()), ("_seq", pa.int64())])
    rows = [dict(zip(kinds.names, row, strict=True)) for row in some]
    runs, again = runs_in(pa.Table.from_pylist(rows, kinds))
    for sender, epoch, first, last in runs:
        found.setdefault((sender, epoch), Runs()).add(first, last)
    assert found == expected
    assert Counter(tuple(row.values()) for row in again.to_pylist()) == Counter(some) - Counter(set(some))


def test_a_damaged_log_is_said_in_one_line_with_the_fix(lake: LoadedLake) -> None:
    write_deltalake(lake.path, pa.table({"n": [1]}))
    truncated(Path(lake.path) / "_delta_log" / "00000000000000000000.json", random.Random(1))
    with pytest.raises(Unavailable) as told:
        lake.store.stands()
    assert "\n" not in told.value.reason
    assert "penstock repair" in told.value.reason

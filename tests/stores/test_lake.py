import datetime
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from penstock.audit.account import Outcome
from penstock.audit.runs import Runs
from penstock.contracts import Entry
from penstock.errors import Misconfigured, Unavailable
from penstock.record import Origin
from penstock.stores.lake import LakeStore, _islands

SCHEMA = "n BIGINT NOT NULL, at TIMESTAMP, venue STRUCT<name: STRING, tags: ARRAY<STRING>>, price DECIMAL(6,2)"
DOCUMENT = b'{"n": %d, "at": "2024-01-02T03:04:05Z", "venue": {"name": "x", "tags": ["a", null]}, "price": 1.5, "z": 0}'
NOON = 1_700_000_000_000_000


@pytest.fixture
def lake(tmp_path: Path) -> LakeStore:
    return LakeStore(str(tmp_path / "lakes" / "rsvps"), "rsvps", SCHEMA)


def entry(offset: int, value: bytes | None = None, seq: int | None = None, time: int = NOON) -> Entry:
    seq = offset if seq is None else seq
    return Entry("rsvps", 0, offset, NOON, None, value or DOCUMENT % seq, tuple(Origin("a", 1, seq, time).headers()))


def rows(lake: LakeStore) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = DeltaTable(lake.path).to_pyarrow_table().to_pylist()
    return sorted(found, key=lambda row: row["_offset"])


def test_a_record_is_a_row_with_its_origin_and_its_place(lake: LakeStore) -> None:
    lake.open().write([entry(7)], {0: 8})
    (row,) = rows(lake)
    assert row == {
        "n": 7,
        "at": datetime.datetime(2024, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
        "venue": {"name": "x", "tags": ["a", None]},
        "price": pytest.approx(1.5),
        "_sender": "a",
        "_epoch": 1,
        "_seq": 7,
        "_time": datetime.datetime.fromtimestamp(NOON / 1e6, datetime.UTC),
        "_partition": 0,
        "_offset": 7,
    }


def test_what_does_not_fit_is_left_out_and_counted(lake: LakeStore) -> None:
    table = lake.open()
    bad = [entry(1, b"?"), entry(2, b'{"n": "2"}'), entry(3, b'{"at": 0}'), replace(entry(4), value=None)]
    assert table.write([entry(0), *bad, entry(5)], {0: 6}) == 2
    assert table.refused == 4
    assert [row["n"] for row in rows(lake)] == [0, 5]
    assert table.positions() == {0: 6}


def test_without_a_schema_every_value_is_there(tmp_path: Path) -> None:
    lake = LakeStore(str(tmp_path / "raw"), "raw")
    table = lake.open()
    assert table.write([entry(0, b"\xff\x00"), replace(entry(1), value=None)], {0: 2}) == 2
    assert [row["value"] for row in rows(lake)] == [b"\xff\x00", None]
    assert table.refused == 0


def test_a_record_without_identity_is_a_row_too(lake: LakeStore) -> None:
    nameless = replace(entry(0), headers=(("seq", b"?"),))
    table = lake.open()
    assert table.write([nameless, replace(nameless, offset=1)], {0: 2}) == 2
    assert lake.open().write([replace(nameless, offset=2)], {0: 3}) == 1
    assert [row["_sender"] for row in rows(lake)] == [None, None, None]


def test_a_record_that_comes_again_after_a_restart_is_absorbed(lake: LakeStore) -> None:
    """The table itself is what remembers: another offset, the same origin."""
    lake.open().write([entry(n) for n in range(10)], {0: 10})
    again = lake.open()
    assert again.write([entry(10, seq=3), entry(11, seq=11), entry(12, seq=11)], {0: 13}) == 1
    assert [row["_seq"] for row in rows(lake)] == [*range(10), 11]


@pytest.mark.parametrize("time", [0, -1, 253_402_300_800_000_000, 2**62, -(2**62)])
def test_a_sender_with_a_wild_clock_does_no_harm(lake: LakeStore, time: int) -> None:
    assert lake.open().write([entry(0, time=time), entry(1)], {0: 2}) == 2
    assert lake.open().write([entry(0, time=time), entry(2)], {0: 3}) == 1
    assert DeltaTable(lake.path).count() == 3


def test_small_files_are_put_together(lake: LakeStore) -> None:
    lake = replace(lake, compact_every=10)
    table = lake.open()
    for n in range(25):
        table.write([entry(n)], {0: n + 1})
    assert len(DeltaTable(lake.path).file_uris()) == 6
    assert table.positions() == {0: 25}
    assert [row["n"] for row in rows(lake)] == list(range(25))
    assert lake.open().positions() == {0: 25}


def test_files_that_nobody_needs_any_more_are_removed(lake: LakeStore) -> None:
    kept, removed = (
        replace(lake, compact_every=1),
        replace(lake, path=f"{lake.path}2", compact_every=1, keep=datetime.timedelta(0)),
    )
    for one in (kept, removed):
        table = one.open()
        for n in range(12):
            table.write([entry(n)], {0: n + 1})
        assert [row["n"] for row in rows(one)] == list(range(12))
    assert len(list(Path(kept.path).glob("*.parquet"))) > 12
    assert len(list(Path(removed.path).glob("*.parquet"))) == 1


def test_the_log_has_checkpoints(lake: LakeStore) -> None:
    table = lake.open()
    for n in range(60):
        table.write([entry(n)], {0: n + 1})
    assert list(Path(lake.path, "_delta_log").glob("*.checkpoint.parquet"))
    assert lake.open().positions() == {0: 60}


def test_the_totals_outlive_the_log_before_a_checkpoint(lake: LakeStore) -> None:
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


def test_what_does_not_fit_is_counted_as_refused(lake: LakeStore) -> None:
    table = lake.open()
    table.write([entry(0), entry(1, b"?"), entry(2, seq=0), entry(3, b"{}")], {0: 4})
    table.write([entry(4, b"?")], {0: 5})
    assert lake.open().share().outcomes == {Outcome.PASSED: 1, Outcome.DUPLICATE: 1, Outcome.REFUSED: 3}
    assert lake.open().share().taken == 5


def test_a_table_from_before_it_counted_counts_from_where_it_stands(lake: LakeStore) -> None:
    lake.open()
    before = [Transaction("penstock/rsvps/0", 40), Transaction("penstock/rsvps/count", 1)]
    table = DeltaTable(lake.path)
    nothing = pa.table([[] for _ in lake.columns()], schema=lake.columns())
    write_deltalake(table, nothing, mode="append", commit_properties=CommitProperties(app_transactions=before))
    counting = lake.open()
    assert (counting.share().since, counting.share().until, counting.share().taken) == ({0: 40}, {0: 40}, 0)
    counting.write([entry(39), entry(40), entry(41)], {0: 42})
    share = lake.open().share()
    assert (share.since, share.until, share.taken) == ({0: 40}, {0: 42}, 2)


def test_a_table_that_was_moved_away_has_another_life(lake: LakeStore) -> None:
    first = lake.open().life
    Path(lake.path).rename(f"{lake.path}.old")
    assert lake.open().life != first


def test_other_columns_are_refused_with_the_way_out(lake: LakeStore) -> None:
    lake.open()
    with pytest.raises(Misconfigured, match=r"its columns are not those of the schema of rsvps; move the table away"):
        replace(lake, schema="n STRING").open()


@pytest.mark.parametrize("schema", ["_seq BIGINT", "n INT, N INT", "_TIME TIMESTAMP"])
def test_a_column_that_is_taken_is_refused(lake: LakeStore, schema: str) -> None:
    with pytest.raises(Misconfigured, match="name it otherwise"):
        replace(lake, schema=schema).open()


def test_a_folder_that_cannot_be_made_is_unavailable(lake: LakeStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="the lake"):
        replace(lake, path=str(tmp_path / "file" / "lake")).open()


def test_a_write_that_fails_leaves_no_trace(lake: LakeStore) -> None:
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
for _ in sys.stdin:
    table = DeltaTable(sys.argv[1])
    numbers = sorted(table.to_pyarrow_table(columns=["n"])["n"].to_pylist())
    print(len(numbers) if numbers == list(range(len(numbers))) else "broken", flush=True)
"""


def test_another_process_reads_it_while_it_grows(lake: LakeStore) -> None:
    """Each look sees a whole number of batches, also while files are put together."""
    lake = replace(lake, compact_every=3)
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
    for sender, epoch, first, last in _islands(pa.Table.from_pylist(rows, kinds)):
        found.setdefault((sender, epoch), Runs()).add(first, last)
    assert found == expected

"""A lake filled by Spark, batch by batch: what fits is a row, what does not is a dead letter, after any crash."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pyarrow.dataset as ds  # type: ignore[import-untyped]
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import DataFrame, SparkSession

from penstock.analysis.dead_letters import DeadLetters
from penstock.analysis.frames import RAW, typed
from penstock.analysis.lake import Filling, columns
from penstock.analysis.query import Shape
from penstock.audit.account import Outcome
from penstock.core.contracts import Entry, Offsets
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.record import Origin
from penstock.stores.lake import LakeStore, LakeTable
from penstock.testing import MemoryChannels

SHAPE = Shape("rsvps", "n BIGINT NOT NULL, name STRING, at TIMESTAMP, small TINYINT")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROS = 1_767_323_045_000_000


def frame(spark: SparkSession, entries: Sequence[Entry]) -> DataFrame:
    """Entries as Spark reads them from a channel."""
    rows = [
        (one.key, one.value, one.channel, one.partition, one.offset, EPOCH + timedelta(microseconds=one.appended), 0,
         [*one.headers] or None)
        for one in entries
    ]  # fmt: skip
    return spark.createDataFrame(rows, RAW).coalesce(1)


def entry(n: int, offset: int | None = None, value: bytes | None = None, partition: int = 0, **other: Any) -> Entry:
    at = n if offset is None else offset
    text = b'{"n": %d, "name": "x", "at": "2026-01-02T03:04:05.678901Z", "small": 1}' % n if value is None else value
    one = Entry("rsvps", partition, at, MICROS, None, text, tuple(Origin("s", 1, n, MICROS + n).headers()))
    return replace(one, **other)


class Lake:
    """A lake, its channels, and the batches that fill it."""

    def __init__(self, spark: SparkSession, folder: Path, shape: Shape = SHAPE, keyed: bool = False) -> None:
        self._spark, self._shape, self._keyed = spark, shape, keyed
        self.store = LakeStore(str(folder / "lake"), "rsvps", keyed=keyed, compact_every=1_000)
        self.channels = MemoryChannels()
        self.restart()

    def restart(self, table: Callable[[LakeTable], Any] = lambda table: table) -> None:
        """As a process that begins anew; `table` stands before the real one."""
        self.table = self.store.open(columns(self._shape, self._keyed).json())
        letters = DeadLetters(self.channels, "rsvps.dead", lambda: self.table.committed)
        self._filling = Filling(table(self.table), self._shape, self._keyed, letters)

    def fill(self, *entries: Entry, reached: Offsets | None = None) -> None:
        ends: dict[int, int] = {}
        for one in entries:
            ends[one.partition] = max(ends.get(one.partition, 0), one.offset + 1)
        self._filling(frame(self._spark, entries), ends if reached is None else reached)

    def rows(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = DeltaTable(self.store.path).to_pyarrow_table().to_pylist()
        return sorted(found, key=lambda row: (row["_partition"], row["_offset"]))

    def dead(self) -> list[str]:
        return [dict(one.headers)["place"].decode() for one in self.channels.entries("rsvps.dead")]

    def totals(self) -> tuple[int, ...]:
        """Taken, passed, duplicate, refused."""
        share = self.table.share()
        return share.taken, *(share.outcomes[one] for one in (Outcome.PASSED, Outcome.DUPLICATE, Outcome.REFUSED))


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path) -> Lake:
    return Lake(spark, tmp_path)


def test_a_record_is_a_row_with_its_origin_and_its_place(lake: Lake) -> None:
    lake.fill(entry(7, 3))
    (row,) = lake.rows()
    assert row == {
        "n": 7,
        "name": "x",
        "at": datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
        "small": 1,
        "_sender": "s",
        "_epoch": 1,
        "_seq": 7,
        "_time": EPOCH + timedelta(microseconds=MICROS + 7),
        "_partition": 0,
        "_offset": 3,
    }
    assert (lake.table.positions(), lake.totals()) == ({0: 4}, (1, 1, 0, 0))


UNFIT = {
    "two objects": b'{"n": 1}{"n": 2}',
    "a word behind it": b'{"n": 1} x',
    "single quotes": b"{'n': 1}",
    "NaN": b'{"n": 1, "x": NaN}',
    "400 digits": b'{"n": ' + b"9" * 400 + b"}",
    "5,000 digits": b'{"n": 1, "x": 0.' + b"1" * 5_000 + b"}",
    "no UTF-8": b'{"n": 1, "name": "\xff"}',
    "a large TINYINT": b'{"n": 1, "small": 200}',
    "no number": b'{"name": "x"}',
}


def test_what_does_not_fit_is_a_dead_letter_and_no_row(lake: Lake, spark: SparkSession) -> None:
    """Rows, dead letters and what a query sees are one partition of the records."""
    some = [entry(0), *(entry(at, value=value) for at, value in enumerate(UNFIT.values(), start=1)), entry(50)]
    lake.fill(*some)
    assert [row["_offset"] for row in lake.rows()] == [0, 50]
    assert lake.dead() == [f"rsvps:0:{at}" for at in range(1, len(UNFIT) + 1)]
    assert [one.value for one in lake.channels.entries("rsvps.dead")] == list(UNFIT.values())
    assert lake.totals() == (len(some), 2, 0, len(UNFIT))
    seen = typed(frame(spark, some), SHAPE).select("origin.offset").collect()
    assert [row["offset"] for row in seen] == [0, 50]


def test_an_event_time_in_the_future_is_a_dead_letter_for_the_lake_too(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(spark, tmp_path, Shape("rsvps", "at BIGINT", "timestamp_millis(at)"))
    lake.fill(entry(0, value=b'{"at": 253402300799000}'), entry(1, value=b'{"at": %d}' % (MICROS // 1000)))
    assert ([row["_offset"] for row in lake.rows()], lake.dead()) == ([1], ["rsvps:0:0"])


def test_a_number_that_comes_twice_is_one_row(lake: Lake) -> None:
    lake.fill(entry(1, 0), entry(1, 1), entry(2, 2))
    lake.fill(entry(2, 3), entry(3, 4))
    lake.restart()
    lake.fill(entry(3, 5), entry(4, 6))
    assert [(row["_seq"], row["_offset"]) for row in lake.rows()] == [(1, 0), (2, 2), (3, 4), (4, 6)]
    assert lake.totals() == (7, 4, 3, 0)


def test_a_batch_that_is_repeated_changes_nothing(lake: Lake) -> None:
    some = [entry(1, 0), entry(2, 1, b"?"), entry(3, 2)]
    lake.fill(*some)
    lake.restart()
    lake.fill(*some, entry(4, 3))
    assert [row["_seq"] for row in lake.rows()] == [1, 3, 4]
    assert lake.dead() == ["rsvps:0:1"]
    assert lake.totals() == (4, 3, 0, 1)


class Failing:
    """A table whose process dies at a step of the commit."""

    def __init__(self, table: LakeTable, after: bool) -> None:
        self._table, self._after = table, after
        self.path = table.path

    def positions(self) -> Offsets:
        return self._table.positions()

    def add(self, files: Sequence[Path], reached: Offsets, refused: int) -> int:
        if self._after:
            self._table.add(files, reached, refused)
        raise Unavailable("the lake", "it is away")

    def append(self, rows: Any, reached: Offsets, refused: int) -> int:
        raise AssertionError("not used here")


@pytest.mark.parametrize("after", [False, True], ids=["before the commit", "after it"])
def test_a_crash_between_the_files_and_the_commit_leaves_no_trace(lake: Lake, after: bool) -> None:
    some = [entry(1, 0), entry(2, 1, b"?"), entry(3, 2)]
    lake.restart(lambda table: Failing(table, after))
    with pytest.raises(Unavailable):
        lake.fill(*some)
    assert len(lake.rows()) == (2 if after else 0)
    lake.restart()
    lake.fill(*some)
    assert [row["_seq"] for row in lake.rows()] == [1, 3]
    # The dead letters were written before, and are not written again.
    assert lake.dead() == ["rsvps:0:1"]
    assert lake.totals() == (3, 2, 0, 1)


def test_files_that_no_commit_names_are_removed(lake: Lake) -> None:
    lake.restart(lambda table: Failing(table, False))
    with pytest.raises(Unavailable):
        lake.fill(entry(1, 0))
    (left,) = Path(lake.store.path).glob("*.parquet")
    lake.store = replace(lake.store, compact_every=1, keep=timedelta(0))
    lake.restart()
    for n in range(12):
        lake.fill(entry(n, n))
    assert not left.exists()
    assert len(lake.rows()) == 12


def test_positions_move_without_rows(lake: Lake) -> None:
    lake.fill(entry(1, 0, b"?"))
    lake.fill(entry(1, 1, b"?"), reached={0: 5})
    lake.restart()
    assert (lake.table.positions(), lake.rows(), lake.totals()) == ({0: 5}, [], (2, 0, 0, 2))


def test_a_record_without_identity_is_a_row_too(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(spark, tmp_path, Shape("rsvps", "n BIGINT", "timestamp_micros(1767323045000000)"))
    lake.fill(entry(1, 0, headers=()), entry(1, 1, headers=(("sender", b"s"), ("seq", b"07"))))
    assert [(row["_sender"], row["_seq"], row["_time"]) for row in lake.rows()] == [(None, None, None)] * 2


def test_a_deletion_of_a_table_is_a_row(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(spark, tmp_path, replace(SHAPE, table=True), keyed=True)
    gone = replace(entry(2), value=None, key=b"k", headers=(*entry(2).headers, ("version", b"9")))
    lake.fill(entry(1, key=b"k\xff", headers=(*entry(1).headers, ("version", b"08"))), gone, entry(3))
    told = [(row["n"], row["_key"], row["_deleted"], row["_version"]) for row in lake.rows()]
    assert told == [(1, "k�", False, None), (None, "k", True, 9)]
    assert lake.dead() == ["rsvps:0:3"]


def test_without_a_schema_a_record_is_its_bytes(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(spark, tmp_path, Shape("rsvps"))
    lake.fill(entry(1, value=b"\xff\x00"))
    assert [row["value"] for row in lake.rows()] == [b"\xff\x00"]


def test_a_commit_tells_the_ranges_of_its_files(lake: Lake) -> None:
    lake.fill(entry(1, 0), entry(5, 1))
    (added,) = DeltaTable(lake.store.path).get_add_actions(flatten=True).to_struct_array().to_pylist()
    told = {name: added[name] for name in ("num_records", "min._offset", "max._offset", "min._seq", "max._seq")}
    assert told == {"num_records": 2, "min._offset": 0, "max._offset": 1, "min._seq": 1, "max._seq": 5}


@pytest.mark.parametrize("earlier", [False, True])
def test_a_filter_of_any_column_finds_rows_in_files_of_every_kind(
    spark: SparkSession, tmp_path: Path, earlier: bool
) -> None:
    lake = Lake(spark, tmp_path, replace(SHAPE, event_time="at"))
    if earlier:
        # A table of an earlier version: its files have ranges of all columns.
        columns = pa.schema(DeltaTable(lake.store.path).schema())
        shutil.rmtree(lake.store.path)
        row = {"n": 0, "name": "x", "_sender": "s", "_epoch": 0, "_seq": 0, "_partition": 0, "_offset": 0}
        write_deltalake(lake.store.path, pa.Table.from_pylist([row], columns))
        lake.restart()
    wild = tuple(Origin("s", 1, 4, 2**62).headers())
    lake.fill(entry(1, 1))  # Written by Spark.
    lake.fill(entry(2, 2), entry(1, 3))  # By the driver, because one comes again.
    lake.fill(replace(entry(3, 4), headers=()), replace(entry(4, 5), headers=wild))
    lake.table.compact()
    lake.fill(entry(5, 6))
    table = DeltaTable(lake.store.path)
    for name, value in {"n": 5, "name": "x", "small": 1, "_sender": "s", "_epoch": 1, "_seq": 5, "_offset": 6}.items():
        held = table.to_pyarrow_table().column(name).to_pylist().count(value)
        assert table.to_pyarrow_table(filters=[(name, "=", value)]).num_rows == held > 0, name
    if not earlier:
        # The ranges of an earlier version hold times, and delta-rs does not find one as far as this.
        far = pa.scalar(2**61, pa.timestamp("us", tz="UTC"))
        assert table.to_pyarrow_dataset().count_rows(filter=ds.field("_time") > far) == 1


@pytest.mark.parametrize("name", ["_seq", "_Offset"])
def test_a_column_that_is_taken_is_refused(name: str, spark: SparkSession) -> None:
    with pytest.raises(Misconfigured):
        columns(Shape("rsvps", f"{name} STRING"), False)


def test_rows_are_written_by_the_driver_where_spark_has_no_way(lake: Lake, tmp_path: Path) -> None:
    """As for an object store: the same rows, the same totals."""
    lake.restart(lambda table: _Remote(table))
    lake.fill(entry(1, 0), entry(1, 1), entry(2, 2, b"?"), entry(3, 3))
    assert [row["_seq"] for row in lake.rows()] == [1, 3]
    assert lake.totals() == (4, 2, 1, 1)


class _Remote:
    def __init__(self, table: LakeTable) -> None:
        self._table = table
        self.path = f"file://{table.path}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)


def headers(one: Entry) -> Mapping[str, bytes]:
    return dict(one.headers)


def test_the_reason_of_a_dead_letter_is_that_of_queries(lake: Lake) -> None:
    lake.fill(entry(1, 0, b'{"n": 1} x'))
    (letter,) = lake.channels.entries("rsvps.dead")
    assert json.loads(json.dumps(headers(letter)["reason"].decode())) == "something follows the JSON object"

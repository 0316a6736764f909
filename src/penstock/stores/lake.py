"""A lake: a Delta table with a row for each record of a channel, and the offsets in the same commit.

Spark writes the rows as Parquet files; this module commits them. Only committed files are part of the table: a file
left by a crash is never read, and vacuum removes it later.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pyarrow.compute as pc  # type: ignore[import-untyped]  # it ships no types
import pyarrow.parquet as pq  # type: ignore[import-untyped]  # it ships no types
from deltalake import CommitProperties, DeltaTable, Schema, Transaction, write_deltalake
from deltalake.exceptions import DeltaError, DeltaProtocolError, SchemaMismatchError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from penstock.audit.account import Outcome, Share
from penstock.core.contracts import Offsets
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.runs import Runs
from penstock.stores.base import OUTCOMES, Stored, Totals, furthest, require_topic

_NUMBER, _POSITION = ["_sender", "_epoch", "_seq"], ["_partition", "_offset"]
_RANGES = ["_epoch", "_seq", *_POSITION]
"""The columns with statistics in each file. They must be the same in all files: delta-rs skips a file without the
statistics of a filtered column. `_time` has none: delta-rs cannot read statistics of extreme times."""
_RANGES_OF = "delta.dataSkippingStatsColumns"
_FILE_SIZE = 64 * 1024 * 1024
_VACUUM_EVERY = 12
_READ_AT_ONCE = 1_000
_DAMAGED = re.compile(r"Json error|Kernel error|[Pp]arquet|[Cc]orrupt")
"""Errors of delta-rs about damaged files."""
_SETTINGS = {
    _RANGES_OF: ",".join(_RANGES),
    "delta.checkpointInterval": "50",
    "delta.enableExpiredLogCleanup": "true",
    "delta.logRetentionDuration": "interval 7 days",
}

Numbering = tuple[str, int]
"""A sender in one of its epochs."""


@dataclass(frozen=True, slots=True)
class LakeStore:
    """A Delta table at `path`, a folder or an address, filled from a channel."""

    path: str
    channel: str
    topic_id: str = ""
    keyed: bool = False
    """The rows have keys: the channel is a table or a query's result."""
    compact_every: int = 60
    keep: timedelta = timedelta(days=7)

    @property
    def who(self) -> str:
        """Its name in errors."""
        return f"the lake {self.path}"

    def open(self, columns: str) -> "LakeTable":
        """Open the table, or create it. `columns` is its required schema, as JSON in Delta's format."""
        return LakeTable(self, columns)

    def stands(self) -> Offsets:
        if (there := self._there()) is None:
            return {}
        with _explained(self.who):
            return totals_in(there, self.channel).stands

    def rows(self) -> Iterator[Stored]:
        if (there := self._there()) is None:
            return
        columns = ["value", "_partition", "_offset", *(["_key", "_version"] if self.keyed else [])]
        with _explained(self.who):
            table = there.to_pyarrow_dataset().to_table(columns=columns)
        table = table.sort_by([("_partition", "ascending"), ("_offset", "ascending")])
        for one in chain.from_iterable(batch.to_pylist() for batch in table.to_batches(_READ_AT_ONCE)):
            row, key = one["value"], one.get("_key")
            if row is not None or key is not None:
                yield Stored(row, None if key is None else key.encode(), one.get("_version"))

    def numbers(self) -> dict[Numbering, Runs]:
        """Return the numbers of each sender that it holds; none if it does not exist."""
        if (there := self._there()) is None:
            return {}
        with _explained(self.who):
            return _numbers_in(there)

    def _there(self) -> DeltaTable | None:
        with _explained(self.who):
            return DeltaTable(self.path) if DeltaTable.is_deltatable(self.path) else None


class LakeTable:
    def __init__(self, store: LakeStore, columns: str) -> None:
        self._store = store
        self._who = store.who
        self._columns = Schema.from_json(columns)
        self._commits = 0
        with _explained(self._who):
            self._table = self._open_table()
            self.totals = totals_in(self._table, store.channel)
            """As last read or committed."""
        self._known: dict[Numbering, Runs] | None = None
        self._start: Offsets = {}

    @property
    def generation(self) -> str:
        return str(self._table.metadata().id)

    @property
    def path(self) -> str:
        return self._store.path

    @property
    def committed(self) -> int:
        """The time of the last commit, in microseconds since 1970; 0 if there is none with rows or totals."""
        with _explained(self._who):
            return int(self._table.history(1)[0]["timestamp"]) * 1_000 if self.totals.stands else 0

    def positions(self) -> Offsets:
        with _explained(self._who):
            self._table.update_incremental()
            totals = totals_in(self._table, self._store.channel)
            if totals.stands != self.totals.stands:
                # Another writer has committed, or the answer to a commit was lost: the numbers are read again.
                self._known = None
            self.totals = totals
        return totals.stands

    def begin(self, start: Offsets) -> None:
        self._start = start

    def share(self) -> Share:
        self.positions()
        return self.totals.share(self._start)

    def add(self, files: Sequence[Path], reached: Offsets, refused: int) -> int:
        """Commit the rows of Parquet files in the table's folder; return how many of them are new.

        `reached` are the offsets of the table after the commit, `refused` counts the records that did not fit. Rows
        whose number the table has already are left out. If it raises, nothing was committed.
        """
        with _explained(self._who):
            read = {file: pq.read_table(file, columns=[*_NUMBER, *_POSITION]) for file in files}
            new = self._new(pa.concat_tables(read.values())) if read else None
            # The files of an earlier version have statistics of all columns.
            if read and (new is not None or _RANGES_OF not in self._table.metadata().configuration):
                rows = pa.concat_tables(pq.read_table(file) for file in files)
                added = self._append(rows if new is None else rows.filter(new), len(rows), reached, refused)
                for file in files:
                    file.unlink(missing_ok=True)
                return added
            for file in [file for file, rows in read.items() if not len(rows)]:
                file.unlink()
                del read[file]
            actions: list[AddAction | RemoveAction] = [
                _added(Path(self.path), file, rows) for file, rows in read.items()
            ]
            count = sum(map(len, read.values()))
            with self._counted(count, count, reached, refused) as commit:
                self._table.create_write_transaction(actions, "append", self._table.schema(), commit_properties=commit)
                self._table.update_incremental()
        self._committed()
        return count

    def append(self, rows: pa.Table, reached: Offsets, refused: int) -> int:
        """Write and commit rows, as `add` commits those of files."""
        new = self._new(rows.select([*_NUMBER, *_POSITION]))
        return self._append(rows if new is None else rows.filter(new), len(rows), reached, refused)

    def _append(self, rows: pa.Table, count: int, reached: Offsets, refused: int) -> int:
        arrow = pa.schema(self._table.schema())
        with _explained(self._who), self._counted(len(rows), count, reached, refused) as commit:
            write_deltalake(self._table, rows.select(arrow.names).cast(arrow), mode="append", commit_properties=commit)
        self._committed()
        return len(rows)

    @contextmanager
    def _counted(self, new: int, count: int, reached: Offsets, refused: int) -> Iterator[CommitProperties]:
        """Provide the properties of a commit; the totals change only if the commit succeeds."""
        outcomes = {Outcome.PASSED: new, Outcome.DUPLICATE: count - new, Outcome.REFUSED: refused}
        totals = self.totals.after(furthest(self.totals.stands, reached), self._start, outcomes)
        try:
            yield self._commit_of(totals)
        except BaseException:
            # The numbers of these rows were already added.
            self._known = None
            raise
        self.totals = totals

    def _committed(self) -> None:
        self._commits += 1
        if self._commits % self._store.compact_every == 0:
            self.compact()

    def compact(self) -> None:
        """Compact small files; sometimes remove the files that no recent version needs."""
        with _explained(self._who):
            self._table.optimize.compact(target_size=_FILE_SIZE)
            if self._commits // self._store.compact_every % _VACUUM_EVERY == 0:
                hours = round(self._store.keep.total_seconds() / 3600)
                # Including files left by a crash, which no version contains.
                self._table.vacuum(hours, dry_run=False, enforce_retention_duration=False, full=True)

    def _new(self, rows: pa.Table) -> pa.Array | None:
        """Return a mask of the rows with a new number or none; None if that is all rows. Their numbers are added."""
        if self._known is None:
            with _explained(self._who):
                self._known = _numbers_in(self._table)
        numbers, numbered = self._known, rows.select(_NUMBER).drop_null()
        islands, _ = runs_in(numbered)
        if sum(last - first + 1 for *_, first, last in islands) == len(numbered):
            new = [
                numbers.setdefault((sender, epoch), Runs()).add(first, last) for sender, epoch, first, last in islands
            ]
            if sum(new) == len(numbered):
                return None
            # Some were known before, and all are added now: read the known numbers from the table again.
            with _explained(self._who):
                numbers = self._known = _numbers_in(self._table)
        keep = [True] * len(rows)
        order = pc.sort_indices(rows, [(name, "ascending") for name in _POSITION])
        for at, row in zip(order.to_pylist(), rows.select(_NUMBER).take(order).to_pylist(), strict=True):
            if None not in row.values():
                keep[at] = numbers.setdefault((row["_sender"], row["_epoch"]), Runs()).add(row["_seq"]) == 1
        return pa.array(keep)

    def _commit_of(self, totals: Totals) -> CommitProperties:
        """Use a transaction id per partition and total: of two writers with the same id, one commit fails.

        The audit recognizes the commits of this writer by them.
        """
        held = _parts_of(self.totals)
        changed = {part: number for part, number in _parts_of(totals).items() if held.get(part) != number}
        # Always present, so that any two commits conflict.
        changed["count"] = max(totals.stands, default=-1) + 1
        channel = self._store.channel
        return CommitProperties(app_transactions=[Transaction(_app(channel, part), at) for part, at in changed.items()])

    def _open_table(self) -> DeltaTable:
        store = self._store
        try:
            table = DeltaTable(store.path)
        except TableNotFoundError:
            if "://" not in store.path:
                Path(store.path).mkdir(parents=True, exist_ok=True)
            table = DeltaTable.create(
                store.path,
                schema=self._columns,
                name=store.channel,
                description=f"topic {store.topic_id}" if store.topic_id else None,
                configuration=_SETTINGS,
            )
        fix = "move the table away; it is filled again from the channel"
        remembered = re.fullmatch(r"topic (\S+)", table.metadata().description or "")
        require_topic(self._who, store.channel, remembered and remembered[1], store.topic_id, fix)
        if table.schema() != self._columns:
            raise Misconfigured(self._who, f"its columns are not those of the schema of {store.channel}", fix)
        return table


def _app(channel: str, part: str) -> str:
    return f"penstock/{channel}/{part}"


def _parts_of(totals: Totals) -> dict[str, int]:
    """Return the totals as Delta's application transactions."""
    return {
        **{f"{partition}": offset for partition, offset in totals.stands.items()},
        **{f"since/{partition}": offset for partition, offset in totals.since.items()},
        "taken": totals.taken,
        **{outcome.value: number for outcome, number in totals.outcomes.items()},
    }


def totals_in(table: DeltaTable, channel: str) -> Totals:
    def held(part: str) -> int | None:
        return table.transaction_version(_app(channel, part))

    partitions = range(held("count") or 0)
    stands = {number: at for number in partitions if (at := held(f"{number}")) is not None}
    since = {number: at for number in stands if (at := held(f"since/{number}")) is not None}
    outcomes = {outcome: held(outcome.value) or 0 for outcome in OUTCOMES}
    return Totals(stands, since, held("taken") or 0, outcomes)


def _added(root: Path, file: Path, rows: pa.Table) -> AddAction:
    """Return the add action of a file, with its statistics."""
    ranges = {name: pc.min_max(rows[name]).as_py() for name in _RANGES}
    stats = {
        "numRecords": len(rows),
        **{
            f"{end}Values": {name: one[end] for name, one in ranges.items() if one[end] is not None}
            for end in ("min", "max")
        },
        "nullCount": {name: rows[name].null_count for name in ranges},
    }
    size, at = file.stat().st_size, int(file.stat().st_mtime * 1_000)
    return AddAction(file.relative_to(root).as_posix(), size, {}, at, True, json.dumps(stats))


@contextmanager
def _explained(who: str) -> Iterator[None]:
    try:
        yield
    except (DeltaProtocolError, SchemaMismatchError) as error:
        raise Misconfigured(who, str(error)) from error
    except (DeltaError, OSError, pa.ArrowException) as error:
        # The rest is a trace without names.
        why = str(error).partition("\n")[0]
        damaged = "; penstock repair shows which file is damaged" if _DAMAGED.search(why) else ""
        raise Unavailable(who, why + damaged) from error


def _numbers_in(table: DeltaTable) -> dict[Numbering, Runs]:
    """Return the numbers of each sender in a table, streamed: memory grows with the gaps."""
    found: defaultdict[Numbering, Runs] = defaultdict(Runs)
    scanner = table.to_pyarrow_dataset().scanner(columns=_NUMBER)
    for batch in scanner.to_batches():
        for sender, epoch, first, last in runs_in(pa.table(batch).drop_null())[0]:
            found[sender, epoch].add(first, last)
    return dict(found)


def runs_in(rows: pa.Table) -> tuple[list[tuple[Any, ...]], pa.Table]:
    """Return the runs of numbers, and the rows that are there again.

    The last column has the numbers, the others what is numbered: a run is their values, its first and its last number.
    Arrow computes the runs, so that a large table opens soon.
    """
    if not rows.num_rows:
        return [], rows
    *groups, number = rows.column_names
    rows = rows.sort_by([(name, "ascending") for name in rows.column_names]).combine_chunks()
    before, after = rows.slice(0, rows.num_rows - 1), rows.slice(1)
    same = reduce(pc.and_, (pc.equal(before[name], after[name]) for name in groups))
    again = pc.and_(same, pc.equal(before[number], after[number]))
    following = pc.and_(same, pc.equal(pc.add(before[number], 1), after[number]))
    ends = [*pc.indices_nonzero(pc.invert(pc.or_(again, following))).to_pylist(), rows.num_rows - 1]
    starts = [0, *(end + 1 for end in ends[:-1])]
    lasts = rows[number].take(pa.array(ends)).to_pylist()
    firsts = rows.take(pa.array(starts)).to_pylist()
    runs = [(*first.values(), last) for first, last in zip(firsts, lasts, strict=True)]
    return runs, before.filter(again)

"""The rows of a lake, as the audit looks at them: read from the files that are new since the last look."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pyarrow.compute as pc  # type: ignore[import-untyped]  # it ships no types
import pyarrow.parquet as parquet  # type: ignore[import-untyped]  # it ships no types
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from penstock.audit.account import Outcome
from penstock.audit.reconcile import Holdings, Interval
from penstock.core.errors import Unavailable
from penstock.core.runs import Runs
from penstock.stores.lake import LakeStore, Numbering

_PLACE = ["_partition", "_offset"]


@dataclass(frozen=True, slots=True)
class _File:
    """The offsets of the rows of one file."""

    stamp: tuple[int, int] | None
    """Size and time of the last change, where this machine can look."""
    runs: tuple[Interval, ...] = ()
    doubled: tuple[Interval, ...] = ()
    error: str = ""


class LakeRows:
    """A Delta table at `path`, filled from a channel. Only two columns are read, and only of files that are new."""

    def __init__(self, path: str, channel: str) -> None:
        self._path, self._channel = path, channel
        self._table: DeltaTable | None = None
        self._files: dict[str, _File] = {}
        self._seen: tuple[object, ...] = ()
        self._last: Holdings | None = None

    def holdings(self) -> Holdings | None:
        """Raises Unavailable when the table cannot be read."""
        try:
            return self._look()
        except (DeltaError, OSError, pa.ArrowException) as error:
            self._table = None
            raise Unavailable(f"the lake {self._path}", str(error)) from error

    def numbers(self) -> Mapping[Numbering, Runs]:
        return LakeStore(self._path, self._channel).numbers()

    def _look(self) -> Holdings | None:
        table = self._opened()
        if table is None:
            return None
        actions = pa.table(table.get_add_actions(flatten=True))
        paths = actions["path"].to_pylist()
        stamps = {path: self._stamp(path) for path in paths}
        known = "num_records" in actions.column_names
        counts = dict(zip(paths, actions["num_records"].to_pylist() if known else [None] * len(paths), strict=True))
        seen = (table.metadata().id, table.version(), tuple(stamps.items()))
        if seen == self._seen and self._last is not None:
            return self._last
        fresh = [path for path, stamp in stamps.items() if path not in self._files or self._files[path].stamp != stamp]
        read = dict(self._read(table, fresh, stamps, counts))
        self._files = {path: read.get(path) or self._files[path] for path in stamps}
        passed = self._total(table, Outcome.PASSED.value)
        if passed is None:
            return None
        rows, doubled = _merged(self._files.values())
        partitions = range(self._total(table, "count") or 0)
        stands = {at: offset for at in partitions if (offset := self._total(table, f"{at}")) is not None}
        since = {at: offset for at in stands if (offset := self._total(table, f"since/{at}")) is not None}
        unreadable = tuple(f"the file {path} {one.error}" for path, one in self._files.items() if one.error)
        self._seen, self._last = seen, Holdings(since, stands, passed, rows, doubled, unreadable)
        return self._last

    def _opened(self) -> DeltaTable | None:
        if self._table is None:
            if not DeltaTable.is_deltatable(self._path):
                return None
            self._table, self._files = DeltaTable(self._path), {}
        else:
            self._table.update_incremental()
        return self._table

    def _total(self, table: DeltaTable, part: str) -> int | None:
        return table.transaction_version(f"penstock/{self._channel}/{part}")

    def _stamp(self, path: str) -> tuple[int, int] | None:
        """What changes with a file that somebody writes over or removes; None where this machine cannot look."""
        if "://" in self._path:
            return None
        try:
            found = Path(self._path, path).stat()
        except OSError:
            return (-1, -1)
        return found.st_size, found.st_mtime_ns

    def _read(
        self,
        table: DeltaTable,
        paths: Iterable[str],
        stamps: Mapping[str, tuple[int, int] | None],
        counts: Mapping[str, int | None],
    ) -> Iterator[tuple[str, _File]]:
        remote: Mapping[str, Any] = {}
        for path in paths:
            try:
                if "://" in self._path:
                    remote = remote or {one.path.lstrip("/"): one for one in table.to_pyarrow_dataset().get_fragments()}
                    rows = remote[path].to_table(columns=_PLACE)
                else:
                    rows = parquet.read_table(Path(self._path, path), columns=_PLACE, partitioning=None)
                yield path, _summary(rows, stamps[path])
            except (OSError, KeyError, pa.ArrowException) as error:
                reason = "is gone" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
                yield path, _File(stamps[path], error=f"{reason} ({counts[path] or '?'} rows)")


def _summary(rows: pa.Table, stamp: tuple[int, int] | None) -> _File:
    runs, doubled = _islands(rows)
    return _File(stamp, tuple(runs), tuple(doubled))


def _islands(rows: pa.Table) -> tuple[list[Interval], list[Interval]]:
    """The offsets of some rows as runs per partition, and those that are there more than once. Done by Arrow."""
    rows = rows.drop_null()
    if not rows.num_rows:
        return [], []
    rows = rows.sort_by([(name, "ascending") for name in _PLACE]).combine_chunks()
    before, after = rows.slice(0, rows.num_rows - 1), rows.slice(1)
    same = pc.equal(before["_partition"], after["_partition"])
    again = pc.and_(same, pc.equal(before["_offset"], after["_offset"]))
    next_one = pc.and_(same, pc.equal(pc.add(before["_offset"], 1), after["_offset"]))
    ends = [*pc.indices_nonzero(pc.invert(pc.or_(again, next_one))).to_pylist(), rows.num_rows - 1]
    starts = [0, *(end + 1 for end in ends[:-1])]
    first, last = rows.take(starts).to_pydict(), rows.take(ends).to_pydict()
    runs = list(zip(first["_partition"], first["_offset"], last["_offset"], strict=True))
    twice = before.filter(again).to_pydict() if pc.any(again).as_py() else {name: [] for name in _PLACE}
    doubled = [(partition, offset, offset) for partition, offset in zip(*twice.values(), strict=True)]
    return runs, doubled


def _merged(files: Iterable[_File]) -> tuple[dict[int, Runs], list[Interval]]:
    """The offsets of all files, and those that more than one of them holds."""
    every: dict[int, list[tuple[int, int]]] = {}
    doubled: list[Interval] = []
    for one in files:
        doubled += one.doubled
        for partition, first, last in one.runs:
            every.setdefault(partition, []).append((first, last))
    rows: dict[int, Runs] = {}
    for partition, some in every.items():
        at, merged = -1, Runs()
        for first, last in sorted(some):
            if first <= at:
                doubled.append((partition, first, min(last, at)))
            merged.add(first, last)
            at = max(at, last)
        rows[partition] = merged
    return rows, sorted(set(doubled))

"""The rows and the commits of a lake, as the audit reads them: only what is new since the last look.

The data files of a Delta table never change, and each commit of the loader carries its application transaction. So a
changed value shows without reading the values: as a commit without that transaction, or as a file that was modified
after its commit.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pyarrow.fs as pf  # type: ignore[import-untyped]  # it ships no types
import pyarrow.parquet as parquet  # type: ignore[import-untyped]  # it ships no types
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from deltalake.fs import DeltaStorageHandler

from penstock.audit.account import Outcome
from penstock.audit.reconcile import ForeignChange, Holdings, Interval
from penstock.core.errors import Unavailable
from penstock.core.runs import Runs
from penstock.stores.lake import LakeStore, Numbering, runs_in, totals_in

_OFFSET_COLUMNS = ["_partition", "_offset"]
_SLACK_MS = 120_000
"""Tolerated difference between the modification time of a file and that in its commit: clocks differ."""
_HISTORY = 5_000
"""At the first look, at most this many commits are read. Older ones are not checked."""
_TURN = 1.0
"""Seconds after which the reading of commits continues in the next turn."""
_EXPECTED_FILES = 200_000

Stamp = tuple[int, int]
"""Size and modification time (ns) of a file; (-1, -1) when it cannot be read."""


@dataclass(frozen=True, slots=True)
class _File:
    """The offsets of the rows of one file."""

    stamp: Stamp | None
    """None where this machine cannot look."""
    runs: tuple[Interval, ...] = ()
    doubled: tuple[Interval, ...] = ()
    error: str = ""


class CommitLog:
    """The commits of a Delta table, read in order: finds data files that something else than the loader wrote.

    A commit changes data if one of its add or remove actions has `dataChange`. Such a commit is foreign if it lacks the
    application transaction of the loader. Compaction changes no data: a file that it writes is foreign only if it
    replaces a foreign file.
    """

    def __init__(self, table: DeltaTable, channel: str) -> None:
        self._files = pf.PyFileSystem(DeltaStorageHandler.from_table(table._table))
        self._app = f"penstock/{channel}/"
        self._next: int | None = None
        self._genuine: dict[str, None] = {}
        """Paths that the loader wrote, the newest last. A restored version brings them back."""
        self._foreign: dict[str, tuple[ForeignChange, ...]] = {}
        """The foreign changes in each live file."""
        self._removed: dict[str, ForeignChange] = {}

    def read(self, version: int, runs: Mapping[str, tuple[Interval, ...]]) -> bool:
        """Read the commits up to this version; False when some are left for the next turn. `runs`: offsets by file."""
        if self._next is None:
            found = (unquote(one.base_name) for one in self._files.get_file_info(pf.FileSelector("_delta_log")))
            versions = [int(name[:20]) for name in found if name.endswith(".json") and name[:-5].isdecimal()]
            self._next = max(min(versions, default=0), version - _HISTORY)
        began = time.monotonic()
        while self._next <= version:
            try:
                with self._files.open_input_file(f"_delta_log/{self._next:020}.json") as file:
                    actions = [json.loads(line) for line in file.read().splitlines() if line.strip()]
            except FileNotFoundError:
                # Delta removes commits from its log after some days.
                actions = []
            self._apply(self._next, actions, runs)
            self._next += 1
            if time.monotonic() - began > _TURN:
                break
        return self._next > version

    def changes(self, runs: Mapping[str, tuple[Interval, ...]]) -> tuple[ForeignChange, ...]:
        """The foreign changes that are in the table now, the first ones first."""
        for path, some in self._foreign.items():
            if path in runs:
                # The offsets of a file are read after the commit that names it.
                self._foreign[path] = tuple(
                    replace(one, runs=runs[path]) if one.file == path and not one.runs else one for one in some
                )
        every = {*self._removed.values(), *(one for some in self._foreign.values() for one in some)}
        return tuple(sorted(every, key=lambda one: (one.version, one.file)))

    def _apply(
        self, version: int, actions: Iterable[Mapping[str, Any]], runs: Mapping[str, tuple[Interval, ...]]
    ) -> None:
        every = [(name, action) for one in actions for name, action in one.items()]
        added = {unquote(action["path"]): action for name, action in every if name == "add"}
        removed = {unquote(action["path"]): action for name, action in every if name == "remove"}
        own = any(name == "txn" and str(action["appId"]).startswith(self._app) for name, action in every)
        changes = any(action.get("dataChange", True) for action in (*added.values(), *removed.values()))
        inherited = tuple({one for path in removed for one in self._foreign.pop(path, ())})
        for path, action in added.items():
            self._removed.pop(path, None)
            if path in self._genuine:
                continue
            if own or not changes:
                if inherited and not own:
                    self._foreign[path] = inherited
                else:
                    self._genuine[path] = None
            else:
                self._foreign[path] = (ForeignChange(version, path, _rows_in(action)),)
        if changes and not own and not added:
            for path in removed.keys() & self._genuine.keys():
                some = runs.get(path, ())
                rows = sum(last - first + 1 for _, first, last in some)
                self._removed[path] = ForeignChange(version, path, rows, some, removed=True)
        while len(self._genuine) > _EXPECTED_FILES:
            del self._genuine[next(iter(self._genuine))]


def _rows_in(action: Mapping[str, Any]) -> int:
    try:
        return int(json.loads(action.get("stats") or "{}").get("numRecords", 0))
    except (ValueError, TypeError, AttributeError):
        return 0


class LakeRows:
    """A Delta table at `path`, filled from a channel. Only two columns are read, and only of files that are new."""

    def __init__(self, path: str, channel: str) -> None:
        self._path, self._channel = path, channel
        self._table: DeltaTable | None = None
        self._commits: CommitLog | None = None
        self._files: dict[str, _File] = {}
        self._first: dict[str, Stamp] = {}
        """The stamp of each file when it was first found whole."""
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
        if table is None or self._commits is None:
            return None
        actions = pa.table(table.get_add_actions(flatten=True))
        committed = {unquote(one["path"]): one for one in actions.to_pylist()}
        stamps = {path: self._stamp(path) for path in committed}
        runs = {path: one.runs for path, one in self._files.items()}
        all_read = self._commits.read(table.version(), runs)
        seen = (table.metadata().id, table.version(), tuple(stamps.items()), all_read)
        if seen == self._seen and self._last is not None:
            return self._last
        fresh = [path for path, stamp in stamps.items() if path not in self._files or self._files[path].stamp != stamp]
        read = dict(self._read(table, fresh, stamps, committed))
        self._files = {path: read.get(path) or self._files[path] for path in stamps}
        totals = totals_in(table, self._channel)
        if not totals.stands:
            return None
        rows, doubled = _merged(self._files.values())
        damaged = tuple(f"the file {path} {one.error}" for path, one in self._files.items() if one.error)
        foreign = self._commits.changes({path: one.runs for path, one in self._files.items()})
        self._seen = seen
        passed = totals.outcomes[Outcome.PASSED]
        self._last = Holdings(totals.since, totals.stands, passed, rows, doubled, damaged, foreign, all_read)
        return self._last

    def _opened(self) -> DeltaTable | None:
        if self._table is None:
            if not DeltaTable.is_deltatable(self._path):
                return None
            self._table, self._files = DeltaTable(self._path), {}
            self._commits = CommitLog(self._table, self._channel)
        else:
            self._table.update_incremental()
        return self._table

    def _stamp(self, path: str) -> Stamp | None:
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
        stamps: Mapping[str, Stamp | None],
        committed: Mapping[str, Mapping[str, Any]],
    ) -> Iterator[tuple[str, _File]]:
        remote: Mapping[str, Any] = {}
        for path in paths:
            rows = committed[path].get("num_records") or "?"
            try:
                if "://" in self._path:
                    remote = remote or {one.path.lstrip("/"): one for one in table.to_pyarrow_dataset().get_fragments()}
                    read = remote[path].to_table(columns=_OFFSET_COLUMNS)
                else:
                    read = parquet.read_table(Path(self._path, path), columns=_OFFSET_COLUMNS, partitioning=None)
            except (OSError, KeyError, pa.ArrowException) as error:
                reason = "is gone" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
                yield path, _File(stamps[path], error=f"{reason} ({rows} rows)")
                continue
            stamp = stamps[path]
            modified = self._modified(path, stamp, committed[path])
            runs, again = runs_in(read.select(_OFFSET_COLUMNS).drop_null())
            doubled = [(one["_partition"], one["_offset"], one["_offset"]) for one in again.to_pylist()]
            problem = f"was modified after its commit ({rows} rows)" if modified else ""
            yield path, _File(stamp, tuple(runs), tuple(doubled), problem)

    def _modified(self, path: str, stamp: Stamp | None, action: Mapping[str, Any]) -> bool:
        """Whether a file is another one than was committed, or than was first found here."""
        if stamp is None:
            return False
        size, changed = stamp
        if size != action["size_bytes"] or changed // 1_000_000 > action["modification_time"] + _SLACK_MS:
            return True
        return stamp != self._first.setdefault(path, stamp)


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

"""A lake that a loader can fill, for tests without Spark: payloads have one column, a whole number `n`, or none."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
from deltalake import Schema

from penstock.audit.account import Share
from penstock.core.contracts import Entry, Offsets
from penstock.core.record import Origin
from penstock.stores.base import furthest, version_of
from penstock.stores.lake import LakeStore, LakeTable

PLACED = [
    ("_sender", pa.string()),
    ("_epoch", pa.int64()),
    ("_seq", pa.int64()),
    ("_time", pa.timestamp("us", tz="UTC")),
    pa.field("_partition", pa.int32(), nullable=False),
    pa.field("_offset", pa.int64(), nullable=False),
]
KEYED = [("_key", pa.string()), pa.field("_deleted", pa.bool_(), nullable=False), ("_version", pa.int64())]


def ahead_of(stands: Offsets, entries: Sequence[Entry]) -> list[Entry]:
    """The entries after the offsets of a store."""
    return [entry for entry in entries if entry.offset >= stands.get(entry.partition, 0)]


@dataclass(frozen=True)
class LoadedLake:
    """A lake, and how entries become its rows here."""

    store: LakeStore
    typed: bool = False
    every: timedelta = timedelta(0)

    @property
    def path(self) -> str:
        return self.store.path

    @property
    def columns(self) -> pa.Schema:
        payload = pa.field("n", pa.int64(), nullable=self.store.keyed) if self.typed else pa.field("value", pa.binary())
        return pa.schema([payload, *PLACED, *(KEYED if self.store.keyed else [])])

    def open(self) -> "LoadedTable":
        return LoadedTable(self)


class LoadedTable:
    def __init__(self, lake: LoadedLake) -> None:
        self._lake, self._keyed, self._columns = lake, lake.store.keyed, lake.columns
        self.table: LakeTable = lake.store.open(Schema.from_arrow(lake.columns).to_json())

    @property
    def generation(self) -> str:
        return self.table.generation

    def positions(self) -> Offsets:
        return self.table.positions()

    def begin(self, start: Offsets) -> None:
        self.table.begin(start)

    def share(self) -> Share:
        return self.table.share()

    def write(self, entries: Sequence[Entry], positions: Offsets) -> int:
        stands = self.table.totals.stands
        fresh = ahead_of(stands, entries)
        reached = furthest(stands, furthest({one.partition: one.offset + 1 for one in fresh}, positions))
        if reached == stands:
            return 0
        rows = [row for row in map(self._row, fresh) if row is not None]
        refused = len(fresh) - len(rows)
        return self.table.append(pa.Table.from_pylist(rows, self._columns), reached, refused)

    def close(self) -> None: ...

    def _row(self, entry: Entry) -> dict[str, Any] | None:
        """None when it does not fit."""
        row: dict[str, Any] = {"value": entry.value}
        if self._keyed and entry.key is None:
            return None
        if self._lake.typed and not (self._keyed and entry.value is None):
            try:
                row = {"n": json.loads(entry.value or b"")["n"]}
            except (ValueError, KeyError, TypeError):
                return None
            if type(row["n"]) is not int:
                return None
        origin = Origin.read(entry.headers)
        for name in ("sender", "epoch", "seq", "time"):
            row[f"_{name}"] = getattr(origin, name, None)
        row |= {"_partition": entry.partition, "_offset": entry.offset}
        if self._keyed:
            key = (entry.key or b"").decode(errors="replace")
            row |= {"_key": key, "_deleted": entry.value is None, "_version": version_of(entry.headers)}
        return row

"""A lake on Delta: every record of a channel as a row, with the positions in the same commit. No JVM."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pyarrow.compute as pc  # type: ignore[import-untyped]  # it ships no types
from deltalake import CommitProperties, DeltaTable, Schema, Transaction, write_deltalake
from deltalake.exceptions import DeltaError, DeltaProtocolError, SchemaMismatchError, TableNotFoundError

from penstock.audit.account import Outcome, Share
from penstock.audit.runs import Runs
from penstock.contracts import Entry, Guarantee, Positions
from penstock.errors import Misconfigured, Refused, Unavailable
from penstock.record import Origin
from penstock.stores.contents import Stored
from penstock.stores.ddl import schema_of
from penstock.stores.fit import fitting
from penstock.stores.loading import ahead_of, furthest, require_topic, version_of
from penstock.stores.totals import OUTCOMES, Totals

ADDED = pa.schema(
    [
        ("_sender", pa.string()),
        ("_epoch", pa.int64()),
        ("_seq", pa.int64()),
        ("_time", pa.timestamp("us", tz="UTC")),
        pa.field("_partition", pa.int32(), nullable=False),
        pa.field("_offset", pa.int64(), nullable=False),
    ]
)
"""The columns that stand beside those of the payload: the record's origin and its place in the channel."""

KEYED = pa.schema([("_key", pa.string()), pa.field("_deleted", pa.bool_(), nullable=False), ("_version", pa.int64())])
"""Of a table these as well: the key of the row, whether the record deletes it, and the version that it has there."""

_UNTYPED = pa.schema([pa.field("value", pa.binary())])
_FILE_SIZE = 64 * 1024 * 1024
_VACUUM_EVERY = 12
_READ_AT_ONCE = 1_000
_SETTINGS = {
    "delta.checkpointInterval": "50",
    "delta.enableExpiredLogCleanup": "true",
    "delta.logRetentionDuration": "interval 7 days",
}

Numbering = tuple[str, int]
"""A sender in one of its lives."""


@dataclass(frozen=True, slots=True)
class LakeStore:
    """A Delta table at `path`, a folder or an address. With a schema (DDL), a column for each field of the payload.

    Records that do not fit the schema are not in the table: the analysis puts them into the dead letters. Without a
    schema, all are there, in the column `value`.
    """

    path: str
    channel: str
    schema: str | None = None
    topic_id: str = ""
    every: timedelta = timedelta(seconds=5)
    keyed: bool = False
    """The channel is a table: a record without a value is one that deletes a row, and not one that does not fit."""
    compact_every: int = 60
    keep: timedelta = timedelta(days=7)

    def columns(self) -> pa.Schema:
        """The table's columns; Misconfigured when the schema cannot be read or takes a name that is taken."""
        payload = schema_of(self.schema) if self.schema is not None else _UNTYPED
        added = pa.schema([*ADDED, *KEYED]) if self.keyed else ADDED
        taken = {name.lower() for name in added.names}
        for name in payload.names:
            if name.lower() in taken:
                raise Misconfigured(
                    f"the schema of {self.channel}", f'the lake has a column "{name}" of its own', "name it otherwise"
                )
            taken.add(name.lower())
        if self.keyed:
            # A row that is deleted has none of them.
            payload = pa.schema([column.with_nullable(True) for column in payload])
        return pa.schema([*payload, *added])

    @property
    def who(self) -> str:
        """Its name in what is said about it."""
        return f"the lake {self.path}"

    def open(self) -> "LakeTable":
        """Open the table, made if it is not there."""
        return LakeTable(self)

    def stands(self) -> Positions:
        return {} if self._there() is None else self.open().positions()

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
        """Which numbers of which senders it holds; none when it is not there."""
        if (there := self._there()) is None:
            return {}
        with _explained(self.who):
            return _numbers_in(there)

    def _there(self) -> DeltaTable | None:
        with _explained(self.who):
            return DeltaTable(self.path) if DeltaTable.is_deltatable(self.path) else None


class LakeTable:
    guarantee = Guarantee.EXACTLY_ONCE

    def __init__(self, store: LakeStore) -> None:
        self._store = store
        self._who = store.who
        self._columns = store.columns()
        self._fit = fitting(schema_of(store.schema)) if store.schema is not None else _whole_value
        self._commits = 0
        self.refused = 0
        """How many records did not fit the schema, since this was opened."""
        with _explained(self._who):
            self._table = self._open_table()
            self._totals = self._read_totals()
        self._known: dict[Numbering, Runs] | None = None
        self._start: Positions = {}

    @property
    def life(self) -> str:
        return str(self._table.metadata().id)

    def positions(self) -> Positions:
        with _explained(self._who):
            self._table.update_incremental()
            totals = self._read_totals()
            if totals.stands != self._totals.stands:
                # Somebody else has written, by mistake or before a lost answer: what the table holds is learnt anew.
                self._known = None
            self._totals = totals
        return totals.stands

    def begin(self, start: Positions) -> None:
        self._start = start

    def share(self) -> Share:
        self.positions()
        return self._totals.share(self._start)

    def write(self, entries: Sequence[Entry], positions: Positions) -> int:
        stands = self._totals.stands
        fresh = ahead_of(stands, entries)
        reached = furthest(stands, furthest({entry.partition: entry.offset + 1 for entry in fresh}, positions))
        if reached == stands:
            return 0
        known = self._numbers()
        rows, numbers, refused = self._rows(fresh, known)
        outcomes = {
            Outcome.PASSED: len(rows),
            Outcome.DUPLICATE: len(fresh) - len(rows) - refused,
            Outcome.REFUSED: refused,
        }
        totals = self._totals.after(reached, self._start, outcomes)
        with _explained(self._who):
            write_deltalake(self._table, self._arrow(rows), mode="append", commit_properties=self._commit_of(totals))
        self.refused += refused
        self._totals = totals
        for numbering, some in numbers.items():
            runs = known.setdefault(numbering, Runs())
            for seq in some:
                runs.add(seq)
        self._commits += 1
        if self._commits % self._store.compact_every == 0:
            self.compact()
        return len(rows)

    def compact(self) -> None:
        """Put small files together; now and then remove those that no version of the last days needs."""
        with _explained(self._who):
            self._table.optimize.compact(target_size=_FILE_SIZE)
            if self._commits // self._store.compact_every % _VACUUM_EVERY == 0:
                hours = round(self._store.keep.total_seconds() / 3600)
                self._table.vacuum(retention_hours=hours, dry_run=False, enforce_retention_duration=False)

    def close(self) -> None:
        """There is nothing to let go of: a table is files."""

    def _numbers(self) -> dict[Numbering, Runs]:
        """Which numbers the table holds: read from its columns once."""
        if self._known is None:
            with _explained(self._who):
                self._known = _numbers_in(self._table)
        return self._known

    def _rows(
        self, entries: Iterable[Entry], known: Mapping[Numbering, Runs]
    ) -> tuple[list[dict[str, Any]], Mapping[Numbering, set[int]], int]:
        """The rows that are new, the numbers among them, and how many entries did not fit."""
        rows: list[dict[str, Any]] = []
        numbers: defaultdict[Numbering, set[int]] = defaultdict(set)
        refused = 0
        for entry in entries:
            origin = Origin.read(entry.headers)
            if origin is not None:
                numbering = (origin.sender, origin.epoch)
                if origin.seq in numbers[numbering] or origin.seq in known.get(numbering, ()):
                    continue
            try:
                row = self._row(entry)
            except Refused:
                refused += 1
                continue
            if origin is not None:
                numbers[origin.sender, origin.epoch].add(origin.seq)
            row["_sender"], row["_epoch"], row["_seq"], row["_time"] = (
                (origin.sender, origin.epoch, origin.seq, origin.time) if origin else (None, None, None, None)
            )
            row["_partition"], row["_offset"] = entry.partition, entry.offset
            rows.append(row)
        return rows, numbers, refused

    def _row(self, entry: Entry) -> dict[str, Any]:
        if not self._store.keyed:
            return self._fit(entry.value)
        if entry.key is None:
            raise Refused("a record", "it has no key, and its channel is a table")
        row = self._fit(entry.value) if entry.value is not None else dict.fromkeys(self._columns.names)
        row["_key"], row["_deleted"] = entry.key.decode(errors="replace"), entry.value is None
        row["_version"] = version_of(entry.headers)
        return row

    def _arrow(self, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
        return pa.Table.from_arrays(
            [pa.array([row[column.name] for row in rows], column.type) for column in self._columns],
            schema=self._columns,
        )

    def _commit_of(self, totals: Totals) -> CommitProperties:
        """One transaction id per partition and total; two loaders that write the same one collide, and one commits."""
        held = self._parts_of(self._totals)
        changed = {part: number for part, number in self._parts_of(totals).items() if held.get(part) != number}
        # Always there, so that any two commits collide.
        changed["count"] = max(totals.stands) + 1
        return CommitProperties(app_transactions=[Transaction(self._app(part), at) for part, at in changed.items()])

    def _parts_of(self, totals: Totals) -> dict[str, int]:
        """The totals as the numbers that Delta keeps for applications."""
        return {
            **{f"{partition}": offset for partition, offset in totals.stands.items()},
            **{f"since/{partition}": offset for partition, offset in totals.since.items()},
            "taken": totals.taken,
            **{outcome.value: number for outcome, number in totals.outcomes.items()},
        }

    def _read_totals(self) -> Totals:
        partitions = range(self._held("count") or 0)
        stands = {number: at for number in partitions if (at := self._held(f"{number}")) is not None}
        since = {number: at for number in stands if (at := self._held(f"since/{number}")) is not None}
        outcomes = {outcome: self._held(outcome.value) or 0 for outcome in OUTCOMES}
        return Totals(stands, since, self._held("taken") or 0, outcomes)

    def _held(self, part: str) -> int | None:
        return self._table.transaction_version(self._app(part))

    def _app(self, part: str) -> str:
        return f"penstock/{self._store.channel}/{part}"

    def _open_table(self) -> DeltaTable:
        store = self._store
        try:
            table = DeltaTable(store.path)
        except TableNotFoundError:
            if "://" not in store.path:
                Path(store.path).mkdir(parents=True, exist_ok=True)
            table = DeltaTable.create(
                store.path,
                schema=Schema.from_arrow(self._columns),
                name=store.channel,
                description=f"topic {store.topic_id}" if store.topic_id else None,
                configuration=_SETTINGS,
            )
        way_out = "move the table away; it is filled again from what the channel holds"
        remembered = re.fullmatch(r"topic (\S+)", table.metadata().description or "")
        require_topic(self._who, store.channel, remembered and remembered[1], store.topic_id, way_out)
        if table.schema() != Schema.from_arrow(self._columns):
            raise Misconfigured(self._who, f"its columns are not those of the schema of {store.channel}", way_out)
        return table


@contextmanager
def _explained(who: str) -> Iterator[None]:
    try:
        yield
    except (DeltaProtocolError, SchemaMismatchError) as error:
        raise Misconfigured(who, str(error)) from error
    except (DeltaError, OSError) as error:
        raise Unavailable(who, str(error)) from error


def _whole_value(value: bytes | None) -> dict[str, Any]:
    return {"value": value}


def _numbers_in(table: DeltaTable) -> dict[Numbering, Runs]:
    """Which numbers of which senders a table holds, streamed: memory grows with the gaps."""
    found: defaultdict[Numbering, Runs] = defaultdict(Runs)
    scanner = table.to_pyarrow_dataset().scanner(columns=["_sender", "_epoch", "_seq"])
    for batch in scanner.to_batches():
        for sender, epoch, first, last in _islands(pa.table(batch).drop_null()):
            found[sender, epoch].add(first, last)
    return dict(found)


def _islands(rows: pa.Table) -> Iterator[tuple[str, int, int, int]]:
    """The runs of numbers: sender, epoch, first, last. Done by Arrow, so that a large table opens soon."""
    if not rows.num_rows:
        return
    rows = rows.sort_by([(name, "ascending") for name in rows.column_names]).combine_chunks()
    before, after = rows.slice(0, rows.num_rows - 1), rows.slice(1)
    same = pc.and_(
        pc.and_(pc.equal(before["_sender"], after["_sender"]), pc.equal(before["_epoch"], after["_epoch"])),
        pc.or_(pc.equal(before["_seq"], after["_seq"]), pc.equal(pc.add(before["_seq"], 1), after["_seq"])),
    )
    ends = [*pc.indices_nonzero(pc.invert(same)).to_pylist(), rows.num_rows - 1]
    starts = [0, *(end + 1 for end in ends[:-1])]
    lasts = rows["_seq"].take(pa.array(ends)).to_pylist()
    for start, last in zip(rows.take(pa.array(starts)).to_pylist(), lasts, strict=True):
        yield start["_sender"], start["_epoch"], start["_seq"], last

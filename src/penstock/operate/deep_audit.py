"""The deep audit: all rows, versions and values of stores and results, compared once with the channels."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import pyarrow.compute as pc  # type: ignore[import-untyped]  # it ships no types
from deltalake import DeltaTable

from penstock.analysis.engine import Engine
from penstock.analysis.frames import schema_of, typed
from penstock.audit.balance import Balance
from penstock.audit.content import Content
from penstock.audit.findings import ForgedRow
from penstock.audit.hops import Gap, Hop
from penstock.audit.judge import Discrepancy, Doubt
from penstock.audit.reconcile import AT_ONCE, NAMED, RecordCheck, TableCheck
from penstock.audit.writers import Writers
from penstock.core.clock import SystemClock
from penstock.core.contracts import Channels, Entry
from penstock.core.errors import PenstockError
from penstock.core.runs import Runs
from penstock.core.scan import scan, scan_batches
from penstock.pipeline.config import Config
from penstock.pipeline.description import Description, StoreSpec
from penstock.pipeline.graph import store_node
from penstock.pipeline.stores import make_check, make_store
from penstock.run.analyse import engine
from penstock.stores.base import version_of
from penstock.stores.lake import LakeStore
from penstock.stores.lake_rows import LakeRows

Say = Callable[[str], None]

_TIMEOUT = 60.0
"""Seconds without progress after which the comparison of a store ends with a doubt."""
_CHUNK = 50_000
"""Maximum offsets of a partition that are compared at once."""


@dataclass
class Deep:
    """One comparison of all rows of a pipeline. `checked` are the stages that were compared."""

    description: Description
    config: Config
    say: Say = lambda _: None
    start: Callable[[], AbstractContextManager[Engine]] | None = None
    """Starts Spark, when first needed; None: as the analysis does."""
    discrepancies: list[Discrepancy] = field(default_factory=list)
    doubts: list[Doubt] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    _opened: ExitStack = field(default_factory=ExitStack)

    def run(self) -> None:
        """Compare all stores and results. One that cannot be compared is a doubt."""
        channels = self.config.bind()
        with self._opened:
            for channel in self.description.channels.values():
                if channel.result_of:
                    with self._checking(f"channel:{channel.name}"):
                        self._result(channels, channel.name)
            for spec in self.description.stores:
                with self._checking(store_node(spec.url, spec.channel)):
                    self._store(channels, spec)

    @cached_property
    def _engine(self) -> Engine:
        self.say("starting Spark, to validate the records again")
        start = self.start or partial(engine, self.description, self.config, None)
        return self._opened.enter_context(start())

    @contextmanager
    def _checking(self, stage: str) -> Iterator[None]:
        try:
            yield
            self.checked.append(stage)
        except PenstockError as error:
            self.doubts.append(Doubt("store", stage, f"{stage} could not be compared: {error}"))

    def _result(self, channels: Channels, channel: str) -> None:
        """Check that each row of a result was written by its query."""
        writers, bounds = Writers(channels, [self.description.bookmarks]), channels.bounds(channel)
        writers.refresh()
        total = sum(end - low for low, end in bounds.values())
        progress, rows, count, names = _Progress(self.say, f"channel {channel}", total), 0, 0, list[str]()
        for entries in scan_batches(channels, channel, bounds=bounds):
            writers.learn(entries)
            forged = [entry for entry in entries if not writers.known.genuine(entry)]
            names += [ForgedRow.of(entry).name for entry in forged[: NAMED - len(names)]]
            count += len(forged)
            progress(rows := rows + len(entries))
        progress.end(rows)
        if count:
            query = self.description.channels[channel].result_of
            text = f"{channel} holds {count:,} rows that query {query} has not written"
            self.discrepancies.append(Discrepancy("forged", f"channel:{channel}", count, text, tuple(names)))

    def _store(self, channels: Channels, spec: StoreSpec) -> None:
        stage = store_node(spec.url, spec.channel)
        check = make_check(spec, self.description, self.config, channels, SystemClock(), most=None)
        if isinstance(check, RecordCheck):
            # If the channel still holds all records, the values of all rows are compared below.
            check.judge_commits = any(low for low, _ in channels.bounds(spec.channel).values())
        try:
            progress = _Progress(self.say, stage.replace(":", " "))
            since, reached = time.monotonic(), -1
            # A difference counts when it is seen twice: so each store is compared twice.
            turns = 0
            while turns < 2 or not check.complete:
                check.turn()
                turns += 1
                done = len(check.rows) if isinstance(check, TableCheck) else 0
                progress(done)
                if done != reached or check.complete:
                    since, reached = time.monotonic(), done
                if time.monotonic() - since > _TIMEOUT:
                    self.doubts.append(Doubt("store", stage, f"{stage} does not reach the offsets that it reports"))
                    return
            self.discrepancies += check.discrepancies()
            if isinstance(check, TableCheck):
                progress.end(len(check.rows))
                self._foreign(stage, check, spec, channels)
            elif isinstance(check, RecordCheck):
                self._values(stage, spec, channels)
        finally:
            check.close()

    def _foreign(self, stage: str, check: TableCheck, spec: StoreSpec, channels: Channels) -> None:
        """Find rows of a table without a record, if the channel still holds all records of the table."""
        keep = channels.topic(spec.channel).retention
        whole = not any(low for low, _ in channels.bounds(spec.channel).values())
        if not (keep is None and whole if spec.ttl is None else keep is None or keep >= spec.ttl):
            self.say(f"{stage.replace(':', ' ')}: not all records are in {spec.channel}: extra rows are not searched")
            return
        description = make_store(spec, self.description, self.config)
        assert not isinstance(description, LakeStore)
        with closing(description.open()) as store:
            keys = [one.key for one in store.rows() if one.key is not None]
        strange = [key for key in keys if key not in check.rows]
        found = [key for at in range(0, len(strange), AT_ONCE) for key in check.foreign(strange[at : at + AT_ONCE])]
        if found:
            names = tuple(f"key {key.decode(errors='replace')}" for key in found[:NAMED])
            text = f"{stage}: {len(found):,} rows have no record in {spec.channel}"
            self.discrepancies.append(Discrepancy("forged", stage, len(found), text, names))

    def _values(self, stage: str, spec: StoreSpec, channels: Channels) -> None:
        """Compare the values of a lake's rows with those of the records."""
        store = make_store(spec, self.description, self.config)
        assert isinstance(store, LakeStore)
        holdings = LakeRows(store.path, spec.channel).holdings()
        if holdings is None:
            return
        bounds, typed_rows = channels.bounds(spec.channel), self.description.channels[spec.channel].schema is not None
        total = sum(runs.size for runs in holdings.rows.values())
        progress, done, changed = _Progress(self.say, stage.replace(":", " "), total), 0, list[str]()
        for partition, stands in sorted(holdings.stands.items()):
            low, end = bounds.get(partition, (0, 0))
            start = max(low, holdings.since.get(partition, 0))
            for first in range(start, min(stands, end), _CHUNK):
                last = min(first + _CHUNK, stands, end)
                rows = _rows(store, partition, first, last)
                due = _due(store, channels, self._engine if typed_rows else None, partition, first, last)
                changed += (
                    f"partition {partition}, offset {offset}: {_differing(row, due[offset])}"
                    for offset, row in rows.items()
                    if offset in due and row != due[offset]
                )
                progress(done := done + len(rows))
        progress.end(done)
        if changed:
            text = f"{stage}: {len(changed):,} rows have other values than their records"
            self.discrepancies.append(Discrepancy("changed", stage, len(changed), text, tuple(changed[:NAMED])))


Row = dict[str, Any]


def _rows(store: LakeStore, partition: int, first: int, last: int) -> dict[int, Row]:
    """Return the rows of a lake from one offset up to another, by offset."""
    table = DeltaTable(store.path)
    columns = [one.name for one in table.schema().fields]
    names = [name for name in columns if name not in ("_sender", "_epoch", "_seq", "_time", "_partition")]
    offset = pc.field("_offset")
    within = (pc.field("_partition") == partition) & (offset >= first) & (offset < last)
    rows = table.to_pyarrow_dataset().to_table(columns=names, filter=within)
    return {row.pop("_offset"): row for row in rows.to_pylist()}


def _due(
    store: LakeStore, channels: Channels, spark: Engine | None, partition: int, first: int, last: int
) -> dict[int, Row]:
    """Return the expected rows, by offset, from the records; without Spark as raw values."""
    if spark is None:
        entries = scan(channels, store.channel, {partition: first}, {partition: (first, last)})
        return {entry.offset: _raw(entry, store.keyed) for entry in entries}
    shape = spark.shapes[store.channel]
    # The range of the other partitions is empty.
    ends = {at: end for at, (_, end) in channels.bounds(store.channel).items()}
    raw = spark.batch(store.channel, {**ends, partition: last}, {**ends, partition: first})
    names = schema_of(shape).names
    added = {"_key": "_key", "_deleted": "_deleted"} if store.keyed else {}
    table = (
        typed(raw, shape).selectExpr(*(f"`{name}`" for name in (*names, *added)), "origin.offset AS _offset").toArrow()
    )
    found = {row.pop("_offset"): row for row in table.to_pylist()}
    if store.keyed:
        for row in found.values():
            row["_version"] = None
    return found


def _raw(entry: Entry, keyed: bool) -> Row:
    row: Row = {"value": entry.value}
    if keyed:
        key = None if entry.key is None else entry.key.decode(errors="replace")
        row |= {"_key": key, "_deleted": entry.value is None, "_version": version_of(entry.headers)}
    return row


def _differing(row: Row, due: Row) -> str:
    names: Sequence[str] = [name for name in row if row[name] != due.get(name)]
    return ", ".join(f"{name} is {str(row[name])[:60]}, not {str(due.get(name))[:60]}" for name in names[:3])


class _Progress:
    """Reports progress once a second."""

    def __init__(self, say: Say, what: str, total: int | None = None) -> None:
        self._say, self._what, self._total = say, what, total
        self._reported = time.monotonic()

    def __call__(self, done: int) -> None:
        if time.monotonic() - self._reported >= 1:
            self._reported = time.monotonic()
            self._say(f"{self._what}: {done:,}{'' if self._total is None else f' of {self._total:,}'} rows")

    def end(self, done: int) -> None:
        self._say(f"{self._what}: {done:,} rows compared")


def merged(discrepancies: Sequence[Discrepancy], found: Deep) -> tuple[Discrepancy, ...]:
    """Return the findings of the auditor, with those of the compared stages replaced by the new ones."""
    again = {stage for stage in found.checked if stage.startswith("store:")}
    forged = {stage for stage in found.checked if stage.startswith("channel:")}
    kept = (
        one
        for one in discrepancies
        if not (one.stage in again and one.kind in ("missing", "doubled", "changed", "forged"))
        and not (one.stage in forged and one.kind == "forged")
    )
    return (*kept, *found.discrepancies)


def named(found: Balance, content: Content, description: Description, config: Config) -> Balance:
    """Return the balance with the numbers that are missing in lakes. A lake with records in flight is skipped."""
    stores = {store_node(spec.url, spec.channel): make_store(spec, description, config) for spec in description.stores}

    def hop(one: Hop) -> Hop:
        store = stores.get(one.stage)
        if not one.missing or one.in_flight or not isinstance(store, LakeStore):
            return one
        return replace(one, gaps=absent(store, content, store.channel))

    return replace(found, hops=tuple(hop(one) for one in found.hops))


def absent(store: LakeStore, content: Content, channel: str) -> tuple[Gap, ...]:
    """Return the numbers that the ledger has seen in the channel and that the lake does not hold.

    Dead letters of the channel are not expected in the lake. Call this when nothing is in flight: records that are not
    loaded yet are missing, too. Raises Unavailable if the lake cannot be read.
    """
    stored, found = store.numbers(), list[Gap]()
    for (name, sender, epoch), runs in sorted(content.runs.items()):
        if name != channel:
            continue
        dead = content.runs.get((f"{channel}.dead", sender, epoch), ())
        there = Runs([*stored.get((sender, epoch), ()), *((run.first, run.last) for run in dead)])
        due = Runs((run.first, run.last) for run in runs)
        found += (Gap(sender, epoch, first, last) for first, last in due.without(there))
    return tuple(found)

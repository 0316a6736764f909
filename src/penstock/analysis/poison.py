"""Find the records that make a query fail, and exclude them from the query.

The search has two steps. First, parts of the batch are run alone, with fresh state: the query's function, the encoding
of its rows, and the size that their channel accepts. A record that fails alone is an offender. If there is none, the
failure needs the state of earlier batches, or several records. Then the batch is run from copies of the checkpoint,
with only its first records: the offender is the last record of the shortest part that fails.

An offender is written to the dead letters of its channel with the error, and its offset is stored beside the
checkpoint. The query then sees a record that does not fit, and counts it as refused.
"""

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable
from uuid import uuid4

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from penstock.analysis.accounting import beginning
from penstock.analysis.checkpoints.batches import (
    Excluded,
    batches,
    covered,
    exclude,
    excluded,
    on_disk,
    unfinished,
    written,
)
from penstock.analysis.checkpoints.note import note_of
from penstock.analysis.connectors import raw_table
from penstock.analysis.dead_letters import LateRecords
from penstock.analysis.engine import Engine
from penstock.analysis.frames import RAW, SPARK_ERRORS, dead_letters, encoded
from penstock.analysis.query import Query, Shape
from penstock.analysis.supervision import TooMany, is_transient, telling
from penstock.audit.findings import EXCLUDED
from penstock.core.contracts import Channels, Entry, Offsets
from penstock.core.errors import Unavailable
from penstock.core.scan import scan

log = logging.getLogger(__name__)

T = TypeVar("T")
Raw = Callable[[str], DataFrame]
"""Returns the raw records of a channel."""

_HELD = 20_000
"""How many records of a failed batch are searched in memory."""
_FEW = 2
_LONGEST = 500
"""The maximal length of an error in a dead letter."""
_NEVER = "365 days"
_LOOK_EVERY = 0.05


@dataclass(frozen=True)
class Work:
    """The work of a query on its records, as a batch."""

    name: str
    inputs: tuple[str, ...]
    into: str
    rows: Callable[[Engine, Raw], DataFrame]
    """The rows that it writes: key, value and headers."""
    output: Callable[[Engine], str] | None = None
    """Its output mode; None for work without state, whose records fail alone."""


def work_of(query: Query) -> Work:
    def rows(engine: Engine, raw: Raw) -> DataFrame:
        note = note_of(engine.checkpoint(query.name))
        return encoded(engine.frame(query, raw), query, note.generation, note.writer)

    def output(engine: Engine) -> str:
        return "update" if engine.updates(query) else "append"

    return Work(query.name, query.inputs, query.into, rows, output)


def validation_of(shape: Shape, dead: str, name: str = "") -> Work:
    """The work of the query that writes records which do not fit to the dead letters."""
    return Work(
        name or f"{shape.channel}.dead", (shape.channel,), dead, lambda _, raw: dead_letters(raw(shape.channel), shape)
    )


class Probe:
    """Runs the work of a query over some records."""

    def __init__(self, engine: Engine, work: Work, limit: int | None, folder: Path) -> None:
        """`limit` is how many bytes a row of the result may have. Spark's tasks must be able to read `folder`."""
        self._engine, self._work, self._limit, self._folder = engine, work, limit, folder
        self._largest: DataFrame | None = None

    def __call__(self, records: Mapping[str, Sequence[Entry]]) -> str | None:
        """The error of the query over these records; None when it succeeds."""
        began = time.monotonic()
        for channel in self._work.inputs:
            table = raw_table(records.get(channel, ()))
            with pa.ipc.new_file(str(self._file(channel)), table.schema) as file:
                file.write_batch(table)
        if self._largest is None:
            self._largest = _largest(self._work.rows(self._engine, self._records))
        # A new frame: the same one would reuse its shuffle files.
        found = self._error(self._largest.select("*"))
        count = sum(map(len, records.values()))
        log.info("query %s: %d records in %.2f s", self._work.name, count, time.monotonic() - began)
        return found

    def over(self, raw: Raw) -> str | None:
        """The error of the query over raw frames; None when it succeeds."""
        return self._error(_largest(self._work.rows(self._engine, raw)))

    def _error(self, largest: DataFrame) -> str | None:
        try:
            size = largest.collect()[0][0]
        except SPARK_ERRORS as error:
            if is_transient(error):
                raise
            return telling(error)
        if self._limit is not None and size is not None and size > self._limit:
            return f"a row of its result has {size:,} bytes, and the channel {self._work.into} takes {self._limit:,}"
        return None

    def _records(self, channel: str) -> DataFrame:
        # One task: starting a Python worker takes longer than reading thousands of records.
        once = self._engine.spark.range(0, 1, 1, 1)
        return once.mapInArrow(partial(_read, str(self._file(channel))), RAW)

    def _file(self, channel: str) -> Path:
        return self._folder / f"{channel}.arrow"


class Replay:
    """Runs the first part of a failed batch from a copy of the query's checkpoint, with its state."""

    def __init__(self, engine: Engine, work: Work, limit: int | None, folder: Path) -> None:
        """`folder` gets the copy. `limit` is how many bytes a row of the result may have."""
        assert work.output is not None
        self._engine, self._work, self._limit = engine, work, limit
        self._folder, self._output = folder, work.output(engine)
        self._too_large = f"a row of its result is larger than the channel {work.into} takes: {limit or 0:,} bytes"
        self._checkpoint = Path(on_disk(engine.checkpoint(work.name)) or "")
        found = written(self._checkpoint)
        self._batch = 0 if found is None else found.begun + (found.begun == found.finished)
        self.excluded: list[Excluded] = []
        """Records to skip beside those that the query already skips."""

    @property
    def possible(self) -> bool:
        """Whether the checkpoint has offsets to start from. A first real-time batch leaves none."""
        offsets = self._checkpoint / "offsets"
        return any((offsets / str(number)).exists() for number in (self._batch, self._batch - 1))

    def __call__(self, ends: Mapping[tuple[str, int], int]) -> str | None:
        """The error when the batch reads each partition up to these offsets; None when it succeeds."""
        folder = self._folder / "replay" / self._work.name
        try:
            self._copy(folder)
            self._limit_batch(folder, ends)
            exclude(str(folder), self.excluded)
            return self._run(replace(self._engine, checkpoints=str(folder.parent)), folder)
        finally:
            shutil.rmtree(folder.parent, ignore_errors=True)

    def _copy(self, folder: Path) -> None:
        """Copy the checkpoint by hard links: Spark never changes a file."""
        shutil.rmtree(folder, ignore_errors=True)
        skipped = {self._folder.name, "metadata", ".metadata.crc"}

        def ignored(path: str, _: list[str]) -> set[str]:
            return skipped if Path(path) == self._checkpoint else set()

        shutil.copytree(self._checkpoint, folder, ignore=ignored, copy_function=os.link)
        # The copy is another query: Spark runs a query only once.
        (folder / "metadata").write_text(json.dumps({"id": str(uuid4())}), encoding="utf-8")

    def _limit_batch(self, folder: Path, ends: Mapping[tuple[str, int], int]) -> None:
        """Write the offsets of the batch, with limited ends."""
        offsets = folder / "offsets"
        begun = (offsets / str(self._batch)).exists()
        version, metadata, *sources = (
            (offsets / str(self._batch if begun else self._batch - 1)).read_text(encoding="utf-8").splitlines()
        )
        if not begun:
            # In real time, Spark writes the offsets of a batch at its end.
            _, commit, *_ = (folder / "commits" / str(self._batch - 1)).read_text(encoding="utf-8").splitlines()
            watermark = json.loads(commit).get("nextBatchWatermarkMs", 0)
            times = {"batchWatermarkMs": watermark, "batchTimestampMs": int(time.time() * 1_000)}
            metadata = json.dumps(json.loads(metadata) | times)
        limited = [line if line == "-" else _limited(json.loads(line), ends) for line in sources]
        for old in (f"{self._batch}", f".{self._batch}.crc"):
            (offsets / old).unlink(missing_ok=True)
        (offsets / str(self._batch)).write_text("\n".join([version, metadata, *limited]), encoding="utf-8")

    def _run(self, engine: Engine, folder: Path) -> str | None:
        since = note_of(str(folder)).since or {}
        rows = self._work.rows(engine, lambda name: engine.stream(name, since.get(name)))
        # The batch runs at once, and the next one never.
        writer = self._checked(rows).writeStream.format("noop").outputMode(self._output)
        running = (
            writer.option("checkpointLocation", str(folder))
            .queryName(f"{self._work.name} replay {uuid4()}")
            .trigger(processingTime=_NEVER)
            .start()
        )
        done = folder / "commits" / str(self._batch)
        try:
            while running.isActive and not done.exists():
                time.sleep(_LOOK_EVERY)
            error = None if done.exists() else running.exception()
        finally:
            running.stop()
        if error is not None and is_transient(error):
            raise error
        if error is None and not done.exists():
            raise Unavailable(f"query {self._work.name}", "the replay of its batch was stopped")
        if error is None:
            return None
        # The text of an error holds the plan, which holds our message in any case.
        raised = f"[USER_RAISED_EXCEPTION] {self._too_large}"
        return self._too_large if raised in str(error) else telling(error)

    def _checked(self, rows: DataFrame) -> DataFrame:
        size = row_size()
        if self._limit is not None:
            size = F.when(size > self._limit, F.raise_error(self._too_large).cast("int")).otherwise(size)
        return rows.select(size.alias("size"))


def _limited(source: Mapping[str, Mapping[str, int]], ends: Mapping[tuple[str, int], int]) -> str:
    """A line of an offsets file, with other ends."""
    return json.dumps(
        {
            channel: {at: ends.get((channel, int(at)), offset) for at, offset in offsets.items()}
            for channel, offsets in source.items()
        }
    )


def _read(file: str, once: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in once:
        with pa.ipc.open_file(file) as opened:
            yield opened.get_batch(0)


def _largest(rows: DataFrame) -> DataFrame:
    return rows.select(row_size().alias("size")).agg(F.max("size"))


_BATCH, _RECORD = 61, 4
"""Bytes that Kafka adds to a batch, and to a record without the lengths of its parts."""


def row_size() -> Column:
    """The size of a row in bytes, alone in a Kafka batch."""
    headers = F.aggregate("headers", F.lit(0), lambda total, one: total + _part(one["key"]) + _part(one["value"]))
    body = F.lit(_RECORD) + _part(F.col("key")) + _part(F.col("value")) + headers
    return F.lit(_BATCH) + _varint(body) + body


def _part(value: Column) -> Column:
    length = F.coalesce(F.octet_length(value), F.lit(0))
    return _varint(length) + length


def _varint(length: Column) -> Column:
    """The size of a length in bytes."""
    steps = F.lit(1)
    for bits in (6, 13, 20, 27):
        steps = steps + (length >= (1 << bits)).cast("int")
    return steps


@runtime_checkable
class Limited(Protocol):
    """Channels with a limit for the size of a record."""

    def limit(self, channel: str) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Range:
    """Offsets of one partition: from `first` up to `end`, exclusive."""

    channel: str
    partition: int
    first: int
    end: int


Ranges = tuple[Range, ...]
Others = Mapping[str, Sequence[Entry]]
"""Records of the other channels of a query."""


class Isolation:
    """Finds the records that make a query fail. It is called with the error when the query has failed again."""

    def __init__(self, engine: Callable[[], Engine], work: Work, channels: Channels, most: int) -> None:
        """`engine` returns the current engine of the query. At most `most` records may be excluded."""
        self._engine, self._work, self._channels, self._most = engine, work, channels, most

    def __call__(self, error: str) -> int:
        """Find and exclude records; return how many. TooMany when there are more than allowed."""
        engine = self._engine()
        folder = engine.checkpoint(self._work.name)
        if (path := on_disk(folder)) is None:
            log.warning("query %s: its checkpoint is remote: no record can be excluded", self._work.name)
            return 0
        began = time.monotonic()
        whole, context = self._failed_batch(folder)
        left = self._most - len(excluded(folder))
        search = _Search(engine, self._work, self._channels, left, path / "probe")
        found = search(whole, context)
        if len(found) > left:
            raise TooMany(f"more than {self._most} records make the query fail ([spark] poison_limit)")
        for entry, why in found:
            reason = f"{EXCLUDED}query {self._work.name} fails with it: {why}"
            dead_letters = LateRecords(self._work.name, self._channels, 0, {"reason": reason, "error": why})
            dead_letters.write(entry.channel, raw_table([entry]).to_pylist())
        exclude(folder, [Excluded(one.channel, one.partition, one.offset, why) for one, why in found])
        locations = ", ".join(f"{one.channel}:{one.partition}:{one.offset}" for one, _ in found) or "none"
        what = f"{search.runs} runs over {_size(whole):,} offsets took {time.monotonic() - began:.1f} s"
        log.warning("query %s: excluded records that make it fail: %s (%s)", self._work.name, locations, what)
        return len(found)

    def _failed_batch(self, folder: str) -> tuple[Ranges, Ranges]:
        """The offsets of the failed batch; and these with the records before them, up to a limit."""
        begin = beginning(folder, self._work.inputs, self._channels.bounds)
        starts: Mapping[str, Offsets] = covered(folder) or begin
        begun = batches(folder, begun=True) if unfinished(folder) is not None else []
        whole: list[Range] = []
        context: list[Range] = []
        for channel in self._work.inputs:
            bounds = self._channels.bounds(channel)
            # In real time, the offsets of a running batch are not written.
            ends = begun[-1].ends.get(channel, {}) if begun else {at: end for at, (_, end) in bounds.items()}
            for partition, end in sorted(ends.items()):
                low, _ = bounds[partition]
                first = max(starts.get(channel, {}).get(partition, 0), low)
                earlier = max(begin[channel].get(partition, 0), low, end - _HELD)
                for found, start in ((whole, first), (context, earlier)):
                    if start < end:
                        found.append(Range(channel, partition, start, end))
        return tuple(whole), tuple(context)


class _Search:
    """One search through a failed batch."""

    def __init__(self, engine: Engine, work: Work, channels: Channels, most: int, folder: Path) -> None:
        self._engine, self._work, self._channels, self._most, self._folder = engine, work, channels, most, folder
        # Only Kafka limits the size of a row.
        self._limit = channels.limit(work.into) if isinstance(channels, Limited) else None
        self._probe = Probe(engine, work, self._limit, folder)
        self._found: list[tuple[Entry, str]] = []
        self.runs = 0

    def __call__(self, whole: Ranges, context: Ranges) -> list[tuple[Entry, str]]:
        """The records that fail, each with its error; a few more than `most` at most.

        `context` holds the records that they may be joined with.
        """
        self._folder.mkdir(exist_ok=True)
        try:
            for channel in self._work.inputs:
                self._look(channel, _pieces(_of(channel, whole), lambda some: self._over(some) is not None), {})
            if not self._found and len(self._work.inputs) > 1:
                # A record may fail only in a join with older records.
                self._look_joined(whole, context)
            if not self._found and self._work.output is not None and whole:
                self._look_in_order(whole)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
        return self._found

    def _look_in_order(self, whole: Ranges) -> None:
        """Find the last record of the shortest first part that fails, with the state of earlier batches."""
        replay = Replay(self._engine, self._work, self._limit, self._folder)

        def error(count: int) -> str | None:
            first, _ = _split(whole, count)
            if not replay.possible:
                # Before the first batch the state is empty: a batch over the log does the same.
                return self._over(first, replay.excluded)
            self.runs += 1
            starts = {(one.channel, one.partition): one.first for one in whole}
            return replay(starts | {(one.channel, one.partition): one.end for one in first})

        size = _size(whole)
        while len(self._found) <= self._most and (found := last_needed(size, error)) is not None:
            count, why = found
            _, last = _split(_split(whole, count)[0], count - 1)
            (entry,) = self._entries(last)
            self._found.append((entry, why[:_LONGEST]))
            replay.excluded.append(Excluded(entry.channel, entry.partition, entry.offset, why))

    def _look_joined(self, whole: Ranges, context: Ranges) -> None:
        held_by = {channel: self._entries(_of(channel, context)) for channel in self._work.inputs}
        for channel in self._work.inputs:
            others = {name: entries for name, entries in held_by.items() if name != channel}
            if not self._found and self._error(others) is None:
                self._look(channel, _pieces(_of(channel, whole)), others)

    def _look(self, channel: str, pieces: Iterator[Ranges], others: Others) -> None:
        """Find the records of a channel that fail together with the records of other channels."""
        for piece in pieces:
            left = self._most - len(self._found)
            for one, why in offenders(self._entries(piece), lambda some: self._error({channel: some, **others}), left):
                self._found.append((one, why[:_LONGEST]))
            if len(self._found) > self._most:
                return

    def _error(self, records: Others) -> str | None:
        self.runs += 1
        return self._probe(records)

    def _over(self, ranges: Ranges, without: Sequence[Excluded] = ()) -> str | None:
        self.runs += 1

        def raw(channel: str) -> DataFrame:
            if not (some := _of(channel, ranges)):
                return self._engine.nothing(channel)
            starts = {at: end for at, (_, end) in self._channels.bounds(channel).items()}
            ends = {**starts, **{one.partition: one.end for one in some}}
            records = self._engine.batch(channel, ends, {**starts, **{one.partition: one.first for one in some}})
            for one in without:
                if one.channel == channel:
                    records = records.where((F.col("partition") != one.partition) | (F.col("offset") != one.offset))
            return records

        return self._probe.over(raw)

    def _entries(self, ranges: Ranges) -> list[Entry]:
        bounds = {one.partition: (one.first, one.end) for one in ranges}
        return list(scan(self._channels, ranges[0].channel, bounds=bounds)) if ranges else []


def offenders(records: Sequence[T], error: Callable[[Sequence[T]], str | None], most: int) -> Iterator[tuple[T, str]]:
    """The records that fail alone, in order, with their errors; a few more than `most` at most.

    `error` returns the error of some records; None when they succeed.
    """
    left, found = records, 0
    while left and found <= most and (why := error(left)) is not None:
        if found == _FEW and len(left) > most:
            # If records far apart all fail, the limit is reached: not each one is tried.
            apart = [error([one]) for one in (left[0], left[len(left) // 2], left[-1])]
            if None not in apart:
                yield from ((one, why) for one in left)
                return
        first, end, failed = 0, len(left), True
        while end - first > 1:
            middle = (first + end) // 2
            half = error(left[first:middle])
            # If the first half succeeds, the second half fails, or only both together.
            failed = half is not None
            first, end, why = (first, middle, half) if half is not None else (middle, end, why)
        alone = why if failed else error(left[first:end])
        if alone is None:
            return
        yield left[first], alone
        found += 1
        left = left[end:]


def last_needed(size: int, error: Callable[[int], str | None]) -> tuple[int, str] | None:
    """The size of the shortest first part that fails, and its error; None when the whole succeeds.

    `error` returns the error of the first records, given their number. A part fails if a shorter one fails. None also
    when the empty part fails: then no record is the cause.
    """
    if (why := error(size)) is None:
        return None
    succeeds, fails = 0, size
    while fails - succeeds > 1:
        middle = (succeeds + fails) // 2
        if (found := error(middle)) is None:
            succeeds = middle
        else:
            fails, why = middle, found
    return None if fails == 1 and error(0) is not None else (fails, why)


def _of(channel: str, ranges: Ranges) -> Ranges:
    return tuple(one for one in ranges if one.channel == channel)


def _size(ranges: Ranges) -> int:
    return sum(one.end - one.first for one in ranges)


def _pieces(ranges: Ranges, fails: Callable[[Ranges], bool] = lambda _: True) -> Iterator[Ranges]:
    """Split ranges into parts that fit into memory; of larger ranges, only the parts that fail."""
    if _size(ranges) <= _HELD:
        yield ranges
    elif fails(ranges):
        for half in _split(ranges, _size(ranges) // 2):
            yield from _pieces(half, fails)


def _split(ranges: Ranges, left: int) -> tuple[Ranges, Ranges]:
    """The first `left` offsets, and the rest."""
    first: list[Range] = []
    second: list[Range] = []
    for one in ranges:
        middle = min(one.first + left, one.end)
        left -= middle - one.first
        if middle > one.first:
            first.append(replace(one, end=middle))
        if middle < one.end:
            second.append(replace(one, first=middle))
    return tuple(first), tuple(second)

"""A query run as a batch over some records: does it fail with them?

The frame is built once. What its records are lies in files, which are written anew for each run: to build a frame takes
longer than to run it over a few records.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from penstock.analysis.binder import raw_table
from penstock.analysis.checkpoints.note import note_of
from penstock.analysis.engine import Engine
from penstock.analysis.frames import RAW, dead_letters, encoded
from penstock.analysis.query import Query, Shape
from penstock.analysis.supervision import is_transient, telling
from penstock.core.contracts import Entry

Raw = Callable[[str], DataFrame]
"""The raw records of a channel."""


@dataclass(frozen=True)
class Work:
    """What a query does with its records, as a batch."""

    name: str
    inputs: tuple[str, ...]
    into: str
    rows: Callable[[Engine, Raw], DataFrame]
    """The rows that it writes: key, value and headers."""


def work_of(query: Query) -> Work:
    def rows(engine: Engine, raw: Raw) -> DataFrame:
        note = note_of(engine.checkpoint(query.name))
        return encoded(engine.frame(query, raw), query, note.life, note.writer)

    return Work(query.name, query.inputs, query.into, rows)


def validation_of(shape: Shape, dead: str, name: str = "") -> Work:
    """What brings the records that do not fit a channel to its dead letters, by a query of this name."""
    return Work(
        name or f"{shape.channel}.dead", (shape.channel,), dead, lambda _, raw: dead_letters(raw(shape.channel), shape)
    )


class Probe:
    """Runs the work of a query over records, again and again. `folder` is one that Spark's tasks can read."""

    def __init__(self, engine: Engine, work: Work, limit: int | None, folder: Path) -> None:
        """`limit` is how many bytes a row of the result may have."""
        self._engine, self._work, self._limit, self._folder = engine, work, limit, folder
        self._largest: DataFrame | None = None

    def __enter__(self) -> "Probe":
        self._folder.mkdir(exist_ok=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def __call__(self, records: Mapping[str, Sequence[Entry]]) -> str | None:
        """What the query fails with over these records of its channels; None when it does not fail."""
        for channel in self._work.inputs:
            table = raw_table(records.get(channel, ()))
            with pa.ipc.new_file(str(self._file(channel)), table.schema) as file:
                file.write_batch(table)
        if self._largest is None:
            self._largest = _largest(self._work.rows(self._engine, self._records))
        # As a new query: the same one would take over what it has shuffled before.
        return self._error(self._largest.select("*"))

    def over(self, raw: Raw) -> str | None:
        """What it fails with over other records than those in memory."""
        return self._error(_largest(self._work.rows(self._engine, raw)))

    def _error(self, largest: DataFrame) -> str | None:
        try:
            size = largest.collect()[0][0]
        except (PySparkException, Py4JJavaError) as error:
            if is_transient(error):
                raise
            return telling(error)
        if self._limit is not None and size is not None and size > self._limit:
            return f"a row of its result has {size:,} bytes, and the channel {self._work.into} takes {self._limit:,}"
        return None

    def _records(self, channel: str) -> DataFrame:
        # One task: to start a Python worker takes longer than to read some thousand records.
        once = self._engine.spark.range(0, 1, 1, 1)
        return once.mapInArrow(partial(_read, str(self._file(channel))), RAW)

    def _file(self, channel: str) -> Path:
        return self._folder / f"{channel}.arrow"


def _read(file: str, once: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in once:
        with pa.ipc.open_file(file) as opened:
            yield opened.get_batch(0)


def _largest(rows: DataFrame) -> DataFrame:
    return rows.select(row_size().alias("size")).agg(F.max("size"))


_BATCH, _RECORD = 61, 4
"""What Kafka adds to a batch, and to a record in it beside the lengths of its parts."""


def row_size() -> Column:
    """Of how many bytes a row is, alone in a batch of Kafka's."""
    headers = F.aggregate("headers", F.lit(0), lambda total, one: total + _part(one["key"]) + _part(one["value"]))
    body = F.lit(_RECORD) + _part(F.col("key")) + _part(F.col("value")) + headers
    return F.lit(_BATCH) + _varint(body) + body


def _part(value: Column) -> Column:
    length = F.coalesce(F.octet_length(value), F.lit(0))
    return _varint(length) + length


def _varint(length: Column) -> Column:
    """How many bytes a length takes."""
    steps = F.lit(1)
    for bits in (6, 13, 20, 27):
        steps = steps + (length >= (1 << bits)).cast("int")
    return steps

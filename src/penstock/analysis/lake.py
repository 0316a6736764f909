"""Fill a lake with Spark: each record of a channel becomes a row of the table or a dead letter.

The table stores its offsets, so the query needs no checkpoint: it starts at these offsets. A batch writes Parquet
files, then dead letters. Then the table commits the files, the offsets and the totals together. An interrupted batch is
repeated from the offsets of the last commit.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple, Protocol
from uuid import uuid4

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructField, StructType

from penstock.analysis import validation
from penstock.analysis.checkpoints.batches import EXCLUDED_FILE, ends_of, on_disk
from penstock.analysis.checkpoints.note import Note
from penstock.analysis.dead_letters import DeadLetters
from penstock.analysis.engine import Engine
from penstock.analysis.frames import by_partition, columns_of, dead_letters, fits, header_value, parsed, schema_of
from penstock.analysis.query import Shape
from penstock.core.clock import Micros
from penstock.core.contracts import Offsets
from penstock.core.errors import Misconfigured

NUMBERED = (
    "_sender STRING, _epoch BIGINT, _seq BIGINT, _time TIMESTAMP, _partition INT NOT NULL, _offset BIGINT NOT NULL"
)
"""The columns beside the payload: the record's origin, partition and offset."""
KEYED = "_key STRING, _deleted BOOLEAN NOT NULL, _version BIGINT"
"""Further columns for a table or a result: the row's key, whether it is deleted, and its version."""
_INCOMING = "_incoming"
"""The folder in the table where Spark's tasks write. Readers ignore names with an underscore."""
_FITS = "_fits"


Frame = DataFrame
Batch = Callable[[DataFrame, Offsets], None]
"""Handles the records of a batch, given its end offsets."""


class Table(Protocol):
    """The part of the lake's table that is used here."""

    @property
    def path(self) -> str: ...

    def positions(self) -> Offsets: ...

    def add(self, files: Sequence[Path], reached: Offsets, refused: int) -> int: ...

    def append(self, rows: pa.Table, reached: Offsets, refused: int) -> int: ...


def columns(shape: Shape, keyed: bool) -> StructType:
    """The table's columns; Misconfigured when the schema has a reserved column."""
    payload = columns_of("value BINARY") if shape.ddl is None else schema_of(shape)
    added = columns_of(f"{NUMBERED}, {KEYED}" if keyed else NUMBERED)
    names = {name.lower() for name in added.names}
    for name in payload.names:
        if name.lower() in names:
            raise Misconfigured(
                f"the schema of {shape.channel}", f'"{name}" is a column of the lake', "rename the column"
            )
        names.add(name.lower())
    # A deleted row has no payload.
    fields = [StructField(one.name, validation.optional(one.dataType), one.nullable or keyed) for one in payload]
    return StructType([*fields, *added])


def records(raw: DataFrame, shape: Shape, keyed: bool, judged: bool) -> DataFrame:
    """All records of a channel as rows of its lake, with a column for whether each fits."""
    frame = parsed(raw, shape)
    own = [F.col("value")] if shape.ddl is None else validation.payload(schema_of(shape))
    whole = F.lit(True)
    for name in ("sender", "epoch", "seq", "time"):
        whole = whole & F.col(f"origin.{name}").isNotNull()
    values = {
        **{f"_{name}": F.when(whole, F.col(f"origin.{name}")) for name in ("sender", "epoch", "seq")},
        "_time": F.when(whole, F.timestamp_micros("origin.time")),
        "_partition": F.col("partition"),
        "_offset": F.col("offset"),
    }
    if keyed:
        version = header_value("version").try_cast("bigint")
        values |= {
            "_key": F.make_valid_utf8(F.col("key").cast("string")),
            "_deleted": F.col("value").isNull(),
            "_version": F.when(version.cast("string") == header_value("version"), version),
        }
    added = [value.alias(name) for name, value in values.items()]
    return frame.select(*own, *added, (fits(shape) if judged else F.lit(True)).alias(_FITS))


class Filled(NamedTuple):
    """The counts of a batch, and the time at the sender of its newest record."""

    taken: int
    rows: int
    refused: int
    newest: Micros | None


class Filling:
    """Fills a table, batch by batch."""

    def __init__(
        self,
        table: Table,
        shape: Shape,
        keyed: bool,
        dead: DeadLetters | None,
        selected: Callable[[DataFrame], DataFrame] = lambda raw: raw,
        left_out: Column | None = None,
    ) -> None:
        """`dead` gets records that do not fit; None: all fit. `selected` filters the records to load.

        `left_out` are excluded records: they have dead letters, and are counted as refused.
        """
        self._table, self._shape, self._keyed, self._letters = table, shape, keyed, dead
        self._selected, self._left_out = selected, F.lit(False) if left_out is None else left_out
        self._first = True

    def __call__(self, batch: DataFrame, reached: Offsets) -> Filled:
        """Write a batch; `reached` are its end offsets."""
        raw = self._selected(batch)
        if self._first and (stands := self._table.positions()):
            raw = raw.where(F.col("offset") >= by_partition(stands))
        observed = Observation()
        kept = raw.withColumns({name: F.when(~self._left_out, F.col(name)) for name in ("key", "value")})
        counted = records(kept, self._shape, self._keyed, self._letters is not None).observe(
            observed,
            F.count(F.lit(1)).alias("taken"),
            F.count_if(~F.col(_FITS)).alias("refused"),
            F.max(F.unix_micros("_time")).alias("newest"),
        )
        rows = counted.where(_FITS).drop(_FITS)
        files = None if "://" in self._table.path else self._written(rows)
        arrow = rows.toArrow() if files is None else None
        refused = observed.get["refused"]
        if refused and self._letters is not None:
            # Before the commit that counts these records.
            dead = dead_letters(raw.where(~self._left_out), self._shape)
            self._letters.write(row.asDict() for row in dead.toLocalIterator())
        new = self._table.append(arrow, reached, refused) if files is None else self._table.add(files, reached, refused)
        self._first = False
        return Filled(observed.get["taken"], new, refused, observed.get["newest"])

    def _written(self, rows: DataFrame) -> list[Path]:
        """Write the rows by Spark's tasks into the table's folder, not yet in any version of the table."""
        root = Path(self._table.path)
        incoming = root / _INCOMING
        rows.write.mode("overwrite").parquet(str(incoming), compression="snappy")
        written = sorted(incoming.glob("*.parquet"))
        files = [file.rename(root / f"part-{uuid4()}.snappy.parquet") for file in written]
        shutil.rmtree(incoming, ignore_errors=True)
        return files


def fill(engine: Engine, name: str, channel: str, start: Offsets, batch: Batch) -> StreamingQuery:
    """Start the query that passes the records of a channel to `batch`, from these offsets.

    It starts with a new checkpoint each time, because the table stores the offsets. Only the list of excluded
    records is kept.
    """
    folder = on_disk(engine.checkpoint(name)) or Path(mkdtemp(prefix="penstock-"))
    for old in folder.iterdir() if folder.is_dir() else ():
        if old.is_dir():
            shutil.rmtree(old)
        elif old.name != EXCLUDED_FILE:
            old.unlink()
    Note(since={channel: start}).write(str(folder))

    def each(frame: DataFrame, number: int) -> None:
        batch(frame, ends_of(str(folder), number, channel))

    writer = engine.stream(channel, start).writeStream.foreachBatch(each).queryName(name)
    every = f"{int(engine.settings.every.total_seconds() * 1000)} milliseconds"
    return writer.option("checkpointLocation", str(folder)).trigger(processingTime=every).start()

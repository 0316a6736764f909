"""The description of a query, without Spark: names, a key, and a pure function of frames."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


Json = Literal["strict", "lenient"]
"""How the payloads of a channel are parsed: by RFC 8259, or as Spark parses JSON by default."""

NUMBER, PAYLOAD = "number", "payload"
"""Values of `unique` beside the columns of the payload."""


TABLES = (".csv", ".jsonl", ".ndjson", ".json", ".parquet")
"""The file extensions of static tables."""


class Mode(StrEnum):
    AUTO = "auto"
    REAL_TIME = "real-time"
    MICRO_BATCH = "micro-batch"


class Emit(StrEnum):
    """When a query writes rows."""

    CHANGE = "change"
    """On each change."""
    FINAL = "final"
    """Once, when the watermark has passed them and they cannot change."""


class Late(StrEnum):
    """What happens to records behind the watermark. They are always counted."""

    DROP = "drop"
    DEAD = "dead letters"
    """They are written to the dead letters of their channel, and can be redriven."""
    UPDATE = "update"
    """They still change their row, within `lateness`."""


@dataclass(frozen=True)
class Shape:
    """The shape of a channel's records for a query."""

    channel: str
    ddl: str | None = None
    """The columns of the payload, as DDL; None: the payload stays text in the column `value`."""
    event_time: str | None = None
    """A SQL expression over the columns; None: the time at the sender."""
    ahead: timedelta = timedelta(hours=1)
    """A record with an event time further in the future is refused: it would make all others late."""
    unique: str | None = None
    """The deduplication key of a record: its number, its payload, or a column; None: no deduplication."""
    table: bool = False
    """Whether the channel is a table: the last record of a key is its row, and a record without a value deletes it."""
    json: Json = "strict"


@dataclass(frozen=True)
class Static:
    """A small table that is read completely, and again every `refresh`."""

    name: str
    rows: "str | Sequence[Mapping[str, Any]] | Callable[[], Iterable[Mapping[str, Any]]]"
    """The path of a file, the rows, or a function that returns them."""
    ddl: str
    refresh: timedelta | None = None
    folder: Path = Path()
    """The base of a relative path."""


@dataclass(frozen=True)
class Query:
    name: str
    inputs: tuple[str, ...]
    into: str
    key: tuple[str, ...]
    build: "Callable[..., DataFrame] | str"
    """A function of one frame for each input and static table, or a SQL text over views of their names."""
    mode: Mode = Mode.AUTO
    watermark: timedelta | None = None
    every: timedelta | None = None
    where: "str | Callable[[DataFrame], Column] | None" = None
    """A condition on its input records; others are counted as filtered."""
    doc: str = field(default="", compare=False)
    emit: Emit = Emit.CHANGE
    late: Late = Late.DROP
    lateness: timedelta | None = None
    """How long after the watermark a record may still change its row."""
    file: str | None = field(default=None, compare=False)
    """The file of its SQL, for error texts."""
    statics: tuple[str, ...] = ()
    """The static tables that it reads."""
    once: bool = False
    """No row may be written twice: a row that could be a copy is not written."""

    @property
    def max_lateness(self) -> timedelta | None:
        """How much older than the newest record a record may be: watermark plus lateness."""
        return None if self.watermark is None else self.watermark + (self.lateness or timedelta(0))

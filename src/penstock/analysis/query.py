"""What a query is, before Spark comes into it: names, a key, and a pure function of frames."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


Json = Literal["strict", "lenient"]
"""How the payloads of a channel are read: as RFC 8259 says, or as Spark reads JSON by default."""

NUMBER, PAYLOAD = "number", "payload"
"""By what a record is told from its duplicate, beside the columns of its payload."""


TABLES = (".csv", ".jsonl", ".ndjson", ".json", ".parquet")
"""How the names of files end that a static table can be read from."""


class Mode(StrEnum):
    AUTO = "auto"
    REAL_TIME = "real-time"
    MICRO_BATCH = "micro-batch"


class Emit(StrEnum):
    """When a query writes the rows of its result."""

    CHANGE = "change"
    """Whenever they change."""
    FINAL = "final"
    """Once, when no record can change them any more: when the watermark has passed them."""


class Late(StrEnum):
    """What becomes of records that come after the watermark has passed them. They are counted in any case."""

    DROP = "drop"
    DEAD = "dead letters"
    """They lie in the dead letters of their channel, and can be redriven."""
    UPDATE = "update"
    """They still change their row, for as long as `lateness` says."""


@dataclass(frozen=True)
class Shape:
    """What the records of a channel look like to a query."""

    channel: str
    ddl: str | None = None
    """The columns of the payload, as DDL; None: the payload stays text in the column `value`."""
    event_time: str | None = None
    """A SQL expression over the columns; None: the time at the sender."""
    ahead: timedelta = timedelta(hours=1)
    """A record whose event time lies further in the future than this is refused: it would make all others late."""
    unique: str | None = None
    """What tells a record from its duplicate: its number, its payload, or a column of it; None: nothing does."""
    table: bool = False
    """The channel is a table: its last record of a key is the row of that key, and one without a value deletes it."""
    json: Json = "strict"


@dataclass(frozen=True)
class Static:
    """A small table that does not flow: read whole, and again every so often if that is said."""

    name: str
    rows: "str | Sequence[Mapping[str, Any]] | Callable[[], Iterable[Mapping[str, Any]]]"
    """The path of a file, the rows themselves, or a function that gives them."""
    ddl: str
    refresh: timedelta | None = None
    folder: Path = Path()
    """Where a relative path begins."""


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
    """Which records it wants; the others are counted as filtered."""
    doc: str = field(default="", compare=False)
    emit: Emit = Emit.CHANGE
    late: Late = Late.DROP
    lateness: timedelta | None = None
    """How long after the watermark a record may still change its row."""
    file: str | None = field(default=None, compare=False)
    """Where its SQL was read from, for people."""
    statics: tuple[str, ...] = ()
    """The static tables that it names beside its inputs."""
    once: bool = False
    """No row may be written twice: what cannot be told from its copy is rather not written."""

    @property
    def patience(self) -> timedelta | None:
        """How much later than the newest a record may be, before its row is given up."""
        return None if self.watermark is None else self.watermark + (self.lateness or timedelta(0))

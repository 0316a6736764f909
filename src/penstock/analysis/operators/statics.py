"""Static tables: small tables that are read completely from a file, a list or a function, and refreshed.

They are read here and not by Spark: a Spark job would need a free slot, and an error must name the line of a bad row.
For Spark they are a local relation, which is part of the plan and costs nothing in a batch.
"""

import base64
import csv
import json
import logging
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pyarrow.parquet as pq  # type: ignore[import-untyped]  # it ships no types
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    FractionalType,
    IntegralType,
    MapType,
    StructField,
    StructType,
)

from penstock.analysis import validation
from penstock.analysis.frames import columns_of, description, line_in
from penstock.analysis.query import Static
from penstock.core.clock import Clock
from penstock.core.errors import Misconfigured

log = logging.getLogger(__name__)

_TEXTS = pa.schema([("place", pa.string()), ("value", pa.string())])
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
_BROKEN = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)

PlacedRow = tuple[str, Any]
"""The place of a row, and the row."""


@dataclass(frozen=True)
class Table:
    """The rows of a static table. Two tables are equal when they hold the same rows."""

    rows: tuple[bytes, ...]
    frame: DataFrame = field(compare=False, repr=False)


def table(spark: SparkSession, static: Static, before: Table | None = None) -> Table:
    """Read a static table; Misconfigured with the place of a row that does not fit.

    Returns `before` if it holds the same rows.
    """
    columns = _columns(static)
    found = [(location, _dumped(static, columns, location, row)) for location, row in _read(static, columns)]
    rows = tuple(sorted(text for _, text in found))
    if before is not None and before.rows == rows:
        return before
    return Table(rows, _frame(spark, static, columns, found))


class Watch:
    """Refreshes tables, each at its interval, in a thread: a function may take long."""

    def __init__(
        self,
        statics: Iterable[Static],
        tables: Mapping[str, Table],
        read: Callable[[Static, Table], Table],
        clock: Clock,
    ) -> None:
        """`tables`: the tables at the start, by name. `read` gets a table as last read."""
        self._every = [(one, one.refresh.total_seconds()) for one in statics if one.refresh is not None]
        self._tables = dict(tables)
        self._read = read
        self._clock = clock
        self._due = {one.name: clock.elapsed() + every for one, every in self._every}
        self._said: dict[str, str] = {}
        self._changed: dict[str, Table] = {}
        self._lock = threading.Lock()

    def run(self, stop: threading.Event, pause: float = 0.1) -> None:
        while self._due and not stop.wait(pause):
            self.look()

    def look(self) -> None:
        """Read the tables that are due. A table that cannot be read stays unchanged, with a warning."""
        for static, every in self._every:
            if self._clock.elapsed() < self._due[static.name]:
                continue
            try:
                self._found(static.name, self._read(static, self._tables[static.name]))
            except Exception as error:  # noqa: BLE001 - the other tables must still be read
                message = (
                    str(error) if isinstance(error, Misconfigured) else f"{type(error).__name__}: {description(error)}"
                )
                if message != self._said.get(static.name):
                    log.warning("the table %s is not refreshed: %s", static.name, message)
                self._said[static.name] = message
            self._due[static.name] = self._clock.elapsed() + every

    def _found(self, name: str, read: Table) -> None:
        self._said.pop(name, None)
        if read != self._tables[name]:
            log.info("the table %s has changed: it has %d rows now", name, len(read.rows))
            self._tables[name] = read
            with self._lock:
                self._changed[name] = read

    def changed(self) -> dict[str, Table]:
        """The tables that have changed since the last call."""
        with self._lock:
            changed, self._changed = self._changed, {}
        return changed


def _columns(static: Static) -> StructType:
    try:
        columns = columns_of(static.ddl)
    except PySparkException as error:
        raise Misconfigured(f"table {static.name}", f"its schema cannot be read: {description(error)}") from None
    if validation.CORRUPT in columns.names:
        raise Misconfigured(f"table {static.name}", f'"{validation.CORRUPT}" is reserved', "rename the column")
    return columns


def _frame(spark: SparkSession, static: Static, columns: StructType, found: Sequence[tuple[str, bytes]]) -> DataFrame:
    """The rows as a local relation, parsed as payloads are; Misconfigured when a row does not fit."""
    rows = [{"place": location, "value": text.decode()} for location, text in found]
    texts = spark.createDataFrame(pa.Table.from_pylist(rows, _TEXTS))
    parsed = _evaluated(texts.select("place", "value", validation.parsed(columns, "strict").alias("doc")))
    wrong = validation.first_reason(validation.objections(F.col("doc"), columns, "strict"))
    # A local relation needs no job.
    for row in _evaluated(parsed.select("place", wrong.alias("wrong")).where("wrong IS NOT NULL")).take(1):
        raise Misconfigured(row["place"], row["wrong"], f"its columns are {static.ddl}")
    return _evaluated(parsed.select(*validation.payload(columns)))


def _evaluated(frame: DataFrame) -> DataFrame:
    """Evaluate a local frame once by Spark's optimizer, instead of with each batch."""
    spark = frame.sparkSession
    jvm = spark._jvm
    assert jvm is not None
    plan = frame._jdf.queryExecution().optimizedPlan()
    return DataFrame(jvm.org.apache.spark.sql.classic.Dataset.ofRows(spark._jsparkSession, plan), spark)


def _dumped(static: Static, columns: StructType, location: str, row: Any) -> bytes:
    """The columns of a row as JSON."""
    if not isinstance(row, Mapping):
        raise Misconfigured(
            location, f"it is a {type(row).__name__}", "a row must be a dict of column names and values"
        )
    values = {name: row.get(name) for name in columns.names}
    try:
        if wild := [name for name, value in values.items() if not _finite(value)]:
            # JSON cannot represent them.
            raise Misconfigured(location, f'"{wild[0]}" holds NaN or an infinite number', "use null, or leave it out")
        return orjson.dumps(values, default=_plain, option=orjson.OPT_SORT_KEYS)
    except (TypeError, RecursionError) as error:
        raise Misconfigured(
            location, f"it cannot be written as JSON: {error}", f"its columns are {static.ddl}"
        ) from None


def _finite(value: Any) -> bool:
    """Whether every number in a value is finite."""
    if isinstance(value, float):
        return math.isfinite(value)
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return all(map(_finite, inner))


def _plain(value: Any) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _read(static: Static, columns: StructType) -> Iterator[PlacedRow]:
    if isinstance(static.rows, str):
        yield from _file(static, columns, static.folder / static.rows)
    else:
        found = _called(static, static.rows) if callable(static.rows) else static.rows
        yield from ((f"table {static.name}, row {number}", row) for number, row in enumerate(found, start=1))


def _called(static: Static, function: Callable[[], Any]) -> list[Any]:
    """Call the user's function; errors become Misconfigured with file and line."""
    try:
        return list(function())
    except Exception as error:
        location = line_in(function, error, f"table {static.name}")
        raise Misconfigured(location, f"{type(error).__name__}: {error}") from error


def _file(static: Static, columns: StructType, path: Path) -> Iterator[PlacedRow]:
    reading = {".csv": _csv, ".parquet": _parquet}.get(path.suffix, _json_lines)
    try:
        yield from reading(path, columns)
    except FileNotFoundError:
        fix = f"put it beside the pipeline: {path.absolute()}"
        raise Misconfigured(f"table {static.name}", f"there is no file {static.rows}", fix) from None
    except (OSError, UnicodeDecodeError, pa.ArrowException, csv.Error) as error:
        raise Misconfigured(f"table {static.name}", f"{static.rows} cannot be read: {error}") from error


def _csv(path: Path, columns: StructType) -> Iterator[PlacedRow]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, strict=True)
        if absent := [name for name in columns.names if name not in (rows.fieldnames or ())]:
            has = ", ".join(rows.fieldnames or ()) or "nothing"
            raise Misconfigured(
                f"{path.name}:1",
                f"it has no column {' and '.join(absent)}",
                f"add it to the header line, which has {has}",
            )
        for row in rows:
            location = f"{path.name}:{rows.line_num}"
            if None in row or None in row.values():
                raise Misconfigured(
                    location, "it has more or fewer fields than the first line", "quote what holds a comma"
                )
            yield location, {one.name: _cell(location, one, row[one.name]) for one in columns.fields}


def _cell(location: str, column: StructField, text: str) -> Any:
    """Parse a field of a CSV file: an empty field is null; types other than text are written as in JSON."""
    if text == "":
        return None
    kind: DataType = column.dataType
    try:
        if isinstance(kind, BooleanType):
            return {"true": True, "false": False}[text.strip().lower()]
        if isinstance(kind, IntegralType):
            return int(_spelled(_WHOLE, text))
        if isinstance(kind, FractionalType):
            number = _spelled(_BROKEN, text)
            return float(number) if kind.typeName() != "decimal" else number
        if isinstance(kind, StructType | ArrayType | MapType):
            return json.loads(text)
    except (ValueError, KeyError, RecursionError):
        message = f'"{column.name}" is {text[:60]!r}, and not {kind.simpleString()[:60]}'
        raise Misconfigured(location, message, "correct it, or leave the field empty") from None
    return text


def _spelled(number: re.Pattern[str], text: str) -> str:
    """A number in the common spelling: Python also accepts 1_000 and nan."""
    if number.fullmatch(bare := text.strip()) is None:
        raise ValueError(text)
    return bare


def _json_lines(path: Path, columns: StructType) -> Iterator[PlacedRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                location = f"{path.name}:{number}"
                try:
                    yield location, orjson.loads(line)
                except orjson.JSONDecodeError as error:
                    raise Misconfigured(
                        location, f"it is not JSON: {error}", "write a JSON object in each line"
                    ) from None


def _parquet(path: Path, columns: StructType) -> Iterator[PlacedRow]:
    there = pq.read_schema(path).names
    if absent := [name for name in columns.names if name not in there]:
        raise Misconfigured(path.name, f"it has no column {' and '.join(absent)}", f"it has {', '.join(there)}")
    try:
        found = pq.read_table(path, columns=columns.names).to_pylist(maps_as_pydicts="strict")
    except KeyError as error:
        raise Misconfigured(path.name, f"a map in it has a key twice: {error}", "leave one of them") from None
    yield from ((f"{path.name}, row {number}", row) for number, row in enumerate(found, start=1))

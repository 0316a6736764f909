"""Frames from rows and rows from frames: a query is a function, and can be tested as one.

def test_guests_count_as_people(spark):
    rsvps = frame(spark, app.describe().channels["rsvps"], {"response": "yes", "guests": 2, "country": "nl"})
    assert rows(answer(app, "people_by_country", rsvps), "country", "people") == [("nl", 3)]
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import orjson
from pyspark.sql import DataFrame, SparkSession

from penstock.analysis.frames import RAW, built, dead_letters, typed, wanted
from penstock.analysis.operators.statics import table
from penstock.analysis.query import Shape, Static
from penstock.core.clock import Micros
from penstock.core.errors import Misconfigured, Refused
from penstock.core.record import Origin
from penstock.pipeline.description import Channel
from penstock.pipeline.pipeline import Pipeline

BEGIN: Micros = 1_700_000_000_000_000
"""The time of the first row that says no other; each further one is a second later."""

# Nobody tells when it arrived, so that its event time may be any.
_ARRIVED = datetime.fromtimestamp(0, UTC)


def frame(spark: SparkSession, shape: Channel | Shape | str, *rows: Mapping[str, Any]) -> DataFrame:
    """The rows as a query would see them in a channel: their columns, `origin` and `event_time`.

    `shape` is a channel of a pipeline, or the columns of one as DDL. A row is a payload; it may hold an `Origin` under
    "origin", and is the next record of the sender "test" otherwise. Refused when a row does not fit its channel.
    """
    columns = _shape(shape)
    records = [_raw(columns, seq, row) for seq, row in enumerate(rows, start=1)]
    raw = spark.createDataFrame(records, RAW)
    fitting = typed(raw, columns)
    if fitting.count() < len(rows):
        refused = dead_letters(raw, columns).collect()[0]
        headers = {header["key"]: bytes(header["value"]).decode() for header in refused["headers"]}
        offset = int(headers["place"].rpartition(":")[2])
        raise Refused(f"row {offset + 1} of {columns.channel}", headers["reason"])
    return fitting


def answer(
    pipeline: Pipeline, query: str, *frames: DataFrame, **tables: DataFrame | Sequence[Mapping[str, Any]]
) -> DataFrame:
    """What a query of a pipeline makes of these frames: first its `where`, then its function or SQL.

    Static tables are given by name, as frames or rows; one that is not is read as it was declared.
    """
    description = pipeline.describe()
    declared = description.query(query)
    if unknown := [name for name in tables if name not in declared.statics]:
        fix = f"those that it names: {', '.join(declared.statics) or 'none'}"
        raise Misconfigured(f"query {query}", f'it names no static table "{unknown[0]}"', fix)
    spark = frames[0].sparkSession
    statics = {one.name: one for one in description.statics if one.name in declared.statics}
    static = {name: _table(spark, one, tables.get(name)) for name, one in statics.items()}
    return built(declared, [wanted(frame, declared) for frame in frames], static)


def _table(spark: SparkSession, static: Static, columns: DataFrame | Sequence[Mapping[str, Any]] | None) -> DataFrame:
    if isinstance(columns, DataFrame):
        return columns
    return table(spark, static if columns is None else replace(static, rows=columns)).frame


def rows(frame: DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    """What a frame holds, sorted: all columns, or these, each a name or a SQL expression."""
    selected = frame.selectExpr(*columns) if columns else frame
    return sorted((tuple(row) for row in selected.collect()), key=_order)


def _shape(shape: Channel | Shape | str) -> Shape:
    if isinstance(shape, str):
        return Shape("test", shape)
    if isinstance(shape, Shape):
        return shape
    if shape.result_of is not None:
        raise Misconfigured(
            f"channel {shape.name}", f"its columns follow from the query {shape.result_of}", "give them as DDL"
        )
    return shape.shape


def _raw(shape: Shape, seq: int, row: Mapping[str, Any]) -> tuple[Any, ...]:
    payload = {name: value for name, value in row.items() if name != "origin"}
    value = str(payload["value"]).encode() if shape.ddl is None else orjson.dumps(payload, default=str)
    origin = row.get("origin", Origin("test", 1, seq, BEGIN + (seq - 1) * 1_000_000))
    return None, value, shape.channel, 0, seq - 1, _ARRIVED, 0, origin.headers()


def _order(value: Any) -> tuple[int, Any]:
    """Nulls first; within rows, lists and maps, too."""
    if value is None:
        return 0, 0
    if isinstance(value, dict):
        return 1, sorted((_order(key), _order(inner)) for key, inner in value.items())
    return 1, [_order(inner) for inner in value] if isinstance(value, list | tuple) else value

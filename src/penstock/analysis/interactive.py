"""An interactive query: its rows are passed to a callback, and nothing is stored."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import orjson
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, StructType

from penstock.analysis.engine import Engine
from penstock.analysis.frames import ADDED, SPARK_ERRORS, counts
from penstock.analysis.launch import failed
from penstock.analysis.plans import accepts_update, analyzed, each, grouped, kind_of, plainly, refused
from penstock.analysis.query import Query
from penstock.core.contracts import Offsets
from penstock.core.errors import Misconfigured, Unavailable

_LEAST, _MOST = -(2**63), 2**64 - 1


def exactly(text: str) -> Any:
    """Parse JSON. A number that JSON readers would round, such as a long decimal, becomes a string."""
    return json.loads(text, parse_int=_whole, parse_float=_fraction)


def _whole(text: str) -> int | str:
    # Python refuses very long integers; Spark's have at most 38 digits.
    number = Decimal(text)
    return int(text) if _LEAST <= number <= _MOST else text


def _fraction(text: str) -> float | str:
    number = float(text)
    return number if Decimal(text) == Decimal(repr(number)) else text


EVERY = "1 second"
_WITHOUT_DATA = "spark.sql.streaming.noDataMicroBatches.enabled"
_PASSED = {"Project", "SubqueryAlias", "Filter", "EventTimeWatermark", "CollectMetrics", "View", "Sort"}


@dataclass(frozen=True)
class Result:
    """The result of an interactive query: its columns, and its output mode."""

    frame: DataFrame
    columns: tuple[str, ...]
    keys: tuple[str, ...]
    """The grouping columns of an aggregation, whose rows change."""
    output: str
    """Spark's output mode."""

    @property
    def whole(self) -> bool:
        """Whether each batch is the whole result."""
        return self.output == "complete"


def result(engine: Engine, query: Query, start: Mapping[str, Offsets]) -> Result:
    """Plan a query over channels from these offsets; Misconfigured when it cannot run."""
    frame = engine.frame(query, lambda name: engine.stream(name, start[name]))
    columns = distinct(frame.columns)
    keys = _keys(analyzed(frame))
    named = tuple(column for column, key in zip(columns, keys, strict=True) if key)
    return Result(frame.toDF(*columns), columns, named, _output(frame))


class InteractiveQuery:
    """A running query: `take` gets its rows as JSON objects, batch by batch."""

    def __init__(
        self, found: Result, channels: Sequence[str], checkpoint: str, take: Callable[[Iterator[str]], None]
    ) -> None:
        """Start it; Misconfigured when Spark refuses."""
        self._channels = channels
        self._last_batch = -1
        self.reads = False
        """Whether it has looked for records."""
        self.refused = 0
        """How many records did not fit their schema."""
        self.late = 0
        """How many rows Spark has dropped as late."""
        fields = [F.col(f"`{name.replace('`', '``')}`") for name in found.columns]

        def write(batch: DataFrame, _: int) -> None:
            # Partition by partition: a batch may be larger than this process's memory.
            take(row[0] for row in batch.toLocalIterator())

        try:
            lines = found.frame.select(F.to_json(F.struct(*fields), {"ignoreNullFields": "false"}))
            writer = lines.writeStream.queryName("SQL").foreachBatch(write).outputMode(found.output)
            writer = writer.option("checkpointLocation", checkpoint).trigger(processingTime=EVERY)
            # A row may become final without another record, because the last batch has moved the watermark.
            found.frame.sparkSession.conf.set(_WITHOUT_DATA, str(found.output == "append").lower())
            self._query = writer.start()
        except SPARK_ERRORS as error:
            raise Misconfigured("query SQL", f"Spark cannot run it: {plainly(error)}") from None

    def look(self) -> Unavailable | None:
        """Update the counts from new batches; return why the query has ended, if it has."""
        self.reads = self.reads or self._query.status["message"].startswith("Waiting") or self._last_batch >= 0
        for batch in self._query.recentProgress:
            if batch.batchId > self._last_batch and batch.numInputRows:
                self._last_batch = batch.batchId
                unique = [counts(batch.observedMetrics, channel) for channel in self._channels]
                self.refused += sum(one["refused"] for one in unique if one)
                self.late += sum(operator.numRowsDroppedByWatermark for operator in batch.stateOperators)
        return failed([self._query])

    def stop(self) -> None:
        self._query.stop()


def inferred(spark: SparkSession, values: Sequence[bytes | None]) -> str | None:
    """The schema of these payloads as DDL; None when most of them are not JSON objects."""
    objects = [value for value in values if value is not None and _is_object(value)]
    if not objects or 2 * len(objects) < len(values):
        return None
    text = (b"[" + b",".join(objects) + b"]").decode()
    try:
        row = spark.range(1).select(F.schema_of_json(F.lit(text)).alias("ddl")).first()
    except SPARK_ERRORS:
        return None  # Nested too deeply for Spark.
    assert row is not None
    listed = spark.createDataFrame([], f"x {row['ddl']}").schema["x"].dataType
    assert isinstance(listed, ArrayType)
    assert isinstance(listed.elementType, StructType)
    # Spark's names are case-insensitive. Some names are reserved.
    fields = {field.name.lower(): field for field in reversed(listed.elementType.fields)}
    kept = [field for name, field in reversed(fields.items()) if name not in _OURS]
    return StructType(kept).toDDL() if kept else None


_OURS = (*ADDED, "_corrupt")


def _is_object(value: bytes) -> bool:
    try:
        return isinstance(orjson.loads(value), dict)
    except orjson.JSONDecodeError:
        return False


def _output(frame: DataFrame) -> str:
    """The first output mode that Spark accepts: update, append, complete."""
    if accepts_update(frame):
        return "update"
    if (against := refused(frame, "Append")) is None:
        return "append"
    if refused(frame, "Complete") is None:
        return "complete"
    if "without watermark" in against:
        problem = "it needs a watermark: without one, its rows are never final"
        raise Misconfigured("query SQL", problem, 'set one: --watermark "10 seconds"')
    raise Misconfigured("query SQL", f"Spark cannot run it over streams: {refused(frame, 'Update')}")


def distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Make column names unique with numbers (`max`, `max` as `max`, `max_2`), so that a row is a JSON object."""
    found: list[str] = []
    for name in names:
        number, unique = 2, name
        while unique in found:
            unique, number = f"{name}_{number}", number + 1
        found.append(unique)
    return tuple(found)


def _keys(plan: Any) -> list[bool]:
    """Which columns are grouping columns; all False without an aggregation."""
    above: list[dict[int, int]] = []
    output = _ids(each(plan.output()))
    while kind_of(plan) in _PASSED:
        if kind_of(plan) == "Project":
            above.append(dict(_passed_on(plan.projectList())))
        plan = plan.children().apply(0)
    keys = {one for held in grouped(plan) for one in _ids(held)} if kind_of(plan) == "Aggregate" else set()
    for passed in reversed(above):
        keys |= {new for new, old in passed.items() if old in keys}
    return [one in keys for one in output]


def _passed_on(projected: Any) -> Iterator[tuple[int, int]]:
    """The ids of columns that a projection only renames: new and old."""
    for expression in each(projected):
        if kind_of(expression) == "Alias" and kind_of(expression.child()) == "AttributeReference":
            yield int(expression.exprId().id()), int(expression.child().exprId().id())


def _ids(named: Iterable[Any]) -> list[int]:
    return [int(one.exprId().id()) for one in named]

"""The mode of a query, by a trial with Spark's planner without a broker; and the slots that queries need."""

import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock.analysis.frames import RAW, description
from penstock.analysis.plans import analyzed
from penstock.analysis.query import Emit, Mode, Query
from penstock.analysis.supervision import is_transient
from penstock.core.errors import Misconfigured

_TIMEOUT = 60.0


@dataclass(frozen=True)
class Verdict:
    """The mode of a query, and the reason for `penstock plan`."""

    mode: Mode
    why: str


def decide(query: Query, objection: str | None, locations: int) -> Verdict:
    """The mode of a query, by Spark's objection to real time and the free real-time slots."""
    if query.mode is Mode.MICRO_BATCH:
        return Verdict(Mode.MICRO_BATCH, "set by mode=")
    if query.mode is Mode.REAL_TIME:
        return Verdict(Mode.REAL_TIME, "set by mode=" + (f", although Spark refuses: {objection}" if objection else ""))
    if query.every is not None:
        return Verdict(Mode.MICRO_BATCH, "set by every=")
    if objection:
        return Verdict(Mode.MICRO_BATCH, f"no real time: {objection}")
    if locations < 1:
        why = "Spark allows real time, but other queries use the slots ([spark] real_time_queries)"
        return Verdict(Mode.MICRO_BATCH, why)
    return Verdict(Mode.REAL_TIME, "Spark allows it, and a real-time slot is free")


def objection(build: Callable[[], DataFrame]) -> str | None:
    """Spark's objection to real time; None if it accepts.

    `build` uses `empty_stream`, Spark's in-memory source of real-time streams: so the planner does the same as for
    Kafka.
    """
    folder = tempfile.mkdtemp(prefix="penstock-rehearsal-")
    try:
        frame = build()
        writer = frame.writeStream.format("console").outputMode("update")
        writer = writer.trigger(realTime="5 seconds")  # type: ignore[call-overload]  # unknown to PySpark's overloads
        query = writer.option("checkpointLocation", folder).start()
        try:
            return refusal(frame.sparkSession, query)
        finally:
            query.stop()
    except (PySparkException, Py4JJavaError) as error:
        return plainly(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def refusal(spark: SparkSession, query: StreamingQuery) -> str | None:
    """Wait until a real-time query is planned; return Spark's objection, or None when its job runs."""
    until = time.monotonic() + _TIMEOUT
    jobs = spark.sparkContext.statusTracker()
    while not (planned := jobs.getJobIdsForGroup(str(query.runId))) and query.isActive and time.monotonic() < until:
        time.sleep(0.02)
    error = query.exception()
    # Neither a failure of the running job nor a transient error is an objection to the mode.
    return plainly(error) if error and not planned and not is_transient(error) else None


def accepts_update(frame: DataFrame) -> bool:
    """Whether the result can be written on each change; otherwise rows are written once, when they are final."""
    return refused(frame, "Update") is None


def refused(frame: DataFrame, output: str) -> str | None:
    """Spark's objection to an output mode (Update, Append or Complete); None if it accepts."""
    jvm = frame.sparkSession._jvm
    assert jvm is not None
    checker = getattr(jvm, "org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker$")
    mode = getattr(jvm.org.apache.spark.sql.streaming.OutputMode, output)()
    try:
        getattr(checker, "MODULE$").checkForStreaming(analyzed(frame), mode)
    except (PySparkException, Py4JJavaError) as error:
        return plainly(error)
    return None


_ONLY = "runs in micro-batches only"
_OPERATORS = {
    "StreamingSymmetricHashJoin": "a join of two streams",
    "StreamingDeduplicateWithinWatermark": "dropDuplicatesWithinWatermark()",
    "SessionWindowStateStoreSave": "a session window",
    "ArrowEvalPython": "a Python function",
    "BatchEvalPython": "a Python function",
    "MapInArrow": "mapInArrow()",
    "MapInPandas": "mapInPandas()",
    "FlatMapGroupsInArrow": "applyInArrow()",
    "FlatMapGroupsInPandas": "applyInPandas()",
    "FlatMapGroupsInPandasWithState": "applyInPandasWithState()",
    "TransformWithStateInPySpark": "state in Python",
    "ArrowAggregatePython": "an aggregation in Python",
    "AggregateInPandas": "an aggregation in Python",
    "StreamingGlobalLimit": "LIMIT",
    "BroadcastNestedLoopJoin": "a join without equal columns",
    "CartesianProduct": "a join without equal columns",
    "SortMergeJoin": "a join with a table that is too large to be sent to every task",
    "ShuffledHashJoin": "a join with a table that is too large to be sent to every task",
}
"""Operators that Spark refuses in real time, as users know them."""
_SENTENCES = {
    "session window streaming aggregations": "sessions are written when they are final",
    "stateful operators .* before a union": "what is aggregated before a union runs in micro-batches only",
    "union on two or more identical": "it reads one channel twice, which runs in micro-batches only",
    "possible 'correctness' issue": (
        "it aggregates what is aggregated already, which takes a watermark and rows that come when they are final"
    ),
    "Distinct aggregations": "distinct values cannot be counted over a stream; approx_count_distinct() can",
    "Sorting is not supported": "the rows of a stream, which has no end, cannot be sorted",
    "Limits are not supported": "some rows of a stream cannot be kept up to date; leave LIMIT out",
    "Window function is not supported": "a function over a window of rows needs all rows; group by window() instead",
}
"""Short texts for errors of Spark, by a part of their text."""


def plainly(error: Exception) -> str:
    """Spark's objection as a sentence for users; Spark's text when it is unknown."""
    text = description(error)
    if listed := re.search(r"\(s\): (.+?) (?:is|are) not in the \w+ allowlist", text):
        names = dict.fromkeys(_OPERATORS[name] for name in listed[1].split(", ") if name in _OPERATORS)
        return f"{' and '.join(names)} {_ONLY}" if names else text
    return next((plain for part, plain in _SENTENCES.items() if re.search(part, text)), text)


def empty_stream(spark: SparkSession) -> DataFrame:
    """An empty stream with the columns of raw records, which may run in real time."""
    jvm = spark._jvm
    assert jvm is not None
    encoder = jvm.org.apache.spark.sql.Encoders.row(jvm.org.apache.spark.sql.types.StructType.fromDDL(RAW))
    source = getattr(jvm, "org.apache.spark.sql.execution.streaming.sources.LowLatencyMemoryStream$")
    return DataFrame(getattr(source, "MODULE$").apply(spark._jsparkSession, 1, encoder).toDF(), spark)


_SHUFFLES = 3
"""An upper bound for nearly all queries; the plan gives the exact number."""


@dataclass(frozen=True)
class Need:
    """The slots of all queries. Tasks of a real-time query keep their slots; other tasks can wait."""

    fixed: int
    """Slots that real-time queries keep."""
    waiting: int
    """Tasks of the other queries, if all run at the same time."""

    @property
    def least(self) -> int:
        return self.fixed + min(self.waiting, 1)

    @property
    def most(self) -> int:
        return self.fixed + self.waiting

    def check(self, there: int, master: str) -> str | None:
        """Misconfigured when there are too few slots; a remark when micro-batches must share slots."""
        if there < self.least:
            raise Misconfigured(
                "penstock.toml, [spark]",
                f"the queries need {self.least} slots at once, and {master} has {there}",
                "use more slots, run fewer queries in real time (real_time_queries, mode=), "
                "or declare fewer partitions for the channels that these read",
            )
        if there < self.most:
            return f"the queries can use {self.most} slots, and {master} has {there}: micro-batches wait for each other"
        return None


def need(
    queries: Sequence[Query],
    real_time: Mapping[str, int],
    partitions: Mapping[str, int],
    validated: Iterable[str],
    shuffle: int,
    spread: Mapping[str, int] | None = None,
) -> Need:
    """The slots that all queries need. `real_time`: the real-time queries, and how often they shuffle.

    `spread`: the state partitions of queries with a checkpoint; others use `shuffle`.
    """
    fixed = waiting = 0
    for query in queries:
        reading = sum(partitions[name] for name in query.inputs)
        state = (spread or {}).get(query.name, shuffle)
        if query.name in real_time:
            # Spark starts the tasks of all stages at once.
            fixed += reading + state * real_time[query.name]
        else:
            waiting += max(reading, state)
    return Need(fixed, waiting + sum(partitions[name] for name in validated))


def guessed(queries: Sequence[Query], locations: int, partitions: Mapping[str, int]) -> dict[str, int]:
    """The queries that may run in real time, and how often they may shuffle: the worst case, without Spark."""
    forced = [query for query in queries if query.mode is Mode.REAL_TIME]
    able = [query for query in queries if query.mode is Mode.AUTO and not query.every and query.emit is Emit.CHANGE]
    able.sort(key=lambda query: -sum(partitions[name] for name in query.inputs))
    return {query.name: _SHUFFLES for query in (*forced, *able[:locations])}

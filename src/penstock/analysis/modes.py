"""The mode of a query: Spark's own planner is asked, by a rehearsal without a broker. The slots that queries need."""

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

_PATIENCE = 60.0


@dataclass(frozen=True)
class Verdict:
    """The mode of a query, and why, in words for `penstock plan`."""

    mode: Mode
    why: str


def decide(query: Query, objection: str | None, places: int) -> Verdict:
    """The mode of a query, from Spark's objection to real time and the places that are left for it."""
    if query.mode is Mode.MICRO_BATCH:
        return Verdict(Mode.MICRO_BATCH, "asked for by mode=")
    if query.mode is Mode.REAL_TIME:
        return Verdict(
            Mode.REAL_TIME, "asked for by mode=" + (f", though Spark objects: {objection}" if objection else "")
        )
    if query.every is not None:
        return Verdict(Mode.MICRO_BATCH, "its rows are to come every so often, by every=")
    if objection:
        return Verdict(Mode.MICRO_BATCH, f"no real time here: {objection}")
    if places < 1:
        why = "Spark would allow real time, but the places for it are taken ([spark] real_time_queries)"
        return Verdict(Mode.MICRO_BATCH, why)
    return Verdict(Mode.REAL_TIME, "Spark allows it, and no earlier query has taken the place")


def objection(build: Callable[[], DataFrame]) -> str | None:
    """What Spark says against running this in real time; None if it accepts.

    What `build` makes is made of `empty_stream`, Spark's own in-memory source of real-time streams: so the planner goes
    through everything that it would do for Kafka.
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
    """Wait until a query in real time is planned; what Spark has against it, or None when its job runs."""
    until = time.monotonic() + _PATIENCE
    jobs = spark.sparkContext.statusTracker()
    while not (planned := jobs.getJobIdsForGroup(str(query.runId))) and query.isActive and time.monotonic() < until:
        time.sleep(0.02)
    error = query.exception()
    # What fails once its job runs is no objection to the mode; nor is what may be gone at the next attempt.
    return plainly(error) if error and not planned and not is_transient(error) else None


def accepts_update(frame: DataFrame) -> bool:
    """Whether the result may be updated row by row; otherwise rows come once, when they are final."""
    return refused(frame, "Update") is None


def refused(frame: DataFrame, output: str) -> str | None:
    """What Spark has against writing a result in this way, which it calls Update, Append or Complete."""
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
"""What users call the operators that Spark refuses in real time."""
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
"""What Spark says, by a part of it, in fewer words."""


def plainly(error: Exception) -> str:
    """Spark's objection in the words of who writes queries; as Spark says it, where these are not known."""
    said = description(error)
    if listed := re.search(r"\(s\): (.+?) (?:is|are) not in the \w+ allowlist", said):
        names = dict.fromkeys(_OPERATORS[name] for name in listed[1].split(", ") if name in _OPERATORS)
        return f"{' and '.join(names)} {_ONLY}" if names else said
    return next((plain for part, plain in _SENTENCES.items() if re.search(part, said)), said)


def empty_stream(spark: SparkSession) -> DataFrame:
    """No records, of the shape that Kafka's have, as a stream that may run in real time."""
    jvm = spark._jvm
    assert jvm is not None
    encoder = jvm.org.apache.spark.sql.Encoders.row(jvm.org.apache.spark.sql.types.StructType.fromDDL(RAW))
    source = getattr(jvm, "org.apache.spark.sql.execution.streaming.sources.LowLatencyMemoryStream$")
    return DataFrame(getattr(source, "MODULE$").apply(spark._jsparkSession, 1, encoder).toDF(), spark)


_SHUFFLES = 3
"""More than nearly all queries have; Spark's plan tells how many it really are."""


@dataclass(frozen=True)
class Need:
    """The tasks of a real-time query never end, and each holds its slot; those of the others can wait in a queue."""

    standing: int
    """Slots that real-time queries hold for as long as they run."""
    waiting: int
    """Tasks of the others, if all of them take their turn at the same moment."""

    @property
    def least(self) -> int:
        return self.standing + min(self.waiting, 1)

    @property
    def most(self) -> int:
        return self.standing + self.waiting

    def check(self, there: int, master: str) -> str | None:
        """Misconfigured when there are too few slots; a remark when those in micro-batches have to share."""
        if there < self.least:
            raise Misconfigured(
                "penstock.toml, [spark]",
                f"the queries need {self.least} slots at once, and {master} has {there}",
                "give it more, let fewer queries run in real time (real_time_queries, mode=), "
                "or declare fewer partitions for the channels that these read",
            )
        if there < self.most:
            return f"the queries can use {self.most} slots, and {master} has {there}: micro-batches wait for each other"
        return None


def need(
    queries: Sequence[Query],
    real_time: Mapping[str, int],
    partitions: Mapping[str, int],
    sifted: Iterable[str],
    shuffle: int,
    spread: Mapping[str, int] | None = None,
) -> Need:
    """What all queries need together. `real_time`: those that run so, and how often they shuffle.

    `spread`: over how many partitions those have their state that keep some already; the others will by `shuffle`.
    """
    standing = waiting = 0
    for query in queries:
        reading = sum(partitions[name] for name in query.inputs)
        state = (spread or {}).get(query.name, shuffle)
        if query.name in real_time:
            # Spark starts the tasks of all its stages together.
            standing += reading + state * real_time[query.name]
        else:
            waiting += max(reading, state)
    return Need(standing, waiting + sum(partitions[name] for name in sifted))


def guessed(queries: Sequence[Query], places: int, partitions: Mapping[str, int]) -> dict[str, int]:
    """Which queries may run in real time, at worst, and how often they may shuffle, before Spark is asked."""
    forced = [query for query in queries if query.mode is Mode.REAL_TIME]
    able = [query for query in queries if query.mode is Mode.AUTO and not query.every and query.emit is Emit.CHANGE]
    able.sort(key=lambda query: -sum(partitions[name] for name in query.inputs))
    return {query.name: _SHUFFLES for query in (*forced, *able[:places])}

"""Real-time or micro-batches: Spark's own planner is asked, by a rehearsal without a broker."""

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock.analysis.frames import RAW, words
from penstock.analysis.query import Mode, Query

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


def objection(spark: SparkSession, build: Callable[[Callable[[], DataFrame]], DataFrame]) -> str | None:
    """What Spark says against running this in real time; None if it accepts.

    `build` gets a maker of raw frames. They come from Spark's own in-memory source of real-time streams, so the planner
    goes through everything that it would do for Kafka.
    """
    folder = tempfile.mkdtemp(prefix="penstock-rehearsal-")
    try:
        frame = build(lambda: _empty_stream(spark))
        writer = frame.writeStream.format("console").outputMode("update")
        writer = writer.trigger(realTime="5 seconds")  # type: ignore[call-overload]  # unknown to PySpark's overloads
        query = writer.option("checkpointLocation", folder).start()
        try:
            return refusal(spark, query)
        finally:
            query.stop()
    except (PySparkException, Py4JJavaError) as error:
        return words(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def refusal(spark: SparkSession, query: StreamingQuery) -> str | None:
    """Wait until a query in real time is planned; what Spark has against it, or None when its job runs."""
    until = time.monotonic() + _PATIENCE
    jobs = spark.sparkContext.statusTracker()
    while query.isActive and not jobs.getJobIdsForGroup(str(query.runId)) and time.monotonic() < until:
        time.sleep(0.02)
    error = query.exception()
    return words(error) if error else None


def accepts_update(frame: DataFrame) -> bool:
    """Whether the result may be updated row by row; otherwise rows come once, when they are final."""
    jvm = frame.sparkSession._jvm
    assert jvm is not None
    checker = getattr(jvm, "org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker$")
    update = jvm.org.apache.spark.sql.streaming.OutputMode.Update()
    try:
        getattr(checker, "MODULE$").checkForStreaming(frame._jdf.queryExecution().analyzed(), update)
    except (PySparkException, Py4JJavaError):
        return False
    return True


def _empty_stream(spark: SparkSession) -> DataFrame:
    jvm = spark._jvm
    assert jvm is not None
    encoder = jvm.org.apache.spark.sql.Encoders.row(jvm.org.apache.spark.sql.types.StructType.fromDDL(RAW))
    source = getattr(jvm, "org.apache.spark.sql.execution.streaming.sources.LowLatencyMemoryStream$")
    return DataFrame(getattr(source, "MODULE$").apply(spark._jsparkSession, 1, encoder).toDF(), spark)

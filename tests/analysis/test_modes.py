"""Spark's own planner decides the mode."""

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock.analysis.engine import Engine
from penstock.analysis.frames import seen
from penstock.analysis.kafka import KafkaWire
from penstock.analysis.modes import decide
from penstock.analysis.query import Mode, Query, Shape
from penstock.analysis.settings import SparkSettings

SHAPES = {"things": Shape("things", "id BIGINT, name STRING")}


def engine(spark: SparkSession, places: int = 1) -> Engine:
    return Engine(spark, SparkSettings(real_time_queries=places), KafkaWire("127.0.0.1:1"), "/nowhere", SHAPES)


def windowed(things: DataFrame) -> DataFrame:
    late = things.withWatermark("event_time", "10 seconds")
    return late.groupBy(F.window("event_time", "5 seconds"), "name").agg(F.sum("id").alias("n"), seen())


def by_session(things: DataFrame) -> DataFrame:
    late = things.withWatermark("event_time", "10 seconds")
    return late.groupBy(F.session_window("event_time", "5 seconds"), "name").agg(seen())


def in_python(things: DataFrame) -> DataFrame:
    shout = F.udf(lambda text: text.upper(), "string")
    return things.select("id", shout("name").alias("name"), "origin")


def query(name: str, build: object, key: tuple[str, ...], mode: Mode = Mode.AUTO) -> Query:
    return Query(name, ("things",), name, key, build, mode)  # type: ignore[arg-type]


def test_spark_is_asked_about_each_query(spark: SparkSession) -> None:
    queries = [
        query("windowed", windowed, ("window", "name")),
        query("in_python", in_python, ("id",)),
        query("by_session", by_session, ("session_window", "name")),
    ]
    found = engine(spark, places=3).verdicts(queries)
    assert {name: verdict.mode for name, verdict in found.items()} == {
        "windowed": Mode.REAL_TIME,
        "in_python": Mode.MICRO_BATCH,
        "by_session": Mode.MICRO_BATCH,
    }
    assert "Python" in found["in_python"].why
    assert "session window" in found["by_session"].why


def test_a_place_for_real_time_is_taken_once(spark: SparkSession) -> None:
    queries = [query("one", windowed, ("window", "name")), query("two", windowed, ("window", "name"))]
    one, two = engine(spark).verdicts(queries).values()
    assert (one.mode, two.mode) == (Mode.REAL_TIME, Mode.MICRO_BATCH)
    assert "real_time_queries" in two.why


def test_a_mode_can_be_forced() -> None:
    forced = query("q", windowed, ("window",), Mode.MICRO_BATCH)
    assert decide(forced, None, 5).mode is Mode.MICRO_BATCH
    eager = query("q", windowed, ("window",), Mode.REAL_TIME)
    assert decide(eager, "it has a Python function", 0).mode is Mode.REAL_TIME
    assert "it has a Python function" in decide(eager, "it has a Python function", 0).why

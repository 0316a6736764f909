"""Spark's own planner decides the mode; how many slots queries need together."""

from datetime import timedelta

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock.analysis.connectors import KafkaConnector
from penstock.analysis.engine import Engine
from penstock.analysis.frames import seen
from penstock.analysis.modes import Need, decide, guessed, need, plainly
from penstock.analysis.query import Emit, Mode, Query, Shape
from penstock.analysis.settings import SparkSettings
from penstock.core.errors import Misconfigured

SHAPES = {"things": Shape("things", "id BIGINT, name STRING")}


def engine(spark: SparkSession, locations: int = 1) -> Engine:
    return Engine(spark, SparkSettings(real_time_queries=locations), KafkaConnector("127.0.0.1:1"), "/nowhere", SHAPES)


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
    found = engine(spark, locations=3).verdicts(queries)
    assert {name: verdict.mode for name, verdict in found.items()} == {
        "windowed": Mode.REAL_TIME,
        "in_python": Mode.MICRO_BATCH,
        "by_session": Mode.MICRO_BATCH,
    }
    assert "Python" in found["in_python"].why
    assert "sessions are written when they are final" in found["by_session"].why


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


REFUSED = "[STREAMING_REAL_TIME_MODE.X] Streaming real-time mode has the following limitation: The operator(s): "
EXECUTION = "org.apache.spark.sql.execution"
ALLOWED = "not in the operator allowlist for Real-Time Mode"


@pytest.mark.parametrize(
    ("said", "plain"),
    [
        (
            f"{REFUSED}{EXECUTION}.streaming.operators.stateful.join.StreamingSymmetricHashJoinExec is {ALLOWED}. "
            "To bypass this check, set x to false. SQLSTATE: 0A000",
            "a join of two streams runs in micro-batches only",
        ),
        (
            f"{REFUSED}{EXECUTION}.SortExec, {EXECUTION}.python.FlatMapGroupsInPandasExec are {ALLOWED}. To bypass",
            "applyInPandas() runs in micro-batches only",
        ),
        (
            f"{REFUSED}{EXECUTION}.NewExec is {ALLOWED}. To bypass",
            f"The operator(s): New is {ALLOWED}",
        ),
        (
            "Distinct aggregations are not supported on streaming DataFrames/Datasets. Consider using x;\n~Aggregate",
            "distinct values cannot be counted over a stream; approx_count_distinct() can",
        ),
        ("[SOMETHING.ELSE] It does not work. SQLSTATE: 1", "It does not work"),
    ],
)
def test_what_spark_says_is_told_in_words_that_users_know(said: str, plain: str) -> None:
    assert plainly(Exception(said)) == plain


def test_what_runs_over_tables_only_is_refused(spark: SparkSession) -> None:
    def best(things: DataFrame) -> DataFrame:
        return things.orderBy("id")

    with pytest.raises(Misconfigured, match="query best: Spark cannot run it over streams: the rows of a stream"):
        engine(spark).verdicts([query("best", best, ("id",))])


PARTITIONS = {"x": 4, "y": 1}
ONE = Query("one", ("x",), "one", ("k",), "")
TWO = Query("two", ("x", "y"), "two", ("k",), "")
THREE = Query("three", ("y",), "three", ("k",), "")


def test_what_runs_in_real_time_holds_a_slot_for_each_of_its_tasks() -> None:
    found = need([ONE, TWO, THREE], {"one": 1, "two": 2}, PARTITIONS, [], shuffle=2)
    assert found == Need(fixed=(4 + 2) + (5 + 2 * 2), waiting=2)
    assert (found.least, found.most) == (16, 17)


def test_micro_batches_can_share_one_slot() -> None:
    found = need([ONE, TWO], {}, PARTITIONS, ["x", "y"], shuffle=2)
    assert found == Need(fixed=0, waiting=4 + 5 + 4 + 1)
    assert found.least == 1


def test_nothing_needs_nothing() -> None:
    assert need([], {}, {}, [], shuffle=2).most == 0


@pytest.mark.parametrize("locations", [0, 1, 2, 4])
def test_each_place_is_counted_for_the_query_that_would_need_most(locations: int) -> None:
    found = guessed([THREE, ONE, TWO], locations, PARTITIONS)
    assert list(found) == ["two", "one", "three"][:locations]


def test_who_cannot_run_in_real_time_is_not_counted_and_who_must_is() -> None:
    queries = [
        Query("forced", ("x",), "a", ("k",), "", Mode.REAL_TIME),
        Query("batch", ("x",), "b", ("k",), "", Mode.MICRO_BATCH),
        Query("now_and_then", ("x",), "c", ("k",), "", every=timedelta(minutes=1)),
        Query("final", ("x",), "d", ("k",), "", watermark=timedelta(minutes=1), emit=Emit.FINAL),
    ]
    assert list(guessed(queries, 4, PARTITIONS)) == ["forced"]


def test_too_few_slots_are_an_error_with_the_ways_out() -> None:
    with pytest.raises(Misconfigured) as caught:
        Need(13, 9).check(4, "local[4]")
    assert str(caught.value) == (
        "penstock.toml, [spark]: the queries need 14 slots at once, and local[4] has 4; use more slots, run fewer "
        "queries in real time (real_time_queries, mode=), or declare fewer partitions for the channels that these "
        "read"
    )


def test_slots_that_have_to_be_shared_are_remarked() -> None:
    remark = Need(4, 6).check(5, "local[5]")
    assert remark == "the queries can use 10 slots, and local[5] has 5: micro-batches wait for each other"
    assert Need(4, 6).check(10, "local[10]") is None

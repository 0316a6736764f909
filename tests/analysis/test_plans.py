"""What Spark's planner tells of a query: nodes, cost, whether each record is counted once, and its mode."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pandas as pd  # type: ignore[import-untyped]  # it ships no types
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock import Keyed
from penstock.analysis.connectors import KafkaConnector
from penstock.analysis.engine import Engine
from penstock.analysis.frames import seen, typed
from penstock.analysis.plans import (
    Cost,
    Need,
    analyzed,
    bare,
    columns,
    cost,
    decide,
    empty_stream,
    grouped,
    guessed,
    judges,
    kind_of,
    multiplied,
    need,
    nodes,
    plainly,
    shuffles,
    stateless,
    text,
    watermarked,
)
from penstock.analysis.query import Emit, Mode, Query, Shape
from penstock.analysis.settings import SparkSettings
from penstock.core.errors import Misconfigured


def test_nodes_come_from_the_top_and_from_left_to_right(spark: SparkSession) -> None:
    left, right = spark.range(1).where("id = 0"), spark.range(2).select("id")
    frame = left.join(right, "id")
    kinds = ["Project", "Join", "Filter", "Range", "Project", "Range"]
    assert [kind_of(node) for node in nodes(analyzed(frame))] == kinds
    ends = [kind_of(node) for node in nodes(analyzed(frame), until=lambda node: kind_of(node) == "Filter")]
    assert ends == ["Project", "Join", "Filter", "Project", "Range"]
    assert [word for word in kinds if word not in text(frame)] == []
    assert columns(analyzed(frame)) == {"id"}


def test_a_plan_may_be_deeper_than_python_can_nest() -> None:
    class Node:
        """As much of a node as is gone through."""

        def __init__(self, *below: "Node") -> None:
            self.below = below

        def children(self) -> Any:
            return self

        def size(self) -> int:
            return len(self.below)

        def apply(self, index: int) -> "Node":
            return self.below[index]

    top = Node()
    for _ in range(5_000):
        top = Node(top)
    assert sum(1 for _ in nodes(top)) == 5_001


def test_what_an_aggregation_groups_by_is_found_in_its_result(spark: SparkSession) -> None:
    frame = spark.range(1).selectExpr("id", "id % 2 AS odd")
    made = frame.groupBy("odd", F.expr("id + 1")).agg(F.col("odd").alias("again"), F.sum("id").alias("sum"))
    (aggregate,) = (node for node in nodes(analyzed(made)) if kind_of(node) == "Aggregate")
    assert [[str(one.name()) for one in held] for held in grouped(aggregate)] == [["odd", "again"], ["(id + 1)"]]
    assert [kind_of(bare(held[0])) for held in grouped(aggregate)] == ["AttributeReference", "Add"]
    (hidden,) = grouped(analyzed(spark.sql("SELECT count(1) FROM range(3) GROUP BY id")))
    assert hidden == []


def test_the_column_of_a_watermark_is_known(spark: SparkSession) -> None:
    rates = spark.readStream.format("rate").load().withWatermark("timestamp", "1 minute")
    assert [column.name for column in rates.schema.fields if watermarked(column)] == ["timestamp"]


Made = Callable[[DataFrame], DataFrame]


def group(rows: pd.DataFrame) -> pd.DataFrame:
    return rows


def every(rows: Iterator[Any]) -> Iterator[Any]:
    yield from rows


def counted(things: DataFrame) -> DataFrame:
    return things.groupBy("name").count()


CASES: dict[str, tuple[Made, Cost, int]] = {
    "filter": (lambda things: things.where("id > 1"), Cost.JVM, 0),
    "count": (counted, Cost.JVM, 1),
    "count without duplicates": (lambda things: counted(things.dropDuplicates(["id"])), Cost.JVM, 2),
    "udf": (lambda things: things.select(F.udf(lambda text: text, "string")("name")), Cost.ARROW, 0),
    "udf of a count": (
        lambda things: counted(things).select(F.udf(lambda text: text, "string")("name")),
        Cost.ARROW,
        1,
    ),
    "map": (lambda things: things.select("name").mapInArrow(every, "name STRING"), Cost.ARROW, 0),
    "apply": (lambda things: things.select("name").groupBy("name").applyInPandas(group, "name STRING"), Cost.ARROW, 1),
    "pickled": (lambda things: things.select(F.udf(lambda text: text, "string", useArrow=False)("name")), Cost.ROW, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_python_shows_in_the_class(case: str, spark: SparkSession) -> None:
    made, expected, changes = CASES[case]
    result = made(typed(empty_stream(spark), Shape("things", "id BIGINT, name STRING")))
    assert (cost(result), shuffles(result)) == (expected, changes)


def test_a_class_says_what_it_costs() -> None:
    assert {cost: cost.description.split(":")[0] for cost in Cost} == {
        "jvm": "no Python",
        "arrow": "records go to Python in columns",
        "row": "records go to Python one by one",
    }


SHAPE = Shape("things", "id BIGINT NOT NULL, name STRING, tags ARRAY<STRING>, at BIGINT", "timestamp_millis(at)")


Build = Callable[[DataFrame], DataFrame]


def engine_of(spark: SparkSession, shape: Shape = SHAPE) -> Engine:
    return Engine(spark, SparkSettings(), KafkaConnector("localhost:1"), "", {"things": shape})


def against(spark: SparkSession, build: Build, watermark: int | None = 10, shape: Shape = SHAPE) -> str | None:
    delay = None if watermark is None else timedelta(seconds=watermark)
    return engine_of(spark, shape).uncounted(Query("q", ("things",), "rows", ("name",), build, watermark=delay))


def windowed(things: DataFrame) -> DataFrame:
    return things.groupBy(F.window("event_time", "5 seconds"), "name").agg(F.count("id").alias("n"), seen())


def watched(frame: DataFrame) -> DataFrame:
    return frame.observe("mine", F.count(F.lit(1)).alias("n"))


@pytest.mark.parametrize("watermark", [None, 10])
def test_groups_and_windows_that_do_not_overlap_conserve(watermark: int | None, spark: SparkSession) -> None:
    assert against(spark, lambda things: things.groupBy("name").agg(seen()), watermark) is None
    assert against(spark, windowed, watermark) is None
    assert (
        against(spark, lambda things: things.select("id", F.upper("name").alias("name"), "origin"), watermark) is None
    )


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda things: things.groupBy("name").count(), "neither seen() nor origin"),
        (lambda things: things.where("id > 1").groupBy("name").agg(seen()), "it uses where()"),
        (lambda things: things.groupBy("name").agg(seen()).where("seen.count > 1"), "it uses where()"),
        (
            lambda things: things.groupBy(F.window("event_time", "9 seconds", "3 seconds"), "name").agg(seen()),
            "windows overlap",
        ),
        (
            lambda things: things.select("origin", F.explode("tags").alias("name")).groupBy("name").agg(seen()),
            "several rows from one record",
        ),
        (lambda things: things.dropDuplicates(["id"]).groupBy("name").agg(seen()), "it drops duplicates"),
        (
            lambda things: (
                things.groupBy("name")
                .agg(F.struct(F.lit(1).alias("count")).alias("seen"), F.max("id"))
                .join(things.sparkSession.range(3), F.lit(True))
            ),
            "it joins",
        ),
    ],
)
def test_what_stands_against_it_is_told(build: Build, why: str, spark: SparkSession) -> None:
    assert why in (against(spark, build) or "")


def test_rows_of_a_table_that_have_no_time_are_in_no_window(spark: SparkSession) -> None:
    table = replace(SHAPE, table=True)
    assert against(spark, lambda things: things.groupBy("name").agg(seen()), None, table) is None
    assert against(spark, windowed, None, table) == "rows of a table may have no time, so they are in no window"


@pytest.mark.parametrize(
    ("build", "without_state"),
    [
        (lambda things: watched(things).select("name", "origin"), True),
        (lambda things: watched(things.groupBy("name").agg(seen())), False),
    ],
)
def test_what_a_query_observes_by_itself_hides_nothing(build: Build, without_state: bool, spark: SparkSession) -> None:
    engine = engine_of(spark)
    assert stateless(engine.frame(Query("q", ("things",), "o", ("name",), build), engine.nothing)) is without_state


def test_rows_that_come_when_they_are_final_are_not_counted(spark: SparkSession) -> None:
    def sessions(things: DataFrame) -> DataFrame:
        return things.groupBy(F.session_window("event_time", "5 seconds"), "name").agg(seen())

    assert "when they are final" in (against(spark, sessions) or "")


class Told(Keyed):
    schema = "name STRING"

    def process(self, key: str, row: Any) -> Any:
        return {}


class Waiting(Told):
    def on_timer(self, key: str, at: datetime) -> Any:
        return {}


class Hurried(Waiting):
    clock = True


@pytest.mark.parametrize(
    ("build", "found"),
    [
        (lambda things: things.select("name", "origin"), []),
        (lambda things: Told.over(things, "name"), []),
        (lambda things: Hurried.over(things, "name"), []),
        (lambda things: Waiting.over(things, "name"), [True]),
        (lambda things: Waiting.over(things.where("id > 1").union(things), "name"), [True]),
        (windowed, [False]),
        (lambda things: Waiting.over(things.dropDuplicates(["id", "event_time"]), "name"), [True, False]),
    ],
)
def test_who_drops_late_records_and_whether_each_is_judged_by_itself(
    build: Build, found: list[bool], spark: SparkSession
) -> None:
    query = Query("q", ("things",), "rows", ("name",), build, watermark=timedelta(seconds=10))
    assert judges(engine_of(spark).frame(query, lambda _: empty_stream(spark))) == found


@pytest.mark.parametrize(
    ("build", "several"),
    [
        (lambda things: watched(things.where("id > 1")), False),
        (lambda things: things.select("name", F.explode("tags").alias("tag")), True),
        (lambda things: watched(things.select("name", F.explode("tags").alias("tag"))), True),
        (lambda things: things.union(things), True),
        (lambda things: things.join(things.sparkSession.range(3), "id"), True),
    ],
)
def test_whether_several_rows_may_stem_from_one_record(build: Build, several: bool, spark: SparkSession) -> None:
    engine = engine_of(spark)
    assert multiplied(engine.frame(Query("q", ("things",), "rows", ("name",), build), engine.nothing)) is several


SHAPES = {"things": Shape("things", "id BIGINT, name STRING")}


def engine(spark: SparkSession, locations: int = 1) -> Engine:
    return Engine(spark, SparkSettings(real_time_queries=locations), KafkaConnector("127.0.0.1:1"), "/nowhere", SHAPES)


def by_window(things: DataFrame) -> DataFrame:
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
        query("by_window", by_window, ("window", "name")),
        query("in_python", in_python, ("id",)),
        query("by_session", by_session, ("session_window", "name")),
    ]
    found = engine(spark, locations=3).verdicts(queries)
    assert {name: verdict.mode for name, verdict in found.items()} == {
        "by_window": Mode.REAL_TIME,
        "in_python": Mode.MICRO_BATCH,
        "by_session": Mode.MICRO_BATCH,
    }
    assert "Python" in found["in_python"].why
    assert "sessions are written when they are final" in found["by_session"].why


def test_a_place_for_real_time_is_taken_once(spark: SparkSession) -> None:
    queries = [query("one", by_window, ("window", "name")), query("two", by_window, ("window", "name"))]
    one, two = engine(spark).verdicts(queries).values()
    assert (one.mode, two.mode) == (Mode.REAL_TIME, Mode.MICRO_BATCH)
    assert "real_time_queries" in two.why


def test_a_mode_can_be_forced() -> None:
    forced = query("q", by_window, ("window",), Mode.MICRO_BATCH)
    assert decide(forced, None, 5).mode is Mode.MICRO_BATCH
    eager = query("q", by_window, ("window",), Mode.REAL_TIME)
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

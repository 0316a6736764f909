"""Whether the records of a result can be counted."""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock import Keyed
from penstock.analysis.conserving import judges, multiplied, stateless
from penstock.analysis.engine import Engine
from penstock.analysis.frames import seen
from penstock.analysis.kafka import KafkaWire
from penstock.analysis.modes import empty_stream
from penstock.analysis.query import Query, Shape
from penstock.analysis.settings import SparkSettings

SHAPE = Shape("things", "id BIGINT NOT NULL, name STRING, tags ARRAY<STRING>, at BIGINT", "timestamp_millis(at)")


Build = Callable[[DataFrame], DataFrame]


def engine_of(spark: SparkSession, shape: Shape = SHAPE) -> Engine:
    return Engine(spark, SparkSettings(), KafkaWire("localhost:1"), "", {"things": shape})


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
        (lambda things: things.where("id > 1").groupBy("name").agg(seen()), "where() is not declared"),
        (lambda things: things.groupBy("name").agg(seen()).where("seen.count > 1"), "where() is not declared"),
        (
            lambda things: things.groupBy(F.window("event_time", "9 seconds", "3 seconds"), "name").agg(seen()),
            "windows overlap",
        ),
        (
            lambda things: things.select("origin", F.explode("tags").alias("name")).groupBy("name").agg(seen()),
            "several rows of one record",
        ),
        (lambda things: things.dropDuplicates(["id"]).groupBy("name").agg(seen()), "it has seen"),
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
    assert against(spark, windowed, None, table) == "rows of a table may have no time, and are in no window then"


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
    gives = "name STRING"

    def row(self, key: str, row: Any) -> Any:
        return {}


class Waiting(Told):
    def timer(self, key: str, at: datetime) -> Any:
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

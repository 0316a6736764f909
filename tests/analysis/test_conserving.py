"""Whether the records of a result can be counted."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock.analysis.engine import Engine
from penstock.analysis.frames import seen
from penstock.analysis.kafka import KafkaWire
from penstock.analysis.query import Query, Shape
from penstock.analysis.settings import SparkSettings

SHAPE = Shape("things", "id BIGINT NOT NULL, name STRING, tags ARRAY<STRING>, at BIGINT", "timestamp_millis(at)")


def against(spark: SparkSession, build: Callable[[DataFrame], DataFrame], watermark: int | None = 10) -> str | None:
    engine = Engine(spark, SparkSettings(), KafkaWire("localhost:1"), "", {"things": SHAPE})
    delay = None if watermark is None else timedelta(seconds=watermark)
    return engine.uncounted(Query("q", ("things",), "rows", ("name",), build, watermark=delay))


@pytest.mark.parametrize("watermark", [None, 10])
def test_groups_and_windows_that_do_not_overlap_conserve(watermark: int | None, spark: SparkSession) -> None:
    def windowed(things: DataFrame) -> DataFrame:
        return things.groupBy(F.window("event_time", "5 seconds"), "name").agg(F.count("id").alias("n"), seen())

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
def test_what_stands_against_it_is_told(build: Callable[[DataFrame], DataFrame], why: str, spark: SparkSession) -> None:
    assert why in (against(spark, build) or "")


def test_rows_that_come_when_they_are_final_are_not_counted(spark: SparkSession) -> None:
    def sessions(things: DataFrame) -> DataFrame:
        return things.groupBy(F.session_window("event_time", "5 seconds"), "name").agg(seen())

    assert "when they are final" in (against(spark, sessions) or "")

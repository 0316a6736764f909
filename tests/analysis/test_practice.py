"""Planning beside what runs, so that the pause between two batches is short."""

import threading
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock.analysis.engine import Engine
from penstock.analysis.frames import seen
from penstock.analysis.kafka import KafkaWire
from penstock.analysis.practice import practise
from penstock.analysis.query import Query, Shape
from penstock.analysis.settings import SparkSettings


def totals(things: DataFrame) -> DataFrame:
    return things.groupBy("name").agg(F.sum("n").alias("total"), seen())


def rules_run_so_far(spark: SparkSession) -> int:
    """How often rules of the planner ran, by Spark's own count."""
    assert spark._jvm is not None
    executor = spark._jvm.org.apache.spark.sql.catalyst.rules.RuleExecutor
    return int(executor.getCurrentMetrics().numRuns())


def engine(spark: SparkSession, folder: Path) -> Engine:
    shapes = {"things": Shape("things", "name STRING NOT NULL, n BIGINT")}
    return Engine(spark, SparkSettings(), KafkaWire("127.0.0.1:1"), str(folder), shapes)


QUERY = Query("totals", ("things",), "totals", ("name",), totals)


def test_a_query_is_planned_anew_each_time(spark: SparkSession, tmp_path: Path) -> None:
    def rules_run(times: int) -> int:
        before = rules_run_so_far(spark)
        assert practise(engine(spark, tmp_path), QUERY, threading.Event(), times, pause=0) == times
        return rules_run_so_far(spark) - before

    # Each has the making of the query, which the planner has a share in.
    assert rules_run(21) > 2 * rules_run(1)


def test_practice_ends_when_it_is_told_to(spark: SparkSession, tmp_path: Path) -> None:
    ended = threading.Event()
    ended.set()
    assert practise(engine(spark, tmp_path), QUERY, ended) == 0

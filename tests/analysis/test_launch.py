"""What is asked of a query and of its channels before it starts. How it starts and goes on: test_engine."""

import threading
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from tests.analysis.still import StillConnector

from penstock import Keyed, count_window, tables
from penstock.analysis.connectors import KafkaConnector
from penstock.analysis.engine import Engine
from penstock.analysis.frames import seen
from penstock.analysis.launch import fitting, warm_up
from penstock.analysis.query import Mode, Query, Shape
from penstock.analysis.settings import SparkSettings
from penstock.core.errors import Misconfigured

SHAPES = {
    "uses": Shape("uses", "card STRING, at BIGINT"),
    "cards": Shape("cards", "owner STRING", table=True),
    "owners": Shape("owners", "name STRING", table=True),
}


class Last(Keyed):
    schema = "card STRING"

    def process(self, key: str, row: Any) -> Any:
        return {}


def counted(uses: DataFrame) -> DataFrame:
    return count_window(uses, 10)


def remembered(uses: DataFrame) -> DataFrame:
    return Last.over(uses, "card")


def found(uses: DataFrame, cards: DataFrame) -> DataFrame:
    return tables.lookup(uses, cards, key="card")


def related(cards: DataFrame, owners: DataFrame) -> DataFrame:
    return tables.foreign_key_join(cards, owners, key="owner")


def plain(uses: DataFrame) -> DataFrame:
    return uses.select("card", "origin")


@pytest.mark.parametrize(
    ("build", "takes"),
    [
        (counted, {"uses": 50}),
        (remembered, {"uses": 50}),
        (related, {"cards": 50, "owners": 50}),
        # What a record finds may not depend on how much of the table there was time to read.
        (found, {"uses": 50, "cards": None}),
        (plain, {"uses": None}),
    ],
)
def test_what_keeps_state_in_python_takes_a_part_of_the_log_at_a_time(
    build: Any, takes: dict[str, int | None], spark: SparkSession, tmp_path: Path
) -> None:
    connector = StillConnector()
    engine = Engine(spark, SparkSettings(state_batch=50), connector, str(tmp_path), SHAPES)
    key = {counted: "window", related: "key"}.get(build, "card")
    fitting(engine, Query("q", tuple(takes), "q", (key,), build), {})
    assert dict(connector.asked) == takes


def test_real_time_that_cannot_be_is_refused_before_it_is_tried(spark: SparkSession, tmp_path: Path) -> None:
    engine = Engine(spark, SparkSettings(), StillConnector("these are still waters"), str(tmp_path), SHAPES)
    forced = Query("q", ("uses",), "q", ("card",), plain, Mode.REAL_TIME)
    with pytest.raises(Misconfigured, match="query q: it cannot run in real time: these are still waters; leave mode="):
        fitting(engine, forced, {})


def totals(things: DataFrame) -> DataFrame:
    return things.groupBy("name").agg(F.sum("n").alias("total"), seen())


def rules_run_so_far(spark: SparkSession) -> int:
    """How often rules of the planner ran, by Spark's own count."""
    assert spark._jvm is not None
    executor = spark._jvm.org.apache.spark.sql.catalyst.rules.RuleExecutor
    return int(executor.getCurrentMetrics().numRuns())


def engine(spark: SparkSession, folder: Path) -> Engine:
    shapes = {"things": Shape("things", "name STRING NOT NULL, n BIGINT")}
    return Engine(spark, SparkSettings(), KafkaConnector("127.0.0.1:1"), str(folder), shapes)


QUERY = Query("totals", ("things",), "totals", ("name",), totals)


def test_a_query_is_planned_anew_each_time(spark: SparkSession, tmp_path: Path) -> None:
    def rules_run(times: int) -> int:
        before = rules_run_so_far(spark)
        assert warm_up(engine(spark, tmp_path), QUERY, threading.Event(), times, pause=0) == times
        return rules_run_so_far(spark) - before

    # Each has the making of the query, which the planner has a share in.
    assert rules_run(21) > 2 * rules_run(1)


def test_a_warm_up_ends_when_it_is_told_to(spark: SparkSession, tmp_path: Path) -> None:
    ended = threading.Event()
    ended.set()
    assert warm_up(engine(spark, tmp_path), QUERY, ended) == 0

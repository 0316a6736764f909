"""The class of a query, read from the plan that Spark makes of it."""

from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd  # type: ignore[import-untyped]  # it ships no types
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock.analysis.cost import Cost, cost, shuffles
from penstock.analysis.frames import typed
from penstock.analysis.modes import empty_stream
from penstock.analysis.query import Shape

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
    assert {cost: cost.words.split(":")[0] for cost in Cost} == {
        "jvm": "no Python",
        "arrow": "records go to Python in columns",
        "row": "records go to Python one by one",
    }

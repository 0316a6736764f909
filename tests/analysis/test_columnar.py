"""A plain function runs on Arrow, whenever it was made."""

from collections.abc import Callable

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType

from penstock.analysis.cost import operators
from penstock.analysis.engine import Engine
from penstock.analysis.frames import built
from penstock.analysis.kafka import KafkaWire
from penstock.analysis.modes import empty_stream
from penstock.analysis.query import Query, Shape
from penstock.analysis.settings import SparkSettings

# Made while no session is there, as in a pipeline's own file.
shout = F.udf(lambda text: text.upper(), StringType())


def loud(things: DataFrame) -> DataFrame:
    return things.select(shout("name").alias("name"), "origin")


def around(function: Callable[..., object]) -> Callable[[DataFrame], DataFrame]:
    return lambda things: things.select(function("name").alias("name"), "origin")  # type: ignore[attr-defined]


def test_a_function_of_the_file_and_one_around_the_query_get_columns(spark: SparkSession) -> None:
    engine = Engine(
        spark, SparkSettings(), KafkaWire("127.0.0.1:1"), "/nowhere", {"things": Shape("things", "name STRING")}
    )
    pickled = F.udf(lambda text: text.upper(), "string", useArrow=False)
    for build in (loud, around(pickled)):
        query = Query("loud", ("things",), "loud", ("name",), build)
        assert "ArrowEvalPython" in operators(engine.frame(query, lambda _: empty_stream(spark)))


def test_settings_of_spark_can_forbid_it(spark: SparkSession) -> None:
    pickled = F.udf(lambda text: text.upper(), "string", useArrow=False)
    setting = "spark.sql.execution.pythonUDF.arrow.enabled"
    spark.conf.set(setting, "false")
    try:
        query = Query("loud", ("things",), "loud", ("name",), around(pickled))
        frame = spark.createDataFrame([("a", 1)], "name STRING, origin INT")
        assert "BatchEvalPython" in operators(built(query, [frame]))
    finally:
        spark.conf.set(setting, "true")


def test_the_function_still_works(spark: SparkSession) -> None:
    # Of the library: workers cannot import the module of a test.
    upper = F.udf(str.upper, "string", useArrow=False)
    query = Query("loud", ("things",), "loud", ("name",), around(upper))
    frame = spark.createDataFrame([("a", 1)], "name STRING, origin INT").coalesce(1)
    assert [row["name"] for row in built(query, [frame]).collect()] == ["A"]

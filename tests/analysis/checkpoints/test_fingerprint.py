"""What of a query its checkpoint depends on."""

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock.analysis.checkpoints.fingerprint import Fingerprint, Operator, fingerprint, plain


def test_expressions_are_told_without_what_is_another_at_each_start() -> None:
    assert plain("sum(n#12L)") == "sum(n)"
    assert plain("event_time#3-T10000ms") == "event_time"
    transformed = "transform(list#7, lambdafunction((lambda x_1#20 + 1), lambda x_1#20, false))"
    assert plain(transformed) == "transform(list, lambdafunction((lambda x + 1), lambda x, false))"
    assert plain("max(count(1)#12L) AS max(count(1))#13L") == "max(count(1)) AS max(count(1))"
    assert plain("Made@1f3a") == "Made"
    assert plain("EventTimeWatermark c24c0858-1377-48f1-ad60-2097587e9bb4, at") == "EventTimeWatermark , at"
    assert plain("total_1") == "total_1"


def test_what_tells_two_expressions_apart_stays() -> None:
    assert plain("sum(x_1#20L)") == "sum(x_1)"
    for literal in ("#1", "@ab", "a@example", "x-T5ms"):
        assert plain(f"(name#3 = {literal})") == f"(name = {literal})"
    assert plain("name#3 IN (#1,#2)") == "name IN (#1,#2)"


def test_a_lambda_is_the_same_at_each_start_and_a_column_that_looks_like_one_is_itself(spark: SparkSession) -> None:
    rates = spark.readStream.format("rate").load().selectExpr("value AS x_1", "value AS x_2", "array(value) AS some")

    def summed(column: str) -> Fingerprint:
        more = F.transform("some", lambda one: one + 1)
        return fingerprint(rates.groupBy(more.alias("more")).agg(F.sum(column)), "into", "update")

    assert summed("x_1") == summed("x_1")
    assert summed("x_1").operators != summed("x_2").operators


def test_what_keeps_state_is_told_in_order_and_the_rest_as_a_whole(spark: SparkSession) -> None:
    def rates() -> DataFrame:
        rate = spark.readStream.format("rate").load().withWatermark("timestamp", "1 minute")
        return rate.observe("rates taken", F.count(F.lit(1)).alias("n"))

    def counted(frame: DataFrame) -> DataFrame:
        return frame.groupBy((F.col("value") % 3).alias("rest")).agg((F.sum("value") * 2).alias("twice"))

    one = fingerprint(counted(rates().dropDuplicates(["value", "timestamp"])), "into", "update")
    assert (one.sources, one.into, one.output) == (("rates",), "into", "update")
    assert one.operators == (
        Operator("Aggregate", ("(value % cast(3 as bigint)) bigint",), ("sum(value) bigint",)),
        Operator("Deduplicate", ("timestamp timestamp", "value bigint")),
    )
    assert fingerprint(counted(rates().dropDuplicates(["value", "timestamp"])), "into", "update") == one
    wanted = fingerprint(counted(rates().where("value > 5").dropDuplicates(["value", "timestamp"])), "into", "update")
    assert wanted.operators == one.operators
    assert wanted.plan != one.plan


def test_a_join_of_streams_keeps_state_and_one_with_a_table_does_not(spark: SparkSession) -> None:
    rate = spark.readStream.format("rate").load().withWatermark("timestamp", "1 minute")
    table = spark.range(3).withColumnRenamed("id", "value")
    assert fingerprint(rate.join(table, "value"), "into", "append").operators == ()
    other = spark.readStream.format("rate").load().withWatermark("timestamp", "1 minute").select("timestamp", "value")
    [join] = fingerprint(rate.join(other, ["value", "timestamp"]), "into", "append").operators
    assert join.kind == "Inner Join"
    assert "value = value" in join.keys[0]

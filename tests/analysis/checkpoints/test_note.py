"""What lies beside a checkpoint."""

import json
import random
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from tests.damaging import flipped

from penstock.analysis.checkpoints.note import (
    Fingerprint,
    Note,
    Operator,
    fingerprint,
    last_generation,
    note_of,
    plain,
    set_aside,
)
from penstock.core.errors import Misconfigured

QUERY = Fingerprint(
    ("things",), "totals", "update", (Operator("Aggregate", ("name string",), ("sum(n) bigint",)),), "ab"
)


def test_a_note_is_read_as_it_was_written(tmp_path: Path) -> None:
    note = Note({"things": "one"}, 3, {"things": {0: 7, 1: 9}}, QUERY)
    note.write(str(tmp_path / "q"))
    assert note_of(str(tmp_path / "q")) == note_of(f"file://{tmp_path}/q") == note


def test_where_there_is_none_a_first_life_begins(tmp_path: Path) -> None:
    assert note_of(str(tmp_path)) == Note()
    assert note_of("s3://bucket/q") == Note()
    Note().write("s3://bucket/q")


def test_a_note_of_before_tells_the_topics(tmp_path: Path) -> None:
    (tmp_path / "penstock.json").write_text(json.dumps({"things": "one", "format": "two"}))
    assert note_of(str(tmp_path)) == Note({"things": "one", "format": "two"})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format":2}',
        '{"format":2,"topics":{},"life":"x"}',
        '{"format":2,"topics":[],"life":0,"since":null,"query":null}',
        '{"format":3,"topics":{},"life":0,"since":null,"query":null}',
    ],
)
def test_a_note_that_cannot_be_read_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "penstock.json").write_text(text)
    with pytest.raises(Misconfigured, match=f"checkpoint {tmp_path}: its note penstock.json cannot be read"):
        note_of(str(tmp_path))


def test_a_checkpoint_is_set_aside_under_a_number_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "q"
    assert set_aside(path) is None
    (tmp_path / "q.7x").mkdir()
    for generation in range(3):
        Note(generation=generation).write(str(path))
        assert last_generation(str(path)) == generation
        assert set_aside(path) == tmp_path / f"q.{generation + 1}"
    assert last_generation(str(path)) == 2
    assert not path.exists()


@pytest.mark.parametrize("seed", range(20))
def test_a_note_that_has_changed_is_refused(tmp_path: Path, seed: int) -> None:
    note = Note({"things": "one"}, 3, {"things": {0: 7, 1: 9}}, QUERY)
    note.write(str(tmp_path))
    flipped(tmp_path / "penstock.json", random.Random(seed))
    with pytest.raises(Misconfigured):
        note_of(str(tmp_path))


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

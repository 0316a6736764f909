"""Spark's plan of a frame, gone through."""

from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from penstock.analysis.plans import analyzed, bare, columns, grouped, kind_of, nodes, text, watermarked


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

from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from penstock.analysis.engine import Engine
from penstock.analysis.kafka import KafkaWire
from penstock.pipeline.description import Pipeline
from penstock.pipeline.plan import Plan, plan
from penstock.pipeline.wiring import Wiring

COUNTS = "SELECT city, count(1) AS n, seen() FROM rsvps GROUP BY city"


def planned(app: Pipeline, folder: Path, spark: SparkSession) -> Plan:
    wiring, description = Wiring.read(folder, environ={}), app.describe()
    shapes = {name: channel.shape for name, channel in description.channels.items()}
    engine = Engine(spark, wiring.spark, KafkaWire("localhost:1"), str(folder / "checkpoints"), shapes)
    return plan(description, wiring, engine.knowing(description.queries))


def test_every_hop_has_a_guarantee_and_no_secret(spark: SparkSession, tmp_path: Path) -> None:
    app = Pipeline("meetups")
    app.channel("rsvps", schema="city STRING")
    app.source("ws://feed/rsvps", into="rsvps")
    app.source("ws://feed/more?token=secret", into="rsvps", name="deaf", resume=False, numbered=None)
    app.query("by_city", key="city", sql=COUNTS)
    app.store("by_city", "redis://:secret@host")
    app.page("by_city", chart={})
    found = planned(app, tmp_path, spark)
    assert [(hop.start, hop.by, hop.end, hop.guarantee) for hop in found.hops] == [
        ("ws://feed/rsvps", "websocket", "rsvps", "exactly once"),
        ("ws://feed/more", "websocket", "rsvps", "best effort"),
        ("rsvps", "query by_city", "by_city", "at least once"),
        ("by_city", "loader", "redis://host", "exactly once"),
        ("by_city", "feed", "browsers", "exactly once"),
    ]
    assert found.to_json()["queries"][0]["key"] == ("city",)


def test_the_first_query_that_can_is_in_real_time_and_each_says_why(spark: SparkSession, tmp_path: Path) -> None:
    app = Pipeline("meetups")
    app.channel("rsvps", schema="city STRING")
    app.query("first", key="city", sql=COUNTS)
    app.query("second", key="city", sql=COUNTS)
    found = planned(app, tmp_path, spark)
    assert [query.mode for query in found.queries] == ["real-time", "micro-batch"]
    assert all(query.why for query in found.queries)


def test_rows_without_an_identity_and_channels_without_a_schema_are_remarked(
    spark: SparkSession, tmp_path: Path
) -> None:
    def kept(log: DataFrame) -> DataFrame:
        return log.select("value", "origin")

    def bare(log: DataFrame) -> DataFrame:
        return log.select("value")

    app = Pipeline("logs")
    app.channel("log")
    app.query(key="value")(kept)
    app.query(key="value")(bare)
    found = planned(app, tmp_path, spark)
    assert [query.identity for query in found.queries] == ["origin of its record", "none"]
    assert [remark.split(";")[0] for remark in found.remarks] == [
        "query bare: its rows carry neither seen() nor origin",
        "channel log: it has no schema",
    ]

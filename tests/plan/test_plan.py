import inspect
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock import Keyed, seen
from penstock.analysis.connectors import KafkaConnector
from penstock.analysis.engine import Engine
from penstock.analysis.operators.statics import table
from penstock.core.errors import Misconfigured, SeveralMisconfigured
from penstock.pipeline.config import Config
from penstock.pipeline.pipeline import Pipeline
from penstock.plan.checks import Level
from penstock.plan.plan import Plan, plan

COUNTS = "SELECT city, count(1) AS n, seen() FROM rsvps GROUP BY city"


def planned(app: Pipeline, folder: Path, spark: SparkSession) -> Plan:
    config, description = Config.read(folder, environ={}), app.describe()
    shapes = {name: channel.shape for name, channel in description.channels.items()}
    tables = {static.name: table(spark, static) for static in description.statics}
    engine = Engine(spark, config.spark, KafkaConnector("localhost:1"), str(folder / "checkpoints"), shapes, tables)
    return plan(description, config, engine.knowing(description.queries))


def test_every_hop_has_a_guarantee_and_no_secret(spark: SparkSession, tmp_path: Path) -> None:
    app = Pipeline("meetups")
    app.channel("rsvps", schema="city STRING")
    app.source("ws://feed/rsvps", into="rsvps")
    app.source("ws://feed/more?token=secret", into="rsvps", name="deaf", resume=False, numbered=None)
    app.sql_query("by_city", key="city", sql=COUNTS)
    app.store("by_city", "redis://:secret@host")
    app.page("by_city", chart={})
    found = planned(app, tmp_path, spark)
    assert [(hop.start, hop.by, hop.end, hop.guarantee) for hop in found.hops] == [
        ("ws://feed/rsvps", "websocket", "rsvps", "exactly once"),
        ("ws://feed/more", "websocket", "rsvps", "best effort"),
        ("rsvps", "query by_city", "by_city", "exactly once"),
        ("by_city", "loader", "redis://host", "exactly once"),
        ("by_city", "feed", "browsers", "exactly once"),
    ]
    assert found.to_json()["queries"][0]["key"] == ("city",)


def test_a_chart_that_names_no_column_is_a_warning(spark: SparkSession, tmp_path: Path) -> None:
    app = Pipeline("meetups")
    app.channel("rsvps", schema="city STRING, at TIMESTAMP", event_time="at")
    app.source("ws://feed/rsvps", into="rsvps")
    window = "window(event_time, '1 minute')"
    counts = f"SELECT {window} AS window, city, count(1) AS n, seen() FROM rsvps GROUP BY {window}, city"
    app.sql_query("by_city", key=("window", "city"), sql=counts, watermark="1 minute")
    x, y = ({"field": name, "type": "nominal"} for name in ("window_start", "total"))
    doubled = [{"calculate": "datum.n * 2", "as": "total"}]
    app.page("by_city", chart={"mark": "bar", "transform": doubled, "encoding": {"x": x, "y": y}})
    assert not planned(app, tmp_path, spark).findings
    app.page("by_city", title="wrong", chart={"mark": "bar", "encoding": {"x": {"field": "window.start"}, "y": y}})
    found = planned(app, tmp_path, spark)
    assert [(one.level, one.place) for one in found.findings] == [(Level.WARNING, "page wrong")] * 2
    assert '"window_start"' in found.findings[1].fix
    assert not found.wrong


def test_the_first_query_that_can_is_in_real_time_and_each_says_why(spark: SparkSession, tmp_path: Path) -> None:
    app = Pipeline("meetups")
    app.channel("rsvps", schema="city STRING")
    app.sql_query("first", key="city", sql=COUNTS)
    app.sql_query("second", key="city", sql=COUNTS)
    found = planned(app, tmp_path, spark)
    assert [query.mode for query in found.queries] == ["real-time", "micro-batch"]
    assert all(query.why for query in found.queries)
    assert {query.checkpoint for query in found.queries} == {"new"}


def test_a_checkpoint_that_does_not_fit_is_an_error_with_the_fix(spark: SparkSession, tmp_path: Path) -> None:
    app = Pipeline("meetups")
    app.channel("rsvps", schema="city STRING")
    app.source("ws://feed/rsvps", into="rsvps")
    app.sql_query("by_city", key="city", sql=COUNTS)
    assert not planned(app, tmp_path, spark).findings
    (tmp_path / "checkpoints/by_city").mkdir(parents=True)
    (tmp_path / "checkpoints/by_city/penstock.json").write_text("{")
    found = planned(app, tmp_path, spark)
    (finding,) = found.findings
    assert found.wrong
    assert finding.level is Level.ERROR
    assert "by_city" in finding.place
    assert "--new-checkpoint by_city" in finding.fix
    assert found.to_json()["findings"][0]["level"] == "error"


def test_all_queries_that_cannot_work_are_told_at_once(spark: SparkSession, tmp_path: Path) -> None:
    app = Pipeline("meetups")
    app.channel("rsvps", schema="city STRING")
    app.sql_query("one", key="city", sql=COUNTS.replace("GROUP BY city", "GROUP BY ciy"))
    app.sql_query("right", key="city", sql=COUNTS)
    app.sql_query("other", key="town", sql=COUNTS)
    with pytest.raises(SeveralMisconfigured) as error:
        planned(app, tmp_path, spark)
    assert [one.location.partition(",")[0] for one in error.value.errors] == ["query one", "query other"]


def nothing_returned(rsvps: DataFrame) -> None:
    rsvps.groupBy("city").agg(seen())


def bad_window(rsvps: DataFrame) -> DataFrame:
    return rsvps.groupBy(F.window("event_time", "10 secnds")).agg(seen())


def bad_type(rsvps: DataFrame) -> DataFrame:
    return rsvps.groupBy("city").agg(F.sum(F.col("city") > 1).alias("n"), seen())


def right(rsvps: DataFrame) -> DataFrame:
    return rsvps.groupBy("city").agg(seen())


@pytest.mark.parametrize(
    ("schema", "event_time", "function", "options", "offset"),
    [
        ("city STRNG", None, right, {}, None),
        ("city STRING, at BIGINT", "timestamp_millis(att)", right, {}, None),
        ("city STRING", None, nothing_returned, {}, 0),
        ("city STRING", None, bad_window, {}, 1),
        ("city STRING", None, bad_type, {}, 1),
        ("city STRING", None, right, {"where": "cty = 'Ulm'"}, 0),
        ("city STRING", None, right, {"where": "length(city)"}, 0),
        ("city STRING", None, right, {"key": "town"}, 0),
    ],
    ids=["type", "event time", "nothing", "window", "column type", "where", "no condition", "key"],
)
def test_a_mistake_is_told_with_its_file_and_line(
    spark: SparkSession, tmp_path: Path, schema: str, event_time: str | None, function: Any, options: Any, offset: Any
) -> None:
    app = Pipeline("meetups")
    app.channel("rsvps", schema=schema, event_time=event_time)
    declared = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    app.query("by_city", **{"key": "city", **options})(function)
    with pytest.raises(Misconfigured) as error, app.describe().locating():
        planned(app, tmp_path, spark)
    line = declared if offset is None else function.__code__.co_firstlineno + offset
    assert error.value.location.startswith(f"test_plan.py:{line}, ")
    assert "_fits" not in error.value.problem


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
        "query bare: its rows have neither seen() nor origin",
        "channel log: it has no schema",
    ]


def test_what_would_count_twice_is_remarked(spark: SparkSession, tmp_path: Path) -> None:
    app = Pipeline("meetups")
    app.channel("rsvps", schema="city STRING", unique="number")
    app.channel("more", schema="city STRING")
    both = "(SELECT city, origin FROM rsvps UNION ALL SELECT city, origin FROM more)"
    app.sql_query("gated", key="city", watermark="1 second", sql=COUNTS)
    app.sql_query("counted", key="city", sql=COUNTS)
    app.sql_query("both", key="city", watermark="1 second", sql=COUNTS.replace("rsvps", both))
    found = planned(app, tmp_path, spark)
    assert [remark for remark in found.remarks if "duplicates" in remark] == [
        "query counted: without watermark= it cannot recognize duplicates in its channel.",
        "query both: it reads several channels, and reads duplicates in them twice.",
    ]


def test_a_pipeline_gets_the_delivery_that_it_asks_for_or_is_told(spark: SparkSession, tmp_path: Path) -> None:
    def hops(delivery: Literal["exactly once", "at least once", "at most once"]) -> tuple[list[str], list[str]]:
        app = Pipeline("logs", delivery=delivery)
        app.channel("log", schema="line STRING")
        app.source("ws://feed/log", into="log", numbered=None)
        app.sql_query("bare", key="line", sql="SELECT line FROM log")
        app.store("bare", "redis://host")
        found = planned(app, tmp_path, spark)
        assert {hop.wanted for hop in found.hops} == {delivery}
        return [hop.guarantee for hop in found.hops], [remark for remark in found.remarks if "weaker" in remark]

    given, weaker = hops("exactly once")
    assert given == ["best effort", "at least once", "exactly once"]
    assert [remark.split(" is weaker than exactly once, which is required")[1][:20] for remark in weaker] == [
        ": add seen() to its ",
        "; use a feed that ca",
    ]
    given, weaker = hops("at least once")
    assert (given, len(weaker)) == (["best effort", "at least once", "exactly once"], 1)
    assert hops("at most once") == (["at most once", "at most once", "exactly once"], [])


def test_rows_that_no_record_numbers_are_promised_less(spark: SparkSession, tmp_path: Path) -> None:
    class Last(Keyed):
        schema = "line STRING"

        def process(self, key: str, row: Any) -> Any:
            return {}

    class Waiting(Last):
        def on_timer(self, key: str, at: datetime) -> Any:
            return {}

    app = Pipeline("logs")
    app.channel("log", schema="line STRING")
    app.query("last", key="line")(lambda log: Last.over(log, "line"))
    app.query("waiting", key="line")(lambda log: Waiting.over(log, "line"))
    found = planned(app, tmp_path, spark)
    assert [hop.guarantee for hop in found.hops] == ["exactly once", "at least once"]
    assert "the first row of a record has its number" in found.hops[0].why
    (weaker,) = [remark for remark in found.remarks if "weaker" in remark]
    assert weaker.startswith(
        "query waiting: rows may be written again after a crash, and rows of timers have no record"
    )


def test_static_tables_are_named(spark: SparkSession, tmp_path: Path) -> None:
    app = Pipeline("meetups")
    app.channel("rsvps", schema="city STRING")
    app.static("cities", lambda: [{"city": "Utrecht"}], schema="city STRING", refresh="1 minute")
    app.sql_query("known", key="city", sql="SELECT city, r.origin FROM rsvps r JOIN cities USING (city)")
    found = planned(app, tmp_path, spark)
    assert [(hop.start, hop.by, hop.end, hop.why) for hop in found.hops if hop.by.startswith("table")] == [
        ("a function", "table cities", "query known", "it is read at the start and every 60 s")
    ]


def test_the_class_of_each_query_and_the_slots_of_all_are_told(spark: SparkSession, tmp_path: Path) -> None:
    app = Pipeline("meetups")
    app.channel("rsvps", schema="city STRING", partitions=3)
    app.sql_query("by_city", key="city", sql=COUNTS)
    app.sql_query("more", key="city", sql="SELECT city, origin FROM rsvps")
    (tmp_path / "penstock.toml").write_text('[spark]\nmaster = "local[12]"\nreal_time_queries = 2\n')
    found = planned(app, tmp_path, spark).to_json()
    assert [(query["cost"], query["price"]) for query in found["queries"]] == 2 * [
        ("jvm", "no Python: everything runs in the JVM")
    ]
    assert found["slots"] == {"fixed": (3 + 2) + 3, "waiting": 3}
    (tmp_path / "penstock.toml").write_text('[spark]\nmaster = "local[12]"\nshuffle_partitions = 10\n')
    with pytest.raises(
        Misconfigured, match=r"the queries need 14 slots at once, and local\[12\] has 12; use more slots"
    ):
        planned(app, tmp_path, spark)

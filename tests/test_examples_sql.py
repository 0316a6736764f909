"""The example in SQL: its queries as batches over rows, and as Spark would run them over streams."""

from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from penstock.analysis.connectors import KafkaConnector
from penstock.analysis.engine import Engine
from penstock.analysis.settings import SparkSettings
from penstock.pipeline.load import load
from penstock.pipeline.pipeline import Pipeline
from penstock.plan.plan import real_time_queries
from penstock.testing.frames import BEGIN, answer, frame, rows

FOLDER = Path(__file__).parent.parent / "examples" / "sql"
NOON = 1_700_000_000_000


def pipeline() -> Pipeline:
    """A pipeline with the queries of the example."""
    found = load(FOLDER / "pipeline.py")
    app = Pipeline(found.name)
    channel = found.channels["rsvps"]
    app.channel("rsvps", schema=channel.schema, event_time=channel.event_time)
    app.sql_queries(str(FOLDER / "queries"))
    return app


def rsvp(number: int, after: float, response: str = "yes", guests: int = 0, member: int = 1) -> dict[str, Any]:
    return {
        "rsvp_id": number,
        "response": response,
        "guests": guests,
        "mtime": NOON + round(after * 1_000),
        "member": {"member_id": member, "member_name": f"m{member}"},
        "event": {"event_id": "e", "event_name": "dance"},
        "group": {"group_city": "Oslo", "group_country": "no"},
    }


def test_each_query_of_the_example_gives_its_rows(spark: SparkSession) -> None:
    app = pipeline()
    rsvps = frame(
        spark,
        app.describe().channels["rsvps"],
        rsvp(1, 0, guests=2),
        rsvp(2, 1, member=2),
        rsvp(3, 15, "no"),
        rsvp(4, 700, "no", member=2),
    ).coalesce(1)
    assert rows(answer(app, "answers", rsvps), "city", "response", "answers", "seen.count") == [
        ("Oslo", "no", 2, 2),
        ("Oslo", "yes", 2, 2),
    ]
    assert rows(answer(app, "people", rsvps), "country", "people", "seen.count") == [("no", 4, 2)]
    assert rows(answer(app, "bursts", rsvps), "country", "answers") == [("no", 1), ("no", 1), ("no", 2)]
    changed = answer(app, "changed_minds", rsvps)
    assert rows(changed, "yes", "no", "member", "seen.count", "seen.newest") == [(1, 3, "m1", 2, BEGIN + 2_000_000)]


def test_spark_runs_each_of_them_over_streams(spark: SparkSession) -> None:
    description = pipeline().describe()
    shapes = {name: channel.shape for name, channel in description.channels.items()}
    engine = Engine(spark, SparkSettings(real_time_queries=4), KafkaConnector("127.0.0.1:1"), "/nowhere", shapes)
    verdicts = engine.verdicts(description.queries)
    assert {name: verdict.mode for name, verdict in verdicts.items()} == {
        "answers": "micro-batch",
        "bursts": "micro-batch",
        "changed_minds": "micro-batch",
        "people": "real-time",
    }
    assert verdicts["changed_minds"].why.endswith("it reads one channel twice, which runs in micro-batches only")
    assert real_time_queries(description, engine, verdicts) == {"people": 1}

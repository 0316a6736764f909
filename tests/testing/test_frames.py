from datetime import UTC, datetime
from decimal import Decimal

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from penstock.analysis.query import Shape
from penstock.core.errors import Misconfigured, Refused
from penstock.core.record import Origin
from penstock.pipeline.description import Channel
from penstock.testing.frames import BEGIN, frame, rows


def test_rows_come_as_the_next_records_of_one_sender(spark: SparkSession) -> None:
    made = frame(spark, "name STRING, guests BIGINT", {"name": "a", "guests": 2}, {"name": "b"})
    assert made.columns == ["name", "guests", "origin", "event_time"]
    assert rows(made, "name", "guests", "origin", "unix_micros(event_time)") == [
        ("a", 2, ("test", 1, 1, BEGIN, 0, 0, 0), BEGIN),
        ("b", None, ("test", 1, 2, BEGIN + 1_000_000, 0, 0, 1), BEGIN + 1_000_000),
    ]


def test_a_row_may_tell_its_own_origin(spark: SparkSession) -> None:
    made = frame(spark, "name STRING", {"name": "a", "origin": Origin("phone", 3, 9, 77)})
    told = ("origin.sender", "origin.epoch", "origin.seq", "origin.time", "unix_micros(event_time)")
    assert rows(made, *told) == [("phone", 3, 9, 77, 77)]


def test_the_event_time_is_that_of_the_channel(spark: SparkSession) -> None:
    """However far ahead: nobody tells when a row of a test arrived."""
    channel = Channel("rsvps", "mtime BIGINT", "timestamp_millis(mtime)")
    made = frame(spark, channel, {"mtime": 4_000_000_000_000})
    assert rows(made, "unix_millis(event_time)") == [(4_000_000_000_000,)]


def test_a_row_that_does_not_fit_its_channel_is_refused_with_its_number(spark: SparkSession) -> None:
    with pytest.raises(Refused, match=r'^row 2 of test is refused: the field "guests" is missing or null$'):
        frame(spark, "guests BIGINT NOT NULL", {"guests": 1}, {"gests": 2})
    with pytest.raises(Refused, match='the field "guests" is not bigint'):
        frame(spark, "guests BIGINT", {"guests": "many"})


def test_values_of_python_become_values_of_spark(spark: SparkSession) -> None:
    ddl = "at TIMESTAMP, price DECIMAL(9,2), tags ARRAY<STRING>, place STRUCT<lat: DOUBLE>, by MAP<STRING, BIGINT>"
    row = {
        "at": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        "price": Decimal("1.50"),
        "tags": ["b", "a"],
        "place": {"lat": 52.1},
        "by": {"x": 1},
    }
    assert rows(frame(spark, ddl, row), "string(at)", "price", "tags", "place.lat", "by") == [
        ("2026-01-02 03:04:05", Decimal("1.50"), ["b", "a"], 52.1, {"x": 1})
    ]


def test_a_channel_without_a_schema_holds_text(spark: SparkSession) -> None:
    made = frame(spark, Shape("log"), {"value": "not JSON"})
    assert made.columns == ["value", "origin", "event_time"]
    assert rows(made, "value") == [("not JSON",)]


def test_a_frame_may_be_empty(spark: SparkSession) -> None:
    assert rows(frame(spark, "name STRING")) == []


def test_the_result_of_a_query_wants_its_columns_told(spark: SparkSession) -> None:
    with pytest.raises(Misconfigured, match="channel by_city: its columns follow from the query answers; give them as"):
        frame(spark, Channel("by_city", result_of="answers"), {"city": "Utrecht"})


def test_rows_are_sorted_nulls_first_whatever_they_hold(spark: SparkSession) -> None:
    made = spark.range(3).select(
        F.when(F.col("id") != 1, 10 - F.col("id")).alias("number"),
        F.struct(F.when(F.col("id") != 0, F.col("id")).alias("inner")).alias("struct"),
        F.create_map(F.lit("k"), "id").alias("map"),
    )
    assert rows(made) == [(None, (1,), {"k": 1}), (8, (2,), {"k": 2}), (10, (None,), {"k": 0})]
    assert rows(made, "map", "number") == [({"k": 0}, 10), ({"k": 1}, None), ({"k": 2}, 8)]

"""Windows by count, and what is told of windows. As streams they run in tests/analysis/killed."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from tests.analysis.killed.queries import sessions, tumbling
from tests.analysis.operators.oracles import DDL, EVENT_TIME

from penstock import average, count_window, seen, total
from penstock.analysis.connectors import KafkaConnector
from penstock.analysis.engine import Engine
from penstock.analysis.operators.windows import Kept, open_from, windows
from penstock.analysis.query import Emit, Query, Shape
from penstock.analysis.settings import SparkSettings
from penstock.core.errors import Misconfigured
from penstock.testing.frames import frame, rows

Build = Callable[[DataFrame], DataFrame]


def fours(frame: DataFrame) -> DataFrame:
    return count_window(frame, 4, key="name")


SECONDS = timedelta(seconds=1)


def test_why_windows_do_not_run_in_real_time_is_told(spark: SparkSession, tmp_path: Path) -> None:
    shape = Shape("events", DDL, EVENT_TIME)
    engine = Engine(spark, SparkSettings(), KafkaConnector("127.0.0.1:1"), str(tmp_path), {"events": shape})

    def why(build: Build, emit: Emit = Emit.CHANGE) -> str | None:
        query = Query("q", ("events",), "q", ("window",), build, watermark=SECONDS, emit=emit)
        return engine.objection(query)

    assert why(sessions) == "sessions are written when they are final"
    assert why(fours) == "it keeps state in Python"
    assert why(tumbling, Emit.FINAL) == "its rows come when they are final"


def test_windows_by_count_span_records_of_their_key(spark: SparkSession) -> None:
    names = ["a", "b", None]
    events = frame(spark, "name STRING, n BIGINT", *({"name": names[n % 3], "n": n} for n in range(13)))
    windows_of = count_window(events, 2, key=["name"])
    assert windows_of.columns == ["name", "window", "rows", "seen"]
    spans = ("name", "window.number", "window.first", "window.last", "rows.n", "seen.count")
    assert rows(windows_of, *spans) == [
        (None, 1, 1, 2, [2, 5], 2),
        (None, 2, 3, 4, [8, 11], 2),
        ("a", 1, 1, 2, [0, 3], 2),
        ("a", 2, 3, 4, [6, 9], 2),
        ("b", 1, 1, 2, [1, 4], 2),
        ("b", 2, 3, 4, [7, 10], 2),
    ]


def test_windows_by_count_keep_every_column_as_it_is(spark: SparkSession) -> None:
    """Maps, times to the microsecond, nulls: what a record holds is in its window, and its mark as in `seen()`."""
    ddl = "name STRING, m MAP<STRING, BIGINT>, t TIMESTAMP, d DECIMAL(9, 2), s STRUCT<a: ARRAY<INT>>, nothing INT"
    values = {"m": {"x": 1}, "t": "2024-01-02T03:04:05.678901Z", "d": 1.25, "s": {"a": [1, None]}}
    events = frame(spark, ddl, {"name": None, **values}, {"name": "b"})
    (window,) = count_window(events, 2).collect()
    assert window["rows"] == events.drop("origin").collect()
    assert window["seen"] == events.agg(seen()).collect()[0]["seen"]


def test_records_of_several_partitions_are_merged_by_event_time(spark: SparkSession) -> None:
    """Within a partition, the order is that of its records, whatever their times are."""
    told = [(1, 50, 0), (2, 10, 1), (3, 20, 0), (4, 60, 1), (5, 70, 1)]
    events = frame(
        spark, "n BIGINT, at BIGINT, place INT", *(dict(zip(("n", "at", "place"), one, strict=True)) for one in told)
    )
    moved = events.withColumn("event_time", F.timestamp_millis("at")).withColumn(
        "origin", F.col("origin").withField("partition", F.col("place"))
    )
    assert rows(count_window(moved, 4, partial=True), "rows.n") == [([2, 1, 3, 4],), ([5],)]


def test_no_more_is_kept_than_open_windows_need() -> None:
    """However batches fall, the windows are the same, and what is left never exceeds a window."""
    records = [Kept(str(n), n, n, n) for n in range(1, 41)]
    for size, slide in ((1, 1), (4, 4), (5, 2), (6, 5)):
        for step in (1, 3, 7, 40):
            given: dict[int, tuple[int, int, list[str]]] = {}
            left: list[Kept] = []
            for count in range(0, 40, step):
                fresh = records[count : count + step]
                known = [*left, *fresh]
                for one in windows(count, len(fresh), known, size, slide, partial=False):
                    given[one.number] = one.first, one.last, [kept.row for kept in one.records]
                begin, after = open_from(count, size, slide), open_from(count + len(fresh), size, slide)
                left = known[after - begin :]
                assert len(left) < size
            firsts = range(1, 40 - size + 2, slide)
            assert given == {
                number: (first, first + size - 1, [str(n) for n in range(first, first + size)])
                for number, first in enumerate(firsts, start=1)
            }


def test_sums_and_means_of_arrays_leave_nulls_out(spark: SparkSession) -> None:
    arrays = spark.sql("SELECT * FROM VALUES (array(1, NULL, 2)), (array(NULL)), (CAST(array() AS ARRAY<INT>)) AS t(a)")
    found = arrays.select(total("a", "bigint").alias("t"), total("a").alias("d"), average("a").alias("m")).collect()
    assert [tuple(row) for row in found] == [(3, 3.0, 1.5), (None, None, None), (None, None, None)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"size": 0}, "size is 0"),
        ({"size": 2, "slide": 3}, "use a slide from 1 to 2"),
        ({"size": 2, "slide": 0}, "use a slide from 1 to 2"),
        ({"size": 2, "key": "nam"}, "key= names nam; name columns of its frame: name, event_time"),
    ],
)
def test_windows_by_count_that_cannot_be_are_refused(spark: SparkSession, arguments: dict[str, Any], said: str) -> None:
    events = frame(spark, "name STRING")
    with pytest.raises(Misconfigured, match=said):
        count_window(events, **arguments)


def test_windows_by_count_need_to_know_the_place_of_records(spark: SparkSession) -> None:
    with pytest.raises(Misconfigured, match="its frame has no column origin and event_time"):
        count_window(frame(spark, "name STRING").select("name"), 2)
    with pytest.raises(Misconfigured, match=r"its frame is a table, .* may have no time; .* tables\.latest"):
        count_window(frame(spark, "name STRING").withColumn("_deleted", F.lit(False)), 2)

"""Streams joined with streams: what a row holds, and what is refused. As streams they run in tests/analysis/killed."""

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock import interval_join
from penstock.analysis.connectors import KafkaConnector
from penstock.analysis.engine import Engine
from penstock.analysis.query import Query, Shape
from penstock.analysis.settings import SparkSettings
from penstock.core.errors import Misconfigured
from penstock.core.record import Origin
from penstock.testing.frames import BEGIN, frame, rows

SHOWN, CLICKED = "ad STRING, banner BIGINT", "ad STRING, page STRING"


def ads(spark: SparkSession) -> tuple[DataFrame, DataFrame]:
    """Three impressions a second apart; ad a is clicked at once and an hour later, ad c by nobody."""
    shown = frame(spark, SHOWN, *({"ad": ad, "banner": n} for n, ad in enumerate("abc")))
    clicks = [("a", 0), ("b", 30), ("a", 3_600), ("x", 5)]
    told = [
        {"ad": ad, "page": f"p{n}", "origin": Origin("clicks", 1, n, BEGIN + second * 1_000_000)}
        for n, (ad, second) in enumerate(clicks, start=1)
    ]
    return shown, frame(spark, CLICKED, *told)


def test_a_row_holds_both_sides_and_its_version_tells_a_match(spark: SparkSession) -> None:
    shown, clicks = ads(spark)
    found = interval_join(shown=shown, click=clicks, key="ad", within="1 minute", how="full")
    assert found.columns == ["ad", "shown", "click", "event_time", "origin", "seen"]
    told = ("ad", "shown.banner", "click.page", "seen.count", "origin.sender", "(seen.newest - 1700000000000000) / 1e6")
    assert rows(found, *told) == [
        ("a", None, "p3", 1, "clicks", 3_600.0),
        ("a", 0, "p1", 2, "test", 0.0),
        ("b", 1, "p2", 2, "test", 30.0),
        ("c", 2, None, 1, "test", 2.0),
        ("x", None, "p4", 1, "clicks", 5.0),
    ]
    assert rows(found.where("click IS NULL"), "ad") == [("c",)]
    alone = rows(found.where("ad = 'c'"), "seen.mark")
    assert alone == rows(shown.where("ad = 'c'"), "xxhash64(origin.sender, origin.epoch, origin.seq)")


def test_the_bounds_of_the_time_belong_to_it(spark: SparkSession) -> None:
    shown, clicks = ads(spark)

    def pages(within: str | tuple[str, str]) -> list[tuple[Any, ...]]:
        return rows(interval_join(shown=shown, click=clicks, key=["ad"], within=within), "click.page")

    assert pages("29 seconds") == [("p1",), ("p2",)]
    assert pages("28.999 seconds") == [("p1",)]
    assert pages("1 hour") == [("p1",), ("p2",), ("p3",)]
    turned = interval_join(click=clicks, shown=shown, key="ad", within=("1 hour", "0 seconds"))
    assert rows(turned, "click.page") == [("p1",), ("p2",), ("p3",)]


def test_a_semi_join_keeps_the_first_side_as_it_is(spark: SparkSession) -> None:
    shown, clicks = ads(spark)
    found = interval_join(shown=shown, click=clicks, key="ad", within="2 hours", how="semi")
    assert found.columns == shown.columns
    assert rows(found, "ad", "origin.seq") == [("a", 1), ("b", 2)]


def test_a_stream_is_joined_with_itself(spark: SparkSession) -> None:
    shown, _ = ads(spark)
    found = interval_join(one=shown, other=shown, key="ad", within="1 second", how="left")
    assert rows(found, "one.banner", "other.banner", "seen.count") == [(0, 0, 2), (1, 1, 2), (2, 2, 2)]


def test_what_cannot_be_joined_is_told_with_the_fix(spark: SparkSession, tmp_path: Path) -> None:
    shown, clicks = ads(spark)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"shown": shown}, r"interval_join\(shown=…\): it joins 1 streams"),
        ({"shown": shown, "click": clicks, "how": "outer"}, 'how is "outer"; the choices are inner, left'),
        ({"shown": shown, "click": clicks, "key": ()}, "key names no column"),
        ({"shown": shown, "click": clicks, "key": "banner"}, "click has no column banner; it has ad, page"),
        ({"shown": shown, "ad": clicks}, '"ad" is a column of the result already'),
        ({"shown": shown, "click": clicks, "within": "soon"}, "within is 'soon': \"soon\" is not a duration"),
        ({"shown": shown, "click": clicks, "within": ("1 s",)}, "within is"),
        ({"shown": shown, "click": clicks.withColumn("_deleted", F.lit(True))}, r"click is a table, .* tables\.lookup"),
    ]
    for options, said in wrong:
        with pytest.raises(Misconfigured, match=said):
            interval_join(**{"key": "ad", "within": "1 minute", **options})
    shapes = {"shown": Shape("shown", SHOWN), "clicks": Shape("clicks", CLICKED)}
    engine = Engine(spark, SparkSettings(), KafkaConnector("127.0.0.1:1"), str(tmp_path), shapes)

    def clicked(shown: DataFrame, clicks: DataFrame) -> DataFrame:
        return interval_join(shown=shown, click=clicks, key="ad", within="1 minute")

    query = Query("clicked", ("shown", "clicks"), "clicked", ("ad",), clicked)
    with pytest.raises(Misconfigured, match=r'it has no watermark.*watermark="10 minutes"'):
        engine.verdicts([query])

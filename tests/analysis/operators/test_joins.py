"""Streams joined with streams: a real broker, a real Spark, and the oracle in plain Python."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from tests.analysis.operators.join_oracles import Event, Pair, generate, in_time
from tests.analysis.operators.join_oracles import joined as oracle
from tests.channels.traffic import read, send

from penstock import joined
from penstock.analysis.books import Books, standing
from penstock.analysis.checkpoints.batches import batches, covered
from penstock.analysis.engine import Engine
from penstock.analysis.kafka import KafkaWire
from penstock.analysis.launching import failed, launch
from penstock.analysis.query import Mode, Query, Shape
from penstock.analysis.settings import SparkSettings
from penstock.audit.account import Outcome
from penstock.channels.kafka import Kafka
from penstock.clock import SystemClock, duration
from penstock.contracts import Topic
from penstock.errors import Misconfigured
from penstock.record import Origin, Record
from penstock.testing.frames import BEGIN, frame, rows

Fresh = Callable[[str], str]
Eventually = Callable[..., None]

LIVE = ("inner", "full", "semi")
HOWS = (*LIVE, "left", "right")
SHOWN, CLICKED = "ad STRING, banner BIGINT", "ad STRING, page STRING"


def pair(how: str) -> Callable[[DataFrame, DataFrame], DataFrame]:
    """A query over two channels of events, keyed by the ids of both."""

    def build(lefts: DataFrame, rights: DataFrame) -> DataFrame:
        found = joined(left=lefts, right=rights, on="key", within=("2 seconds", "20 seconds"), how=how)
        if how == "semi":
            return found.select(F.col("id").alias("a"), F.lit(None).cast("bigint").alias("b"), "key", "origin")
        return found.select(F.col("left.id").alias("a"), F.col("right.id").alias("b"), *found.columns)

    return build


def record(event: Event, sender: str) -> Record:
    value = json.dumps({"id": event.id, "key": event.key, "at": event.at}).encode()
    return Record(value, Origin(sender, 1, event.id, event.at * 1_000), event.key.encode())


def placed(kafka: Kafka, channel: str, count: int) -> dict[tuple[int, int], Event]:
    return {
        (entry.partition, entry.offset): Event(**json.loads(entry.value or b""))
        for entry in read(kafka, channel, count)
    }


def written(kafka: Kafka, channel: str) -> dict[Pair, int]:
    """What a store would hold: by key, the highest version. Of a semi join, the number of the record."""
    found: dict[Pair, int] = {}
    for entry in read(kafka, channel, sum(end for _, end in kafka.bounds(channel).values())):
        row, headers = json.loads(entry.value or b""), dict(entry.headers)
        version = int(headers.get("version", headers.get("seq", b"")))
        found[row["a"], row["b"]] = max(version, found.get((row["a"], row["b"]), 0))
    return found


def test_each_join_gives_what_the_oracle_says(
    spark: SparkSession, kafka: Kafka, fresh: Fresh, eventually: Eventually, tmp_path: Path
) -> None:
    """Over the same two streams: live, in its account, and as batches over the log. A full join is both outer ones."""
    left, right = fresh("left"), fresh("right")
    into = {how: fresh(how) for how in LIVE}
    kafka.ensure([Topic(left, 2), Topic(right), *map(Topic, into.values())])
    ddl, at = "id BIGINT NOT NULL, key STRING, at BIGINT NOT NULL", "timestamp_millis(at)"
    shapes = {name: Shape(name, ddl, at) for name in (left, right)}
    engine = Engine(spark, SparkSettings(every="500 ms"), KafkaWire(kafka.servers), str(tmp_path), shapes)
    queries = {
        how: Query(how, (left, right), into.get(how, how), ("a", "b"), pair(how), Mode.MICRO_BATCH, duration("5 s"))
        for how in HOWS
    }
    lefts, rights = generate(seed=7, count=120)
    # Long after all others, so that the watermark passes those; then one that is late however the batches fall.
    closing = Event(1_000, "closing", max(one.at for one in (*lefts, *rights)) + 300_000)
    belated = replace(lefts[0], id=1_001)
    stood = standing(engine, queries["full"], kafka.bounds)
    running = {how: launch(engine, queries[how], 0, {})[0] for how in LIVE}
    books = Books(engine, queries["full"], running["full"], None, stood, kafka, SystemClock())

    def taken() -> None:
        """Wait until all have read what there is."""
        ends = {name: {one: end for one, (_, end) in kafka.bounds(name).items()} for name in (left, right)}

        def all_of_it() -> bool:
            if error := failed(running.values()):
                raise error
            return all(covered(engine.checkpoint(how)) == ends for how in LIVE)

        def told() -> bool:
            books.look()
            return {name: share.until for name, share in books.account.shares.items()} == ends

        eventually(all_of_it, 180)
        eventually(told, 180)

    for part in range(2):
        for channel, events in ((left, lefts), (right, rights)):
            some = events[part * len(events) // 2 : (part + 1) * len(events) // 2]
            send(kafka, channel, [record(event, channel) for event in some])
        taken()
    for last in (closing, belated):
        for channel in (left, right):
            send(kafka, channel, [record(last, channel)])
        taken()

    places = placed(kafka, left, len(lefts) + 2), placed(kafka, right, len(rights) + 2)
    for how in LIVE:
        known = batches(engine.checkpoint(how))
        (on_time, late), (rest, too_late) = in_time(places[0], left, known), in_time(places[1], right, known)
        expected = oracle(on_time, rest, 2_000, 20_000, how)
        eventually(lambda how=how, expected=expected: set(written(kafka, into[how])) == expected)
        if how != "semi":
            versions = written(kafka, into[how])
            assert versions == {key: 1 if None in key else 2 for key in versions}
        if how == "full":
            counted = {name: share.outcomes[Outcome.LATE] for name, share in books.account.shares.items()}
            assert counted == {left: len(late), right: len(too_late)}
            assert min(counted.values()) > 0
            assert not books.account.guessed
        running[how].stop()
    for how in HOWS:
        recomputed = engine.recompute(queries[how]).select("a", "b").collect()
        everything = oracle(places[0].values(), places[1].values(), 2_000, 20_000, how)
        assert {(row["a"], row["b"]) for row in recomputed} == everything


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
    found = joined(shown=shown, click=clicks, on="ad", within="1 minute", how="full")
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
        return rows(joined(shown=shown, click=clicks, on=["ad"], within=within), "click.page")

    assert pages("29 seconds") == [("p1",), ("p2",)]
    assert pages("28.999 seconds") == [("p1",)]
    assert pages("1 hour") == [("p1",), ("p2",), ("p3",)]
    turned = joined(click=clicks, shown=shown, on="ad", within=("1 hour", "0 seconds"))
    assert rows(turned, "click.page") == [("p1",), ("p2",), ("p3",)]


def test_a_semi_join_keeps_the_first_side_as_it_is(spark: SparkSession) -> None:
    shown, clicks = ads(spark)
    found = joined(shown=shown, click=clicks, on="ad", within="2 hours", how="semi")
    assert found.columns == shown.columns
    assert rows(found, "ad", "origin.seq") == [("a", 1), ("b", 2)]


def test_a_stream_is_joined_with_itself(spark: SparkSession) -> None:
    shown, _ = ads(spark)
    found = joined(one=shown, other=shown, on="ad", within="1 second", how="left")
    assert rows(found, "one.banner", "other.banner", "seen.count") == [(0, 0, 2), (1, 1, 2), (2, 2, 2)]


def test_what_cannot_be_joined_is_told_with_the_way_out(spark: SparkSession, tmp_path: Path) -> None:
    shown, clicks = ads(spark)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"shown": shown}, r"joined\(shown=…\): it joins 1 streams"),
        ({"shown": shown, "click": clicks, "how": "outer"}, 'how is "outer"; the choices are inner, left'),
        ({"shown": shown, "click": clicks, "on": ()}, "on names no column"),
        ({"shown": shown, "click": clicks, "on": "banner"}, "click has no column banner; it has ad, page"),
        ({"shown": shown, "ad": clicks}, '"ad" is a column of the result already'),
        ({"shown": shown, "click": clicks, "within": "soon"}, "within is 'soon': \"soon\" is not a duration"),
        ({"shown": shown, "click": clicks, "within": ("1 s",)}, "within is"),
        ({"shown": shown, "click": clicks.withColumn("_deleted", F.lit(True))}, r"click is a table, .* tables\.lookup"),
    ]
    for options, said in wrong:
        with pytest.raises(Misconfigured, match=said):
            joined(**{"on": "ad", "within": "1 minute", **options})
    shapes = {"shown": Shape("shown", SHOWN), "clicks": Shape("clicks", CLICKED)}
    engine = Engine(spark, SparkSettings(), KafkaWire("127.0.0.1:1"), str(tmp_path), shapes)

    def clicked(shown: DataFrame, clicks: DataFrame) -> DataFrame:
        return joined(shown=shown, click=clicks, on="ad", within="1 minute")

    query = Query("clicked", ("shown", "clicks"), "clicked", ("ad",), clicked)
    with pytest.raises(Misconfigured, match=r'nothing says how late its records may be.*watermark="10 minutes"'):
        engine.verdicts([query])

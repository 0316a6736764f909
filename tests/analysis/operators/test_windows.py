"""Windows by time and by count, in batches and in real time, against oracles in plain Python."""

import json
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Self

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from tests.analysis.operators import oracles
from tests.analysis.operators.oracles import DDL, EVENT_TIME, Event, Placed, generate, in_batches, placed
from tests.channels.traffic import send

from penstock import average, by_count, seen, total
from penstock.analysis.checkpoints.batches import batches, covered
from penstock.analysis.compare import Row as Result
from penstock.analysis.compare import key_of, put
from penstock.analysis.engine import Engine
from penstock.analysis.frames import encoded
from penstock.analysis.kafka import KafkaWire
from penstock.analysis.launching import launch
from penstock.analysis.operators.windows import Kept, open_from, windows
from penstock.analysis.query import Emit, Late, Mode, Query, Shape
from penstock.analysis.settings import SparkSettings
from penstock.audit.held import held
from penstock.channels.kafka import Kafka
from penstock.contracts import Topic
from penstock.errors import Misconfigured
from penstock.testing.frames import frame, rows

Fresh = Callable[[str], str]
Eventually = Callable[..., None]
Build = Callable[[DataFrame], DataFrame]


def folded(frame: DataFrame, *by: Any) -> DataFrame:
    return frame.groupBy(*by).agg(F.sum("n").alias("total"), seen())


def tumbling(frame: DataFrame) -> DataFrame:
    return folded(frame, F.window("event_time", "10 seconds"), "name")


def sliding(frame: DataFrame) -> DataFrame:
    return folded(frame, F.window("event_time", "10 seconds", "5 seconds"), "name")


def of_all(frame: DataFrame) -> DataFrame:
    return folded(frame, F.window("event_time", "4 seconds"))


def sessions(frame: DataFrame) -> DataFrame:
    return folded(frame, F.session_window("event_time", "3 seconds").alias("window"), "name")


def fours(frame: DataFrame) -> DataFrame:
    return by_count(frame, 4, per="name").withColumn("total", total("rows.n", "bigint"))


def last_six(frame: DataFrame) -> DataFrame:
    counted = by_count(frame, 6, slide=2, per="name", partial=True)
    return counted.withColumn("total", total("rows.n", "bigint"))


SECONDS = timedelta(seconds=1)


class Trial:
    """Queries over one channel, and what they wrote."""

    def __init__(self, spark: SparkSession, kafka: Kafka, fresh: Fresh, folder: Path, unique: str | None = None):
        self.kafka, self.channel, self._fresh = kafka, fresh("events"), fresh
        shape = Shape(self.channel, DDL, EVENT_TIME, unique=unique)
        kafka.ensure([Topic(self.channel, 2)])
        settings = SparkSettings(every="100 ms", real_time_batch="5 seconds")
        self.engine = Engine(spark, settings, KafkaWire(kafka.servers), str(folder), {self.channel: shape})
        self.running: dict[str, tuple[Query, Any]] = {}

    def launch(self, build: Build, key: tuple[str, ...], mode: Mode, **declared: Any) -> Query:
        into = self._fresh(build.__name__)
        self.kafka.ensure([Topic(into, compacted=True)])
        query = Query(into, (self.channel,), into, key, build, mode, 10 * SECONDS, **declared)
        self.running[into] = query, launch(self.engine, query, 9, {})[0]
        return query

    def feed(self, events: list[Event], eventually: Eventually) -> None:
        """Send, and wait until each query has taken it: the watermark moves with batches."""
        send(self.kafka, self.channel, [event.record() for event in events])
        ends = {self.channel: {one: end for one, (_, end) in self.kafka.bounds(self.channel).items()}}
        for name, (_, running) in self.running.items():

            def taken(name: str = name, running: Any = running) -> bool:
                assert running.exception() is None
                return covered(self.engine.checkpoint(name)) == ends

            eventually(taken)

    def finish(self, newest: int, eventually: Eventually) -> None:
        """Let those whose rows come when they are final do what the last records made possible."""
        for name, (query, _) in self.running.items():
            if not self.engine.updates(query) and query.patience is not None:
                last = newest - query.patience / SECONDS * 1_000
                eventually(lambda name=name, last=last: batches(self.engine.checkpoint(name))[-1].watermark == last)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        for _, running in self.running.values():
            running.stop()

    def taken(self, query: Query) -> list[oracles.Taken]:
        return in_batches(self.channel, self.lying(), batches(self.engine.checkpoint(query.name)))

    def lying(self) -> list[Placed]:
        return placed(held(self.kafka, self.channel))

    def wrote(self, query: Query) -> dict[bytes, Result]:
        """The newest version of each row; those that come when they are final come once."""
        table: dict[bytes, Result] = {}
        entries = list(held(self.kafka, query.into))
        for entry in entries:
            put(table, key_of(entry.key or b""), Result.of(entry.value, entry.headers))
        if not self.engine.updates(query):
            assert len(table) == len(entries)
        return table

    def rows(self, query: Query) -> dict[tuple[int, int, str], tuple[int, int]]:
        """As the oracles of windows by time say it."""
        told = (json.loads(row.value or b"") for row in self.wrote(query).values())
        return {
            (_millis(row["window"]["start"]), _millis(row["window"]["end"]), row.get("name", "")): (
                row["total"],
                row["seen"]["count"],
            )
            for row in told
        }

    def recomputed(self, query: Query) -> dict[bytes, Result]:
        table: dict[bytes, Result] = {}
        for row in encoded(self.engine.recompute(query), query).collect():
            headers = [(header["key"], bytes(header["value"])) for header in row["headers"]]
            put(table, key_of(bytes(row["key"])), Result.of(bytes(row["value"]), headers))
        return table


def _millis(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1_000)


def test_windows_by_time_in_batches_give_what_the_oracle_says(
    spark: SparkSession, kafka: Kafka, fresh: Fresh, eventually: Eventually, tmp_path: Path
) -> None:
    events, batch, named = generate(seed=6, n=250), Mode.MICRO_BATCH, ("window", "name")
    with Trial(spark, kafka, fresh, tmp_path) as trial:
        updated = trial.launch(tumbling, named, batch)
        patient = trial.launch(tumbling, named, batch, late=Late.UPDATE, lateness=20 * SECONDS)
        final = trial.launch(sliding, named, batch, emit=Emit.FINAL)
        whole = trial.launch(of_all, ("window",), batch, emit=Emit.FINAL)
        grown = trial.launch(sessions, named, Mode.AUTO)
        for part in (events[:80], events[80:120], events[120:200], events[200:]):
            trial.feed(part, eventually)
        trial.finish(max(event.at for event in events), eventually)
    due = oracles.tumbling(trial.taken(updated), 10_000)
    assert trial.rows(updated) == due.rows
    assert due.late
    waited = oracles.tumbling(trial.taken(patient), 10_000)
    assert trial.rows(patient) == waited.rows
    assert len(waited.late) < len(due.late)
    assert trial.rows(final) == oracles.sliding(trial.taken(final), 10_000, 5_000).final
    assert trial.rows(whole) == oracles.tumbling(trial.taken(whole), 4_000, per=lambda _: "").final
    apart = oracles.sessions(trial.taken(grown), 3_000)
    assert trial.rows(grown) == apart.final
    assert apart.late


def test_windows_by_count_in_batches_give_what_the_oracle_says(
    spark: SparkSession, kafka: Kafka, fresh: Fresh, eventually: Eventually, tmp_path: Path
) -> None:
    events, named = generate(seed=9, n=150), ("window", "name")
    with Trial(spark, kafka, fresh, tmp_path) as trial:
        counted = trial.launch(fours, named, Mode.AUTO)
        latest = trial.launch(last_six, named, Mode.MICRO_BATCH)
        for part in (events[:70], events[70:80], events[80:]):
            trial.feed(part, eventually)
    for query, expected in (
        (counted, oracles.by_count(trial.lying(), 4)),
        (latest, oracles.by_count(trial.lying(), 6, 2, partial=True)),
    ):
        told = [json.loads(row.value or b"") for row in trial.wrote(query).values()]
        assert {(row["name"], row["window"]["number"]): [one["n"] for one in row["rows"]] for row in told} == {
            of: [event.n for event in some] for of, some in expected.items()
        }
        assert all(row["total"] == sum(one["n"] for one in row["rows"]) for row in told)
        assert all(row["seen"]["count"] == len(row["rows"]) for row in told)
        # As a batch over the log they give the same, to the mark.
        assert trial.recomputed(query) == trial.wrote(query)


def test_windows_in_real_time_give_what_the_oracle_says(
    spark: SparkSession, kafka: Kafka, fresh: Fresh, eventually: Eventually, tmp_path: Path
) -> None:
    events = generate(seed=7, n=200)
    with Trial(spark, kafka, fresh, tmp_path, unique="number") as trial:
        query = trial.launch(sliding, ("window", "name"), Mode.REAL_TIME)
        for part in (events[:100], events[100:140], events[140:]):
            trial.feed(part, eventually)
    passed, doubled, late = oracles.deduplicated(trial.taken(query))
    assert doubled
    assert late
    assert trial.rows(query) == oracles.sliding(passed, 10_000, 5_000).rows


def test_why_windows_do_not_run_in_real_time_is_told(spark: SparkSession, tmp_path: Path) -> None:
    shape = Shape("events", DDL, EVENT_TIME)
    engine = Engine(spark, SparkSettings(), KafkaWire("127.0.0.1:1"), str(tmp_path), {"events": shape})

    def why(build: Build, emit: Emit = Emit.CHANGE) -> str | None:
        query = Query("q", ("events",), "q", ("window",), build, watermark=SECONDS, emit=emit)
        return engine.objection(query)

    assert why(sessions) == "sessions are written when they are final"
    assert why(fours) == "it keeps state in Python"
    assert why(tumbling, Emit.FINAL) == "its rows come when they are final"


def test_windows_by_count_span_records_of_their_key(spark: SparkSession) -> None:
    names = ["a", "b", None]
    events = frame(spark, "name STRING, n BIGINT", *({"name": names[n % 3], "n": n} for n in range(13)))
    windows_of = by_count(events, 2, per=["name"])
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
    (window,) = by_count(events, 2).collect()
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
    assert rows(by_count(moved, 4, partial=True), "rows.n") == [([2, 1, 3, 4],), ([5],)]


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
        ({"size": 0}, "its windows are to hold 0 records"),
        ({"size": 2, "slide": 3}, "let slide be from 1 to 2"),
        ({"size": 2, "slide": 0}, "let slide be from 1 to 2"),
        ({"size": 2, "per": "nam"}, "per= names nam; name columns of its frame: name, event_time"),
    ],
)
def test_windows_by_count_that_cannot_be_are_refused(spark: SparkSession, arguments: dict[str, Any], said: str) -> None:
    events = frame(spark, "name STRING")
    with pytest.raises(Misconfigured, match=said):
        by_count(events, **arguments)


def test_windows_by_count_need_to_know_the_place_of_records(spark: SparkSession) -> None:
    with pytest.raises(Misconfigured, match="its frame lacks origin and event_time; give it the frame of a channel"):
        by_count(frame(spark, "name STRING").select("name"), 2)
    with pytest.raises(Misconfigured, match=r"its frame is a table, .* may have no time; .* tables\.latest"):
        by_count(frame(spark, "name STRING").withColumn("_deleted", F.lit(False)), 2)

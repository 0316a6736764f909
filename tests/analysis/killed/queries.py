"""Every operator as a query, over the same few channels: what a driver runs that is killed."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from tests.analysis.operators import cards, oracles

from penstock import Keyed, MapState, ValueState, count_window, interval_join, seen, tables, total
from penstock.analysis.connectors import KafkaConnector
from penstock.analysis.engine import Engine
from penstock.analysis.operators.statics import table
from penstock.analysis.query import NUMBER, PAYLOAD, Emit, Late, Mode, Query, Shape, Static
from penstock.analysis.settings import SparkSettings
from penstock.core.contracts import Topic

WATERMARK = timedelta(seconds=10)
LATENESS = timedelta(minutes=4)
JOIN_WATERMARK = timedelta(seconds=5)
TABLES = ("a", "b", "c")
JOINS = ("inner", "left", "right", "full", "semi")
ROW = "n BIGINT NOT NULL, text STRING, to BIGINT"
SIDE = "id BIGINT NOT NULL, key STRING, at BIGINT NOT NULL"
LABELS = {f"k{n}": f"label {n}" for n in (0, 1, 2, 9)}
IDLE = timedelta(seconds=3)
UP = "Spark is up"

PARTITIONS = {"events": 2, "left": 2, "right": 1, "uses": 2, "stream": 2, **dict.fromkeys(TABLES, 2)}
"""The channels, and how many partitions each has."""


@dataclass(frozen=True)
class Trial:
    query: Query
    live: bool = False
    """It has to run in real time."""
    unique: str | None = None
    """What makes the records of its channel unique, for this query."""
    accounted: bool = False
    """Somebody keeps its books."""


def channel(run: str, name: str) -> str:
    return f"{run}-{name}"


def bookmarks(run: str) -> str:
    return channel(run, "bookmarks")


def trials(run: str) -> dict[str, Trial]:
    """By name, in the order in which they are started."""
    found: dict[str, Trial] = {}

    def add(
        name: str,
        build: Callable[..., DataFrame] | str,
        inputs: tuple[str, ...],
        key: tuple[str, ...],
        mode: Mode = Mode.MICRO_BATCH,
        unique: str | None = None,
        accounted: bool = False,
        **declared: Any,
    ) -> None:
        read = tuple(channel(run, one) for one in inputs)
        query = Query(name, read, channel(run, f"to-{name}"), key, build, mode, **declared)
        found[name] = Trial(query, name.startswith("live"), unique, accounted)

    def over_events(name: str, build: Callable[..., DataFrame] | str, *key: str, **declared: Any) -> None:
        add(name, build, ("events",), key or ("window", "name"), **{"watermark": WATERMARK, **declared})

    events = channel(run, "events")
    labelled = f"SELECT e.name, n, at, label, e.origin FROM `{events}` e LEFT JOIN labels USING (name)"
    add("labelled", labelled, ("events",), ("name", "n", "at"), statics=("labels",))
    over_events("tumbling", tumbling)
    every = timedelta(seconds=1.5)
    over_events("patient", counted_tumbling, unique=PAYLOAD, late=Late.UPDATE, lateness=LATENESS, every=every)
    over_events("final", sliding, emit=Emit.FINAL)
    over_events("final-of-all", counted_of_all, "window", unique="n", emit=Emit.FINAL)
    over_events("sessions", sessions, mode=Mode.AUTO)
    over_events("buried", counted_sliding, late=Late.DEAD, accounted=True)
    over_events("buried-sessions", counted_sessions, unique=NUMBER, late=Late.DEAD, accounted=True)

    add("fours-and-sixes", fours_and_sixes, ("events",), ("kind", "window", "name"), Mode.AUTO)
    add("fives-of-all", fives_of_all, ("events",), ("window",))
    over_events("idle", lambda events: Idle.over(events, key="name"), "name", "at")
    add("approved", lambda uses: Watched.over(uses, key="card"), ("uses",), ("card", "n"))

    for how in JOINS:
        sides = ("left", "right")
        add(f"{how}-join", pair(how), sides, ("a", "b"), accounted=how == "full", watermark=JOIN_WATERMARK)
    add("latest", lambda a: tables.where(tables.latest(a), "n % 5 <> 0"), ("a",), ("key",))
    add("inner", lambda a, b, c: tables.join(a=a, b=b, c=c), TABLES, ("key",))
    add("outer", lambda a, b, c: tables.join("outer", a=a, b=b, c=c), TABLES, ("key",))
    add("named", lambda a, b: tables.foreign_key_join(a, b, key="to"), ("a", "b"), ("key",))
    add("found", lambda stream, b: tables.lookup(stream, b, key="to", how="left"), ("stream", "b"), ("n",))

    # In real time each takes its share of a core for as long as it runs: they come last.
    over_events("live-tumbling", tumbling, mode=Mode.AUTO)
    sliding_labels = (
        "SELECT window(event_time, '10 seconds', '5 seconds') AS window, label AS name, seen() "
        f"FROM `{events}` JOIN labels USING (name) GROUP BY 1, 2"
    )
    chosen = {"where": "n % 4 <> 0", "statics": ("labels",), "unique": NUMBER}
    over_events("live-sliding", sliding_labels, mode=Mode.AUTO, **chosen)
    add("live-left", lambda a, b, c: tables.join("left", a=a, b=b, c=c), TABLES, ("key",), Mode.AUTO)
    return found


def topics(run: str) -> list[Topic]:
    return [
        *(Topic(channel(run, name), number, compacted=name in TABLES) for name, number in PARTITIONS.items()),
        *(Topic(trial.query.into) for trial in trials(run).values()),
        Topic(f"{channel(run, 'events')}.dead"),
        Topic(bookmarks(run)),
    ]


def engine_for(
    trial: Trial, run: str, spark: SparkSession, settings: SparkSettings, servers: str, checkpoints: str
) -> Engine:
    """Spark, for one of them: what is unique is said of a channel, and here each query has its own opinion."""
    at = "timestamp_millis(at)"
    told = {
        "events": Shape(channel(run, "events"), oracles.DDL, oracles.EVENT_TIME, unique=trial.unique),
        "uses": cards.shape(channel(run, "uses")),
        "stream": Shape(channel(run, "stream"), ROW),
        **{side: Shape(channel(run, side), SIDE, at) for side in ("left", "right")},
        **{name: Shape(channel(run, name), ROW, table=True) for name in TABLES},
    }
    shapes: Mapping[str, Shape] = {shape.channel: shape for shape in told.values()}
    rows = [{"name": name, "label": label} for name, label in LABELS.items()]
    labels = Static("labels", rows, "name STRING, label STRING")
    static = {"labels": table(spark, labels)} if trial.query.statics else {}
    return Engine(spark, settings, KafkaConnector(servers), checkpoints, shapes, static)


# --- what they do -----------------------------------------------------------------------------------------------------


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


# Where copies of a record differ, which of them comes first in a batch is for Spark to choose. They are counted only.


def counted_tumbling(frame: DataFrame) -> DataFrame:
    return tumbling(frame).drop("total")


def counted_sliding(frame: DataFrame) -> DataFrame:
    return sliding(frame).drop("total")


def counted_of_all(frame: DataFrame) -> DataFrame:
    return of_all(frame).drop("total")


def counted_sessions(frame: DataFrame) -> DataFrame:
    return sessions(frame).drop("total")


def fours_and_sixes(frame: DataFrame) -> DataFrame:
    """Windows one after the other, and windows that overlap and are told while they grow."""
    fours, sixes = count_window(frame, 4, key="name"), count_window(frame, 6, slide=2, key="name", partial=True)
    both = fours.withColumn("kind", F.lit("fours")).unionByName(sixes.withColumn("kind", F.lit("sixes")))
    return both.withColumn("total", total("rows.n", "bigint"))


def fives_of_all(frame: DataFrame) -> DataFrame:
    return count_window(frame, 5, slide=3).withColumn("total", total("rows.n", "bigint"))


def pair(how: str) -> Callable[[DataFrame, DataFrame], DataFrame]:
    """A join of two streams, keyed by the ids of both."""

    def build(lefts: DataFrame, rights: DataFrame) -> DataFrame:
        found = interval_join(left=lefts, right=rights, key="key", within=("2 seconds", "20 seconds"), how=how)
        if how == "semi":
            return found.select(F.col("id").alias("a"), F.lit(None).cast("bigint").alias("b"), "key", "origin")
        return found.select(F.col("left.id").alias("a"), F.col("right.id").alias("b"), *found.columns)

    return build


class Watched(cards.Approve):
    """Keeps, beside a value, a list and a map, one value that lives for a batch and a map that lives for a day."""

    brief = ValueState("times INT", ttl="1 ms")
    lasting = MapState("city STRING", "times INT", ttl="1 day")
    schema = f"{cards.Approve.schema}, brief INT, lasting INT"

    def process(self, key: str, row: Any) -> Iterator[dict[str, Any]]:
        self.brief.set(self.brief.get(0) + 1)
        self.lasting[row.city] = self.lasting.get(row.city, 0) + 1
        for made in super().process(key, row):
            yield {**made, "brief": self.brief.get(), "lasting": self.lasting[row.city]}


class Idle(Keyed):
    """Tells by a timer when nothing has come for a while, and how much had come before."""

    times = ValueState("times INT")
    schema = "name STRING, at TIMESTAMP, times INT"

    def process(self, key: str, row: Any) -> None:
        self.times.set(self.times.get(0) + 1)
        self.delete_timer()
        self.set_timer(row.event_time + IDLE)

    def on_timer(self, key: str, at: datetime) -> Iterator[dict[str, Any]]:
        yield {"at": at, "times": self.times.get()}
        self.times.clear()

"""State in Python, kept by a real Spark: as a batch, as a stream, and after a kill -9."""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest
from pyspark import cloudpickle
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from tests.analysis.operators import cards
from tests.analysis.operators.cards import Approve

from penstock import Keyed, ListState, ValueState
from penstock.analysis.accounting import Late, QueryAccounting, Recount, Stretch
from penstock.analysis.connectors import KafkaConnector
from penstock.analysis.engine import Engine
from penstock.analysis.launch import failed, launch
from penstock.analysis.operators.keyed import unnumbered
from penstock.analysis.query import Mode, Query
from penstock.analysis.replay import require_repeatable
from penstock.analysis.settings import SparkSettings
from penstock.audit.account import Outcome
from penstock.channels.kafka import Kafka
from penstock.core.clock import SystemClock
from penstock.core.contracts import Entry, Topic
from penstock.core.errors import Misconfigured
from penstock.core.record import Origin
from penstock.core.scan import scan
from penstock.testing.frames import frame, rows

Fresh = Callable[[str], str]
Eventually = Callable[..., None]

# Workers cannot import the modules of tests.
cloudpickle.register_pickle_by_value(cards)  # type: ignore[no-untyped-call]  # it has no types
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]  # it has no types


class Patient(Approve):
    """Tells of a card when it was not used for an hour, by event time."""

    def process(self, key: str, row: Any) -> Iterator[dict[str, Any]]:
        if row.amount == 1_000:
            raise LookupError(f"nobody has {row.amount}")
        yield from super().process(key, row)
        self.delete_timer()
        self.set_timer(row.event_time + timedelta(hours=1))

    def on_timer(self, key: str, at: datetime) -> Iterator[dict[str, Any]]:
        yield {"n": -1, "verdict": f"unused since {at - timedelta(hours=1):%H:%M}", "total": float(len(self.recent))}


class Hurried(Patient):
    """By the clock, for which no record is late."""

    clock = True


def table(entries: list[Entry]) -> dict[int, tuple[Any, ...]]:
    """Of each number the last row."""
    return by_number(entry.value for entry in entries)


def by_number(values: Iterable[bytes | None]) -> dict[int, tuple[Any, ...]]:
    found = (orjson.loads(value or b"") for value in values)
    return {row["n"]: (row["card"], row["verdict"], row["total"], row["times"]) for row in found}


def test_as_a_batch_it_gives_what_a_loop_over_the_records_gives(spark: SparkSession) -> None:
    uses = cards.used(1, 60)
    names = ("n", "card", "city", "amount", "at")
    # However they are shuffled on their way, each card's records come in the order of their channel.
    made = frame(spark, cards.shape("uses"), *(dict(zip(names, use, strict=True)) for use in uses)).repartition(5)
    given = Approve.over(made, key="card").where("origin.seq = n")
    assert {n: tuple(rest) for n, *rest in rows(given, "n", "card", "verdict", "total", "times")} == cards.verdicts(
        uses
    )


def test_only_the_first_row_of_a_record_keeps_its_origin(spark: SparkSession) -> None:
    class Twice(Keyed):
        at = ValueState("at TIMESTAMP, nested STRUCT<at: TIMESTAMP>")
        schema = "name STRING, at TIMESTAMP, nested STRUCT<at: TIMESTAMP>"

        def process(self, key: str, row: Any) -> Iterator[Any]:
            self.at.set(at=row.event_time, nested={"at": row.event_time})
            kept = self.at.get()
            assert kept.at == kept.nested["at"] == row.event_time
            yield {"at": kept.at, "nested": kept.nested}
            yield {"at": row.event_time}

    made = frame(spark, "name STRING", {"name": "a", "origin": Origin("s", 1, 7, 1_700_000_000_000_000)})
    at = 1_700_000_000_000_000
    told = ("name", "unix_micros(at)", "unix_micros(nested.at)", "origin.seq")
    assert rows(Twice.over(made, "name"), *told) == [("a", at, None, None), ("a", at, at, 7)]


def test_what_is_made_of_one_record_has_no_number_that_would_stand_for_several(spark: SparkSession) -> None:
    class Items(Keyed):
        seen_of = ValueState("counts MAP<STRING, INT>")
        schema = "item STRING, n INT"

        def process(self, key: str, row: Any) -> Any:
            self.seen_of.set({**self.seen_of.get({}), **row.counts})
            return {"n": sum(self.seen_of.get().values())}

    made = frame(
        spark,
        "items ARRAY<STRING>, counts MAP<STRING, INT>",
        {"items": ["a", "b"], "counts": {"x": 1, "y": 2}},
        {"items": ["a"], "counts": {"x": 5}},
    )
    made = made.observe("orders taken", F.count(F.lit(1)).alias("taken"))
    several = Items.over(made.select("*", F.explode("items").alias("item")), "item")
    assert rows(several, "item", "n", "origin.seq") == [("a", 3, None), ("a", 7, None), ("b", 3, None)]
    assert unnumbered(several) is not None
    joined = Items.over(made.join(spark.sql("SELECT 'a' AS item"), F.col("items")[0] == F.col("item")), "item")
    twice = made.select("origin", "counts", F.expr("items[0]").alias("item"))
    assert unnumbered(joined) is not None
    assert unnumbered(Items.over(twice.union(twice), "item")) is not None
    assert unnumbered(Items.over(twice, "item")) is None
    assert rows(Items.over(twice, "item"), "item", "n", "origin.seq") == [("a", 3, 1), ("a", 7, 2)]


def test_what_cannot_work_is_told_before_it_starts(spark: SparkSession) -> None:
    class Wrong(Approve):
        typed = ListState("amount DUBLE")

    class Both(Patient):
        last = ValueState("city STRING, at TIMESTAMP", ttl="1 hour")

    made = frame(spark, cards.shape("uses"))
    stream = spark.readStream.format("rate").load().selectExpr("'a' AS card", "timestamp AS event_time", "1 AS origin")
    for kind, given, by, problem in (
        (Wrong, made, "card", r"^Wrong\.typed: \"amount DUBLE\" cannot be read as columns"),
        (Approve, made, "crd", r'^Approve: the frame has no column "crd", only n, card'),
        (Approve, made.drop("origin"), "card", 'no column "origin".*keep origin'),
        (
            Both,
            stream.withWatermark("event_time", "1 minute"),
            "card",
            r"^Both\.last: its ttl uses the clock",
        ),
        (
            Patient,
            stream.withWatermark("event_time", "1 minute").drop("event_time"),
            "card",
            r"^Patient: its timers use event time, .* lost event_time; keep event_time",
        ),
        (
            Approve,
            Approve.over(made, "card").select("*", F.col("verdict").alias("city")),
            "card",
            "^Approve: its frame has rows from another Keyed: .*; do both in one class",
        ),
    ):
        with pytest.raises(Misconfigured, match=problem):
            kind.over(given, by)


def test_timers_by_event_time_give_rows_without_a_record_and_an_error_is_told_with_its_place(
    spark: SparkSession, kafka: Kafka, fresh: Fresh, eventually: Eventually, tmp_path: Path
) -> None:
    uses, into = fresh("uses"), fresh("approved")
    kafka.ensure([Topic(uses, 2), Topic(into)])
    settings = SparkSettings(every="100 ms")
    engine = Engine(spark, settings, KafkaConnector(kafka.servers), str(tmp_path), {uses: cards.shape(uses)})
    query = Query(
        "patient", (uses,), into, ("card", "n"), lambda made: Patient.over(made, "card"), Mode.MICRO_BATCH,
        watermark=timedelta(minutes=1),
    )  # fmt: skip
    begin = 1_700_000_000_000
    cards.send(kafka, uses, [(1, "a", "Oslo", 5, begin), (2, "b", "Rome", 5, begin + 7_200_000)])
    running, _ = launch(engine, query, 0, {})
    eventually(lambda: failed([running]) or kafka.bounds(into)[0][1] >= 3)
    assert failed([running]) is None
    last = [*scan(kafka, into)][-1]
    since = datetime.fromtimestamp(begin / 1_000, UTC)
    assert table([last]) == {-1: ("a", f"unused since {since:%H:%M}", 1.0, None)}
    assert Origin.read(last.headers) is None
    with pytest.raises(Misconfigured, match="query patient: it has timers"):
        require_repeatable(engine, query)
    # One comes after the watermark has passed it: Spark does not hand it over.
    start, watermark = {at: end for at, (_, end) in kafka.bounds(uses).items()}, begin + 7_140_000
    cards.send(kafka, uses, [(3, "a", "Oslo", 5, watermark), (4, "a", "Oslo", 5, watermark + 1)])
    accounting = QueryAccounting(engine, query, running, None, kafka, SystemClock())
    eventually(lambda: failed([running]) or (accounting.look() and accounting.account.shares[uses].taken == 4))
    outcomes = accounting.account.shares[uses].outcomes
    assert (outcomes[Outcome.PASSED], outcomes[Outcome.LATE]) == (3, 1)
    assert (accounting.account.shares[uses].late, accounting.account.guessed) == ({"s": {"1": [(3, 3)]}}, False)
    assert table([*scan(kafka, into)]).keys() == {-1, 1, 2, 4}
    # A later driver, which was not told of it, finds the same in the log.
    stretch = Stretch(uses, start, {at: end for at, (_, end) in kafka.bounds(uses).items()}, watermark)
    outcomes, [(_, late)] = Recount(engine, query, kafka).outcomes([stretch], {})
    assert (outcomes[Outcome.PASSED], outcomes[Outcome.LATE], late.numbers) == (1, 1, [("s", 1, 3)])
    hurried = replace(query, build=lambda made: Hurried.over(made, "card"))
    assert Recount(engine, hurried, kafka).late(stretch) == Late(0)

    cards.send(kafka, uses, [(5, "c", "Oslo", 1_000, begin + 7_300_000)])
    eventually(lambda: not running.isActive)
    error = str(failed([running]))
    assert "test_keyed.py:" in error
    assert "Patient.process for the key 'c': LookupError: nobody has 1000" in error
    assert "\n" not in error

"""What became of each record of a query: a real broker, a real Spark."""

import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from tests.analysis.still import StillConnector
from tests.channels.traffic import send

from penstock.analysis.accounting import QueryAccounting, within
from penstock.analysis.connectors import KafkaConnector
from penstock.analysis.dead_letters import LateRecords
from penstock.analysis.engine import Engine
from penstock.analysis.frames import seen
from penstock.analysis.launch import launch
from penstock.analysis.query import Mode, Query, Shape
from penstock.analysis.settings import SparkSettings
from penstock.audit.account import Account, Outcome, Share
from penstock.channels.kafka import Kafka
from penstock.core.clock import SystemClock
from penstock.core.contracts import Topic
from penstock.core.record import Origin, Record
from penstock.testing import MemoryChannels

Fresh = Callable[[str], str]
Eventually = Callable[..., None]

BEGIN = 1_700_000_000_000


class Unreported:
    """A query of whose batches no report comes."""

    lastProgress, recentProgress = None, ()

    def __init__(self, running: Any) -> None:
        self.id = running.id


def per_name(things: DataFrame) -> DataFrame:
    return things.groupBy(F.window("event_time", "10 seconds"), "name").agg(F.sum("n").alias("total"), seen())


def thing(seq: int, second: float, n: object = 1, name: str = "a") -> Record:
    value = {"name": name, "n": n, "at": BEGIN + int(second * 1000)}
    return Record(json.dumps(value).encode(), Origin("s", 1, seq, (BEGIN + seq) * 1000), b"%d" % seq)


@pytest.mark.parametrize("mode", [Mode.REAL_TIME, Mode.MICRO_BATCH])
def test_each_record_has_one_outcome(
    mode: Mode, spark: SparkSession, kafka: Kafka, fresh: Fresh, eventually: Eventually, tmp_path: Path
) -> None:
    """With a gate for duplicates and without; side by side, because most of it is waiting for batches to end."""

    def case(unique: str | None) -> None:
        each_record_has_one_outcome(mode, unique, spark, kafka, fresh, eventually, tmp_path / str(unique))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(case, [None, "number"])) == [None, None]


def each_record_has_one_outcome(
    mode: Mode,
    unique: str | None,
    spark: SparkSession,
    kafka: Kafka,
    fresh: Fresh,
    eventually: Eventually,
    folder: Path,
) -> None:
    things, into = fresh("things"), fresh("per_name")
    kafka.ensure([Topic(things, 2), Topic(into, compacted=True)])
    shape = Shape(things, "name STRING NOT NULL, n BIGINT, at BIGINT NOT NULL", "timestamp_millis(at)", unique=unique)
    settings = SparkSettings(real_time_batch="5 seconds", every="200 ms")
    engine = Engine(spark, settings, KafkaConnector(kafka.servers), str(folder), {things: shape})
    wait = SparkSettings(real_time_batch="5 seconds").real_time_batch
    query = Query(into, (things,), into, ("window", "name"), per_name, mode, watermark=wait * 2, where="n > 0")
    ids = {things: kafka.topic_id(things)}

    def launched(before: Account | None) -> QueryAccounting:
        running, verdict = launch(engine, query, 1, ids)
        assert verdict.mode is mode
        return QueryAccounting(engine, query, running, before, kafka, SystemClock())

    def until_taken(accounting: QueryAccounting, number: int) -> Account:
        def enough() -> bool:
            accounting.look()
            return accounting.account.shares[things].taken >= number

        eventually(enough, 60)
        return accounting.account

    accounting = launched(None)
    if mode is Mode.REAL_TIME:
        # Before its first batch has ended, the audit can count its rows.
        eventually(lambda: accounting.look() is not None and accounting.account.conserved, 60)
        assert accounting.account.step == 0
    # 100 records over 100 seconds; 7 that do not fit, 9 that are not wanted.
    batch = [thing(seq, seq, n="many" if seq % 14 == 0 else (0 if seq % 11 == 0 else 1)) for seq in range(1, 101)]
    send(kafka, things, batch)
    first = until_taken(accounting, 100)
    refused = {seq for seq in range(1, 101) if seq % 14 == 0}
    filtered = {seq for seq in range(1, 101) if seq % 11 == 0} - refused
    expected = {
        Outcome.PASSED: 100 - len(refused) - len(filtered),
        Outcome.REFUSED: len(refused),
        Outcome.FILTERED: len(filtered),
        Outcome.LATE: 0,
        Outcome.DUPLICATE: 0,
        Outcome.SHED: 0,
    }
    assert first.shares[things].outcomes == expected
    assert first.conserved

    # The watermark moves with the next batches: then come one late record, one that is doubled, and one in order.
    send(kafka, things, [thing(101, 200)])
    until_taken(accounting, 101)
    send(kafka, things, [thing(102, 201)])
    until_taken(accounting, 102)
    send(kafka, things, [thing(103, 150), thing(102, 201), thing(104, 202)])
    second = until_taken(accounting, 105)
    again = Outcome.DUPLICATE if unique else Outcome.PASSED
    expected[Outcome.PASSED] += 3
    expected[Outcome.LATE] += 1
    expected[again] += 1
    assert second.shares[things].outcomes == expected
    assert second.shares[things].late == {"s": {"1": [(103, 103)]}}
    assert Account.of(second.key, second.dumps()) == second

    # The driver dies before it has told of its last batches: the next one counts them from the log.
    accounting.running.stop()
    next_generation = launched(first)
    # At once: there may be no further batch.
    assert next_generation.look() is not None
    assert next_generation.account.shares[things].outcomes == expected
    # One that was killed before anything was published: it begins where the query began, not where that stands.
    unreported = QueryAccounting(
        engine, query, cast(Any, Unreported(next_generation.running)), None, kafka, SystemClock()
    )
    assert not unreported.complete
    unreported.look()
    assert (unreported.complete, unreported.accounting) == (True, "current")
    assert unreported.account.shares[things].since == {0: 0, 1: 0}
    assert unreported.account.shares[things].outcomes == expected
    assert unreported.account.step > 0
    send(kafka, things, [thing(105, 203), thing(104, 202)])
    third = until_taken(next_generation, 107)
    expected[Outcome.PASSED] += 1
    expected[again] += 1
    assert third.shares[things].outcomes == expected
    assert third.conserved
    assert third.shares[things].late == {"s": {"1": [(103, 103)]}}
    # Without a report, and without another batch, the account gets there as well.
    assert until_taken(unreported, 107).shares == third.shares
    assert unreported.account.conserved
    next_generation.running.stop()


def test_what_an_earlier_life_has_guessed_says_nothing_about_a_new_one(
    spark: SparkSession, kafka: Kafka, fresh: Fresh, eventually: Eventually, tmp_path: Path
) -> None:
    things, into = fresh("things"), fresh("per_name")
    kafka.ensure([Topic(things), Topic(into, compacted=True)])
    shape = Shape(things, "name STRING NOT NULL, n BIGINT, at BIGINT NOT NULL", "timestamp_millis(at)")
    engine = Engine(spark, SparkSettings(every="100 ms"), KafkaConnector(kafka.servers), str(tmp_path), {things: shape})
    query = Query("per_name", (things,), into, ("window", "name"), per_name, Mode.MICRO_BATCH)

    def told(before: Account | None, seq: int) -> Account:
        running, _ = launch(engine, query, 1, {things: kafka.topic_id(things)})
        accounting = QueryAccounting(engine, query, running, before, kafka, SystemClock())
        send(kafka, things, [thing(seq, seq)])
        eventually(lambda: accounting.look() is not None and accounting.account.shares[things].taken == seq, 60)
        running.stop()
        return accounting.account

    other = Account("query:per_name", "another life", 0, {}, guessed=True)
    first = told(other, 1)
    assert (first.guessed, first.conserved) == (False, True)
    second = told(replace(first, guessed=True, conserved=False), 2)
    assert second.generation == first.generation
    assert (second.guessed, second.conserved) == (True, False)


class Counted(Engine):
    """One of which Spark need not be asked whether records can be counted."""

    def uncounted(self, query: Query) -> str | None:
        return None


def ended(number: int, start: int, end: int) -> Any:
    """What Spark tells of a batch."""
    source = SimpleNamespace(startOffset=f'{{"things": {{"0": {start}}}}}', endOffset=f'{{"things": {{"0": {end}}}}}')
    observed = {"things taken": Row(taken=end - start, refused=0, filtered=0)}
    told = {"batchId": number, "timestamp": str(number), "sources": [source], "observedMetrics": observed}
    return SimpleNamespace(**told, stateOperators=[], eventTime={})


class Run:
    """A query as it runs, until it is stopped."""

    id = "life"

    def __init__(self, *told: Any) -> None:
        self.recentProgress = list(told)
        self.then: Callable[[], None] = lambda: None

    @property
    def lastProgress(self) -> Any:
        """What comes true right after somebody has asked is `then`."""
        last, then = self.recentProgress[-1] if self.recentProgress else None, self.then
        self.then = lambda: None
        then()
        return last


def test_a_batch_that_ends_while_somebody_looks_is_in_the_account_of_the_next_run() -> None:
    shapes = {"things": Shape("things")}
    # Of a checkpoint that cannot be looked into, nothing is known but what is reported.
    engine = Counted(cast(SparkSession, None), SparkSettings(), StillConnector(), "s3://elsewhere", shapes)
    query = Query("q", ("things",), "q", ("value",), "")
    before = Account("query:q", "life", 0, {"things": Share({0: 0}, {0: 0}, 0, dict.fromkeys(Outcome, 0))})
    one, *others = Run(ended(0, 0, 2)), Run(ended(2, 5, 6)), Run()
    accounting = QueryAccounting(engine, query, cast(Any, one), before, MemoryChannels(), SystemClock())

    def stopped() -> None:
        one.recentProgress.append(ended(1, 2, 5))
        for other in others:
            accounting.follow(engine, cast(Any, other))

    one.then = stopped
    accounting.look()
    accounting.look()
    assert accounting.account.shares["things"] == Share(
        {0: 0}, {0: 6}, 6, {**dict.fromkeys(Outcome, 0), Outcome.PASSED: 6}
    )
    assert accounting.running is cast(Any, others[-1])


@pytest.mark.parametrize(
    ("first", "watermark", "guessed"),
    [
        (0, 0, False),
        (5, 0, False),
        # Batches before it are forgotten, and some of what they took may have been late.
        (5, BEGIN + 50_000, True),
    ],
)
def test_what_was_late_in_forgotten_batches_is_a_guess(
    first: int, watermark: int, guessed: bool, spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    held = [thing(seq, second).value or b"" for seq, second in enumerate((60, 10, 61, 12))]
    shape = Shape("things", "name STRING NOT NULL, n BIGINT, at BIGINT NOT NULL", "timestamp_millis(at)")
    engine = Engine(spark, SparkSettings(), StillConnector(holds={"things": held}), str(tmp_path), {"things": shape})
    query = Query("q", ("things",), "q", ("window", "name"), per_name, Mode.MICRO_BATCH, timedelta(seconds=10))
    for number, end in ((first, 3), (first + 1, 4)):
        for name, note in (("offsets", f'{{"things": {{"0": {end}}}}}'), ("commits", "")):
            (tmp_path / "q" / name).mkdir(parents=True, exist_ok=True)
            (tmp_path / "q" / name / str(number)).write_text(f'v1\n{{"batchWatermarkMs": {watermark}}}\n{note}')
    nothing = Share({0: 0}, {0: 0}, 0, dict.fromkeys(Outcome, 0))
    before = Account("query:q", "life", 0, {"things": nothing})
    channels = MemoryChannels()
    late_records = LateRecords("q", channels, 0)
    accounting = QueryAccounting(engine, query, cast(Any, Run()), before, channels, SystemClock(), late_records)
    account = accounting.look()
    assert account is not None
    assert (account.guessed, account.conserved) == (guessed, not guessed)
    # That of the last batch is known: the one before it tells the watermark.
    assert account.shares["things"].outcomes[Outcome.LATE] == len(channels.entries("things.dead")) == int(guessed)
    assert account.shares["things"].taken == 4
    assert any("up to {0: 3} is not in the dead letters" in message for message in caplog.messages) is guessed


def test_a_time_lies_in_one_of_many_windows_or_in_none(spark: SparkSession) -> None:
    """Far more than conditions can be nested; the end of a window is not in it."""
    spans = [(-30, -20), *((at, at + 10) for at in range(0, 200_000, 20)), (200_000, 200_010), (200_010, 200_015)]
    windows = [Row(start=start, end=end) for start, end in spans]
    times = [-31, -30, -20, 0, 9, 10, 19, 20, 199_989, 199_990, 200_010, 200_014, 200_015]
    frame = spark.createDataFrame([(at,) for at in times], "at BIGINT").withColumn(
        "event_time", F.timestamp_micros("at")
    )
    found = [row["at"] for row in frame.where(within(windows)).collect()]
    assert found == [-30, 0, 9, 20, 199_989, 200_010, 200_014]
    assert frame.where(~within([])).count() == len(times)

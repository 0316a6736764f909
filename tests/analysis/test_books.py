"""What became of each record of a query: a real broker, a real Spark."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from tests.channels.traffic import send

from penstock.analysis.books import Books, standing
from penstock.analysis.engine import Engine
from penstock.analysis.frames import seen
from penstock.analysis.kafka import KafkaWire
from penstock.analysis.launching import launch
from penstock.analysis.query import Mode, Query, Shape
from penstock.analysis.settings import SparkSettings
from penstock.audit.account import Account, Outcome
from penstock.channels.kafka import Kafka
from penstock.clock import SystemClock
from penstock.contracts import Topic
from penstock.record import Origin, Record

Fresh = Callable[[str], str]
Eventually = Callable[..., None]

BEGIN = 1_700_000_000_000


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
    engine = Engine(spark, settings, KafkaWire(kafka.servers), str(folder), {things: shape})
    wait = SparkSettings(real_time_batch="5 seconds").real_time_batch
    query = Query(into, (things,), into, ("window", "name"), per_name, mode, watermark=wait * 2, where="n > 0")
    ids = {things: kafka.topic_id(things)}

    def launched(before: Account | None) -> Books:
        stood = standing(engine, query, kafka.bounds)
        running, verdict = launch(engine, query, 1, ids)
        assert verdict.mode is mode
        return Books(engine, query, running, before, stood, kafka, SystemClock())

    def until_taken(books: Books, number: int) -> Account:
        def enough() -> bool:
            books.look()
            return books.account.shares[things].taken >= number

        eventually(enough, 60)
        return books.account

    books = launched(None)
    # 100 records over 100 seconds; 7 that do not fit, 9 that are not wanted.
    batch = [thing(seq, seq, n="many" if seq % 14 == 0 else (0 if seq % 11 == 0 else 1)) for seq in range(1, 101)]
    send(kafka, things, batch)
    first = until_taken(books, 100)
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
    until_taken(books, 101)
    send(kafka, things, [thing(102, 201)])
    until_taken(books, 102)
    send(kafka, things, [thing(103, 150), thing(102, 201), thing(104, 202)])
    second = until_taken(books, 105)
    again = Outcome.DUPLICATE if unique else Outcome.PASSED
    expected[Outcome.PASSED] += 3
    expected[Outcome.LATE] += 1
    expected[again] += 1
    assert second.shares[things].outcomes == expected
    assert second.late == {"s": {"1": [(103, 103)]}}
    assert Account.of(second.key, second.dumps()) == second

    # The driver dies before it has told of its last batches: the next one counts them from the log.
    books.running.stop()
    next_life = launched(replace(first, late={}))
    # At once: there may be no further batch.
    assert next_life.look() is not None
    assert next_life.account.shares[things].outcomes == expected
    send(kafka, things, [thing(105, 203), thing(104, 202)])
    third = until_taken(next_life, 107)
    expected[Outcome.PASSED] += 1
    expected[again] += 1
    assert third.shares[things].outcomes == expected
    assert third.conserved
    assert third.late == {"s": {"1": [(103, 103)]}}
    next_life.running.stop()


def test_what_an_earlier_life_has_guessed_says_nothing_about_a_new_one(
    spark: SparkSession, kafka: Kafka, fresh: Fresh, eventually: Eventually, tmp_path: Path
) -> None:
    things, into = fresh("things"), fresh("per_name")
    kafka.ensure([Topic(things), Topic(into, compacted=True)])
    shape = Shape(things, "name STRING NOT NULL, n BIGINT, at BIGINT NOT NULL", "timestamp_millis(at)")
    engine = Engine(spark, SparkSettings(every="100 ms"), KafkaWire(kafka.servers), str(tmp_path), {things: shape})
    query = Query("per_name", (things,), into, ("window", "name"), per_name, Mode.MICRO_BATCH)

    def told(before: Account | None, seq: int) -> Account:
        stood = standing(engine, query, kafka.bounds)
        running, _ = launch(engine, query, 1, {things: kafka.topic_id(things)})
        books = Books(engine, query, running, before, stood, kafka, SystemClock())
        send(kafka, things, [thing(seq, seq)])
        eventually(lambda: books.look() is not None and books.account.shares[things].taken == seq, 60)
        running.stop()
        return books.account

    other = Account("query:per_name", "another life", 0, {}, guessed=True)
    first = told(other, 1)
    assert (first.guessed, first.conserved) == (False, True)
    second = told(replace(first, guessed=True, conserved=False), 2)
    assert second.life == first.life
    assert (second.guessed, second.conserved) == (True, False)

"""A query through its lives: one checkpoint in both modes, then a new one. A real broker, a real Spark."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from tests.channels.traffic import send

from penstock.analysis.accounting import QueryAccounting
from penstock.analysis.checkpoints.batches import covered
from penstock.analysis.checkpoints.doctor import Facts
from penstock.analysis.checkpoints.note import note_of, set_aside
from penstock.analysis.connectors import KafkaConnector
from penstock.analysis.engine import Engine
from penstock.analysis.frames import seen
from penstock.analysis.launch import launch
from penstock.analysis.query import Mode, Query, Shape
from penstock.analysis.settings import SparkSettings
from penstock.audit.account import Account, Outcome
from penstock.channels.kafka import Kafka
from penstock.core.clock import SystemClock
from penstock.core.contracts import Topic
from penstock.core.errors import Misconfigured
from penstock.core.record import GENERATIONS, Origin, Record
from penstock.core.scan import scan

Fresh = Callable[[str], str]
Eventually = Callable[..., None]


def totals(things: DataFrame) -> DataFrame:
    return things.groupBy("name").agg(F.sum("n").alias("total"), seen())


def some(first: int, last: int) -> list[Record]:
    def value(n: int) -> bytes:
        return json.dumps({"name": f"n{n % 3}", "n": n}).encode()

    return [Record(value(n), Origin("s", 1, n, n), b"%d" % n) for n in range(first, last + 1)]


def due(first: int, last: int, generation: int = 0) -> dict[str, tuple[int, int]]:
    """Per name: the version, and the total."""
    folded = {f"n{rest}": [n for n in range(first, last + 1) if n % 3 == rest] for rest in range(3)}
    return {name: (generation * GENERATIONS + len(numbers), sum(numbers)) for name, numbers in folded.items()}


def newest(kafka: Kafka, channel: str) -> dict[str, tuple[int, int]]:
    """What a client would have."""
    table: dict[str, tuple[int, int]] = {}
    for entry in scan(kafka, channel):
        row, version = json.loads(entry.value or b""), int(dict(entry.headers)["version"])
        table[row["name"]] = max(table.get(row["name"], (0, 0)), (version, row["total"]))
    return table


def test_a_query_goes_on_in_either_mode_and_begins_anew_where_it_is_told(
    spark: SparkSession, kafka: Kafka, fresh: Fresh, eventually: Eventually, tmp_path: Path
) -> None:
    things, into = fresh("things"), fresh("totals")
    kafka.ensure([Topic(things), Topic(into, compacted=True)])
    settings = SparkSettings(real_time_batch="5 seconds", every="200 ms")
    shapes = {things: Shape(things, "name STRING NOT NULL, n BIGINT")}
    engine = Engine(spark, settings, KafkaConnector(kafka.servers), str(tmp_path), shapes)
    folder, ids = engine.checkpoint(into), {things: kafka.topic_id(things), into: kafka.topic_id(into)}
    account: Account | None = None

    def launched(mode: Mode) -> QueryAccounting:
        query = Query(into, (things,), into, ("name",), totals, mode)
        running, verdict = launch(
            engine, query, 1, ids, 0, Facts(bounds={things: kafka.bounds(things)}, account=account)
        )
        assert verdict.mode is mode
        return QueryAccounting(engine, query, running, account, kafka, SystemClock())

    def until_covered(accounting: QueryAccounting, last: int) -> Account:
        eventually(lambda: covered(folder) == {things: {0: last}})

        def told() -> bool:
            accounting.look()
            return accounting.account.shares[things].until == {0: last}

        eventually(told)
        accounting.running.stop()
        return accounting.account

    send(kafka, things, some(1, 100))
    # Real time is stopped before it has noted a batch: what it has planned is in nobody's way.
    launched(Mode.REAL_TIME).running.stop()
    assert covered(folder) is None
    account = until_covered(launched(Mode.MICRO_BATCH), 100)
    send(kafka, things, some(101, 200))
    accounting = launched(Mode.REAL_TIME)
    eventually(lambda: newest(kafka, into) == due(1, 200))
    eventually(lambda: covered(folder) == {things: {0: 200}})
    # It is stopped within a batch, of which some rows are written.
    send(kafka, things, some(201, 250))
    eventually(lambda: newest(kafka, into) == due(1, 250))
    accounting.running.stop()
    send(kafka, things, some(251, 300))
    account = until_covered(launched(Mode.MICRO_BATCH), 300)
    assert newest(kafka, into) == due(1, 300)
    assert (account.number, account.shares[things].outcomes[Outcome.PASSED]) == (0, 300)

    # Without its checkpoint, all would be counted again, and older counts would stand.
    assert set_aside(Path(folder)) is not None
    with pytest.raises(Misconfigured, match="its checkpoint is missing, and it has read"):
        launched(Mode.MICRO_BATCH)
    note = note_of(f"{folder}.1")
    assert (note.topics, note.generation, note.since) == (ids, 0, None)

    # Its second life begins at the 200th record, in real time; its rows count less, and win.
    type(note)(ids, 1, {things: {0: 199}}).write(folder)
    accounting = launched(Mode.REAL_TIME)
    eventually(lambda: newest(kafka, into) == due(200, 300, generation=1))
    account = until_covered(accounting, 300)
    share = account.shares[things]
    assert (account.number, share.since, share.taken, account.conserved) == (1, {0: 199}, 101, True)
    rows = {
        row["name"]: row["total"] for row in engine.recompute(Query(into, (things,), into, ("name",), totals)).collect()
    }
    assert rows == {name: total for name, (_, total) in due(200, 300).items()}
    # It goes on from there, though its note still tells where it began.
    send(kafka, things, some(301, 310))
    account = until_covered(launched(Mode.MICRO_BATCH), 310)
    assert newest(kafka, into) == due(200, 310, generation=1)
    assert account.shares[things].taken == 111

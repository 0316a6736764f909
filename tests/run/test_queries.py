"""The queries of a pipeline as they are started, started again and stopped."""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex
from typing import Any, cast

import pytest
from pyspark.sql import SparkSession
from tests.analysis.still import StillConnector
from tests.channels.traffic import numbered, send

from penstock.analysis.checkpoints.batches import covered, unfinished
from penstock.analysis.checkpoints.note import Note, set_aside
from penstock.analysis.connectors import KafkaConnector, SparkConnector
from penstock.analysis.engine import Engine
from penstock.analysis.query import Query
from penstock.analysis.settings import SparkSettings
from penstock.analysis.supervision import StreamingQuery
from penstock.audit.account import Outcome
from penstock.audit.writers import token_of
from penstock.channels.kafka import Kafka
from penstock.core.contracts import Channels
from penstock.core.errors import Misconfigured
from penstock.core.record import Origin, Record
from penstock.core.scan import scan
from penstock.pipeline.config import topics
from penstock.pipeline.pipeline import Pipeline
from penstock.run.accounts import announce
from penstock.run.queries import Queries, result_writers, stop_between
from penstock.testing import MemoryChannels

COUNTED = "SELECT value, count(1) AS n, seen() FROM `{}` GROUP BY value"


def made(
    app: Pipeline, channels: Channels, connector: SparkConnector, spark: SparkSession, folder: Path
) -> tuple[Queries, Engine]:
    description = app.describe()
    channels.ensure(topics(description))
    shapes = {name: channel.shape for name, channel in description.channels.items()}
    engine = Engine(spark, SparkSettings(real_time_queries=0, every="100 ms"), connector, str(folder), shapes)
    ids = {name: channels.topic_id(name) for name in description.channels}
    return Queries(engine, description, channels, ids), engine


def test_none_starts_when_one_of_them_cannot(spark: SparkSession, tmp_path: Path) -> None:
    app = Pipeline("lines")
    app.channel("lines")
    counted = COUNTED.format("lines")
    app.sql_query("first", key="value", sql=counted)
    app.sql_query("sorts", key="value", sql=f"{counted} ORDER BY n LIMIT 3")
    queries, _ = made(app, MemoryChannels(), StillConnector(), spark, tmp_path)
    with pytest.raises(Misconfigured, match="query sorts: Spark cannot run it over streams"):
        queries.start()
    assert list(tmp_path.iterdir()) == []


class Calm(KafkaConnector):
    @property
    def objection(self) -> str:
        return "the waters are calm"


def test_one_that_is_started_again_goes_on_and_says_how(
    spark: SparkSession, kafka: Kafka, fresh: Callable[[str], str], eventually: Callable[..., None], tmp_path: Path
) -> None:
    channel = fresh("lines")
    app = Pipeline(fresh("pipeline"))
    app.channel(channel, partitions=1)
    app.sql_query("counted", key="value", sql=COUNTED.format(channel), into=fresh("counted"))
    (query,) = app.describe().queries
    queries, engine = made(app, kafka, KafkaConnector(kafka.servers), spark, tmp_path)
    folder = engine.checkpoint("counted")

    def note() -> Any:
        told: Any = queries.figures()["nodes"]
        return told["query:counted"]["mode"], told["query:counted"]["note"]

    queries.start()
    locations = "micro-batch: Spark allows real time, but other queries use the slots ([spark] real_time_queries)"
    assert note() == ("micro-batch", locations)
    send(kafka, channel, numbered(3))
    eventually(lambda: covered(folder) == {channel: {0: 3}})
    queries.running("counted").stop()
    # As if it had been stopped in its last batch.
    max((tmp_path / "counted" / "commits").glob("[0-9]*"), key=lambda one: int(one.name)).unlink()
    send(kafka, channel, numbered(2, first=4))
    queries.finish(engine, query)
    eventually(lambda: unfinished(folder) is None and not queries.running("counted").status["isTriggerActive"])
    # That one, and no other.
    assert covered(folder) == {channel: {0: 3}}
    assert note() == ("micro-batch", locations)
    queries.running("counted").stop()
    queries.again(replace(engine, connector=Calm(kafka.servers)), query)
    assert note() == ("micro-batch", "micro-batch: no real time: the waters are calm")
    eventually(lambda: covered(folder) == {channel: {0: 5}})
    eventually(lambda: [account.shares[channel].taken for account in queries.accounts()] == [5])
    assert queries.failed() is None
    queries.stop()
    assert not queries.running("counted").isActive


@dataclass
class Batches:
    """A query whose batch goes on for as long as it is asked so many times."""

    asked: int
    stopped_in: bool | None = None
    lastProgress: None = None

    @property
    def status(self) -> dict[str, bool]:
        self.asked -= 1
        return {"isTriggerActive": self.asked > 0}

    def stop(self) -> None:
        self.stopped_in = self.asked > 0


def test_what_would_give_its_batch_up_is_stopped_when_that_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    one, other = Batches(2), Batches(5)
    stop_between({"one": cast(StreamingQuery, one), "other": cast(StreamingQuery, other)}, within=60)
    assert [one.stopped_in, other.stopped_in] == [False, False]
    assert not caplog.messages


def test_a_batch_without_an_end_is_stopped_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    endless, one = Batches(10**9), Batches(1)
    stop_between({"endless": cast(StreamingQuery, endless), "one": cast(StreamingQuery, one)}, within=0.1)
    assert [endless.stopped_in, one.stopped_in] == [True, False]
    assert [message.split(":")[0] for message in caplog.messages] == ["query endless"]


def test_a_query_ignores_rows_of_a_result_that_no_query_has_written(
    spark: SparkSession, kafka: Kafka, fresh: Callable[[str], str], eventually: Callable[..., None], tmp_path: Path
) -> None:
    channel, counted, again = fresh("lines"), fresh("counted"), fresh("again")
    app = Pipeline(fresh("pipeline"))
    app.channel(channel, partitions=1)
    app.sql_query("counted", key="value", sql=COUNTED.format(channel), into=counted)
    app.sql_query("again", key="value", sql=f"SELECT value, n FROM `{counted}`", into=again)
    description = app.describe()
    kafka.ensure(topics(description))
    queries, engine = made(app, kafka, KafkaConnector(kafka.servers), spark, tmp_path)

    def announced(query: Query, note: Note) -> None:
        announce(kafka, description.bookmarks, query.name, query.into, note.writer, note.generation)

    def start() -> Queries:
        # As in a new process: tokens begin with another prefix.
        known = replace(engine.knowing(description.queries), announce=announced, token_prefix=token_hex(4))
        known = replace(known, writers=result_writers(kafka, description, known))
        ids = {name: kafka.topic_id(name) for name in description.channels}
        queries = Queries(known, description, kafka, ids)
        queries.start()
        return queries

    def rows() -> dict[str, int]:
        values = [json.loads(entry.value) for entry in scan(kafka, again) if entry.value is not None]
        return {value["value"]: value["n"] for value in values}

    def forge(*headers: tuple[str, bytes]) -> None:
        row = b'{"value": "forged", "n": 7, "seen": null}'
        send(kafka, counted, [Record(row, Origin("forger", 1, 1, 1), b'["forged"]', extra=headers)])

    def outcomes() -> dict[Outcome, int]:
        found = {account.stage: account for account in queries.accounts()}
        shares = found["query:again"].shares.values() if "query:again" in found else ()
        return {outcome: count for share in shares for outcome, count in share.outcomes.items() if count}

    queries = start()
    try:
        forge()
        forge(("writer", b"0badcafe"))
        send(kafka, channel, [Record(b"first", Origin("s", 1, 1, 1))])
        eventually(lambda: rows() == {"first": 1})
        eventually(lambda: outcomes() == {Outcome.PASSED: 1, Outcome.REFUSED: 2})
    finally:
        queries.stop()
    # After a restart, rows of the earlier process are still of a known writer; those of a new generation are, too.
    sent = kafka.bounds(counted)[0][1]
    queries = start()
    try:
        forge()
        queries.running("counted").stop()
        set_aside(tmp_path / "counted")
        Note(generation=1, since={channel: {0: 0}}).write(str(tmp_path / "counted"))
        queries.again(queries._engine, description.query("counted"))
        send(kafka, channel, [Record(b"second", Origin("s", 1, 2, 2))])
        eventually(lambda: rows() == {"first": 1, "second": 1})
        tokens = {token_of(entry.headers) for entry in scan(kafka, counted, {0: sent})}
        assert len(tokens - {None}) == 1
    finally:
        queries.stop()

"""Records that make a query fail: found, written to the dead letters, left out. A real broker, a real Spark."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from tests.channels.traffic import send

from penstock import Keyed, Pipeline, ValueState
from penstock.analysis.checkpoints.batches import excluded
from penstock.analysis.connectors import KafkaConnector
from penstock.analysis.engine import Engine
from penstock.analysis.poison import Isolation, last_needed, offenders, row_size, work_of
from penstock.analysis.replay import recomputed
from penstock.analysis.settings import SparkSettings
from penstock.audit.account import Outcome
from penstock.channels.kafka import Kafka
from penstock.core.contracts import Topic
from penstock.core.record import Origin, Record
from penstock.core.scan import scan
from penstock.operate.dead_letters import Letter
from penstock.pipeline.config import topics
from penstock.run.queries import Queries

Fresh = Callable[[str], str]
Eventually = Callable[..., None]

CHANNEL = "poisonous_things"
SCHEMA = "id BIGINT NOT NULL, name STRING, n BIGINT, size INT"


def _checked(name: str) -> str:
    if name == "udf":
        raise ValueError("it cannot be checked")
    return name


checked = F.udf(lambda name: _checked(name))


class Counting(Keyed):
    schema = "name STRING, count BIGINT"
    times = ValueState("count BIGINT")

    def process(self, key: str, row: Any) -> Any:
        if key == "state":
            raise LookupError("it cannot be counted")
        self.times.set(self.times.get(0) + 1)
        return {"count": self.times.get()}


SQL = {
    "by_name": "SELECT name, count(1) AS count, seen() FROM poisonous_things GROUP BY name",
    "shares": "SELECT id, 100 DIV n AS share, origin FROM poisonous_things",
    "labels": "SELECT id, repeat('x', size) AS label, origin FROM poisonous_things",
}
POISON: dict[str, dict[str, Any]] = {
    "by_name": {"name": "giant" * 120_000},
    "shares": {"n": 0},
    "labels": {"size": 2_000_000},
    "with_udf": {"name": "udf"},
    "with_state": {"name": "state"},
}
"""Per query, what makes it fail, and no other one."""


def with_udf(poisonous_things: DataFrame) -> DataFrame:
    return poisonous_things.select("id", F.length(checked("name")).alias("length"), "origin")


def with_state(poisonous_things: DataFrame) -> DataFrame:
    return Counting.over(poisonous_things.withColumn("name", F.substring("name", 1, 20)), key="name")


def declare(app: Pipeline) -> None:
    """The queries that fail, and one that does not."""
    for name, sql in SQL.items():
        app.sql_query(name, key="name" if name == "by_name" else "id", sql=sql)
    app.query(key="id")(with_udf)
    app.query(key=("name", "count"))(with_state)
    app.sql_query("other", key="n", sql="SELECT n, count(1) AS count, seen() FROM poisonous_things GROUP BY n")


def portion(first: int, size: int, poison: Iterable[dict[str, Any]]) -> list[Record]:
    """Records of which some, far apart, are poisonous."""
    changed = list(poison)
    apart = size // max(1, len(changed))
    spread = {first + at * apart + apart // 2: change for at, change in enumerate(changed)}
    return [thing(number, **spread.get(number, {})) for number in range(first, first + size)]


def thing(number: int, **other: Any) -> Record:
    value = {"id": number, "name": f"name {number % 50}", "n": 1, "size": 1, "text": "1", **other}
    return Record(json.dumps(value).encode(), Origin("s", 1, number, number), b"%d" % number)


class Analysis:
    """Queries of a pipeline that run as in the analysis tier."""

    def __init__(self, app: Pipeline, kafka: Kafka, spark: SparkSession, folder: Path, **settings: Any) -> None:
        description = app.describe()
        kafka.ensure(topics(description))
        shapes = {name: channel.shape for name, channel in description.channels.items()}
        told = SparkSettings(**{"every": "200 ms", "real_time_batch": "5 seconds", **settings})
        self.engine = Engine(spark, told, KafkaConnector(kafka.servers), str(folder), shapes)
        ids = {one.name: kafka.topic_id(one.name) for one in topics(description)}
        self.queries = Queries(self.engine, description, kafka, ids)
        self.declared = {query.name: query for query in description.queries}
        self.queries.start()

    def node(self, query: str) -> dict[str, Any]:
        return dict(self.queries.figures()["nodes"][f"query:{query}"])

    def outcomes(self, query: str) -> dict[Outcome, int]:
        accounts = {account.stage: account for account in self.queries.accounts()}
        if (account := accounts.get(f"query:{query}")) is None:
            return {}
        (share,) = account.shares.values()
        return {outcome: count for outcome, count in share.outcomes.items() if count}


@pytest.fixture
def analyse(kafka: Kafka, spark: SparkSession, tmp_path: Path) -> Iterator[Callable[..., Analysis]]:
    started: list[Analysis] = []

    def start(app: Pipeline, **settings: Any) -> Analysis:
        started.append(Analysis(app, kafka, spark, tmp_path, **settings))
        return started[-1]

    yield start
    for one in started:
        one.queries.stop()


def letters(kafka: Kafka, channel: str) -> list[Letter]:
    return [Letter.of(entry) for entry in scan(kafka, f"{channel}.dead")]


def test_records_of_five_kinds_make_five_queries_fail_and_are_left_out(
    kafka: Kafka, fresh: Fresh, eventually: Eventually, analyse: Callable[..., Analysis]
) -> None:
    """A query in which each of them is nothing special does not notice. More of them: tests/soak/test_poison.py."""
    app = Pipeline(fresh("pipeline"))
    app.channel(CHANNEL, schema=SCHEMA, partitions=2)
    declare(app)
    analysis = analyse(app, real_time_queries=0)
    run = analysis.queries.running("other").runId
    sent = portion(0, 100, POISON.values())
    send(kafka, CHANNEL, sent)
    eventually(lambda: all(analysis.outcomes(name) == {Outcome.PASSED: 99, Outcome.REFUSED: 1} for name in POISON), 480)
    found = {one.excluded_by or "": one for one in letters(kafka, CHANNEL)}
    assert found.keys() == POISON.keys()
    assert len(letters(kafka, CHANNEL)) == 5
    for name, letter in found.items():
        (record,) = [one for one in sent if one.value == letter.value]
        assert json.loads(record.value or b"") | POISON[name] == json.loads(record.value or b"")
        assert (letter.origin, letter.entry.key) == (record.origin, record.key)
        assert "error" in dict(letter.entry.headers)
        assert "error" not in dict(letter.headers)
    assert analysis.queries.running("other").runId == run
    assert analysis.outcomes("other") == {Outcome.PASSED: 100}
    assert analysis.node("other") | {"restarts": 0, "error": "", "accounting": "current"} == analysis.node("other")
    # A batch over the log leaves out the same.
    until = {CHANNEL: {at: end for at, (_, end) in kafka.bounds(CHANNEL).items()}}
    rows = recomputed(analysis.engine, analysis.declared["shares"], until)
    assert len(rows) == 99


def test_a_record_is_found_in_real_time_and_written_once(
    kafka: Kafka, fresh: Fresh, eventually: Eventually, analyse: Callable[..., Analysis], tmp_path: Path
) -> None:
    name, into = fresh("things"), fresh("counted")
    app = Pipeline(fresh("pipeline"))
    app.channel(name, schema=SCHEMA, partitions=1)
    sql = f"SELECT name, count(1) AS count, seen() FROM `{name}` GROUP BY name"
    app.sql_query("counted", key="name", sql=sql, into=into)
    analysis = analyse(app)
    assert analysis.node("counted")["mode"] == "real-time"
    send(kafka, name, [thing(1), thing(2, name="giant" * 120_000), thing(3)])
    eventually(lambda: analysis.outcomes("counted") == {Outcome.PASSED: 2, Outcome.REFUSED: 1}, 120)
    assert [one.value for one in letters(kafka, name)] == [thing(2, name="giant" * 120_000).value]
    assert [(one.partition, one.offset) for one in excluded(f"{tmp_path}/counted")] == [(0, 1)]
    assert analysis.node("counted")["mode"] == "real-time"
    # As if the driver had died after the letter and before the note: it is found again, and not written again.
    (tmp_path / "counted" / "excluded.json").unlink()
    analysis.queries.running("counted").stop()
    isolation = Isolation(lambda: analysis.engine, work_of(analysis.declared["counted"]), kafka, 100)
    for file in (tmp_path / "counted" / "commits").glob("[0-9]*"):
        file.unlink()
    assert isolation("again") == 1
    assert len(letters(kafka, name)) == 1


def test_a_query_with_too_many_of_them_is_stopped_and_the_others_go_on(
    kafka: Kafka, fresh: Fresh, eventually: Eventually, analyse: Callable[..., Analysis], tmp_path: Path
) -> None:
    name = fresh("things")
    app = Pipeline(fresh("pipeline"))
    app.channel(name, schema=SCHEMA)
    app.sql_query("shares", key="id", sql=f"SELECT id, 100 DIV n AS share, origin FROM `{name}`", into=fresh("shares"))
    app.sql_query("other", key="id", sql=f"SELECT id, n, origin FROM `{name}`", into=fresh("other"))
    analysis = analyse(app, poison_limit=1, real_time_queries=0)
    send(kafka, name, [thing(number, n=number % 2) for number in range(6)])
    eventually(lambda: analysis.node("shares")["state"] == "stopped", 120)
    assert "poison_limit" in analysis.node("shares")["error"]
    # Nothing is left out by a query that does not go on.
    assert (letters(kafka, name), excluded(f"{tmp_path}/shares")) == ([], [])
    eventually(lambda: analysis.outcomes("other") == {Outcome.PASSED: 6})
    assert analysis.node("other")["restarts"] == 0


def test_a_record_that_fails_where_it_is_joined_is_found(
    kafka: Kafka, fresh: Fresh, eventually: Eventually, analyse: Callable[..., Analysis], tmp_path: Path
) -> None:
    left, right = fresh("left"), fresh("right")
    app = Pipeline(fresh("pipeline"))
    for channel in (left, right):
        app.channel(channel, schema=SCHEMA, partitions=1)
    sql = f"SELECT l.id, l.n DIV r.n AS share, seen(l, r) FROM `{left}` l JOIN `{right}` r ON l.id = r.id"
    app.sql_query("shares", key="id", sql=sql, into=fresh("shares"))
    analysis = analyse(app, real_time_queries=0)
    for channel in (right, left):
        send(kafka, channel, [thing(number, n=int(channel != right or number != 3)) for number in range(6)])

    def found() -> bool:
        accounts = {account.stage: account for account in analysis.queries.accounts()}
        return all(sum(share.outcomes.values()) == 6 for share in accounts["query:shares"].shares.values())

    eventually(found, 120)
    (one,) = excluded(f"{tmp_path}/shares")
    assert (one.offset, analysis.node("shares")["state"]) == (3, "running")


class Repeats(Keyed):
    schema = "name STRING, count BIGINT"
    times = ValueState("count BIGINT")

    def process(self, key: str, row: Any) -> Any:
        if self.times and row.n == 0:
            raise LookupError("it came before")
        self.times.set(self.times.get(0) + 1)
        return {"name": key, "count": self.times.get()}


def test_records_are_found_that_fail_only_with_the_state_or_with_others_of_their_batch(
    kafka: Kafka, fresh: Fresh, eventually: Eventually, analyse: Callable[..., Analysis], tmp_path: Path
) -> None:
    channel = "repeated_things"
    app = Pipeline(fresh("pipeline"))
    app.channel(channel, schema=SCHEMA, partitions=1)

    @app.query(key=("name", "count"), into=fresh("repeats"))
    def repeats(repeated_things: DataFrame) -> DataFrame:
        return Repeats.over(repeated_things, key="name")

    label = f"SELECT name, string_agg(repeat('x', size)) AS label, seen() FROM `{channel}` GROUP BY name"
    app.sql_query("labels", key="name", sql=label, into=fresh("labels"))
    analysis = analyse(app, real_time_queries=0)

    def counted(passed: int, refused: int) -> bool:
        expected = {Outcome.PASSED: passed} | ({Outcome.REFUSED: refused} if refused else {})
        return all(analysis.outcomes(name) == expected for name in ("repeats", "labels"))

    send(kafka, channel, [thing(1), thing(2, name="a", size=700_000)])
    eventually(lambda: counted(2, 0), 120)
    send(kafka, channel, [thing(3), thing(4, name="a", n=0, size=400_000), thing(5)])
    eventually(lambda: counted(4, 1), 240)
    for name in ("repeats", "labels"):
        assert [one.offset for one in excluded(f"{tmp_path}/{name}")] == [3]
    assert "it came before" in excluded(f"{tmp_path}/repeats")[0].error
    assert not list(tmp_path.glob("*/probe"))
    send(kafka, channel, [thing(6, name="b", size=600_000), thing(7, name="b", n=0, size=600_000), thing(8)])
    eventually(lambda: counted(6, 2), 240)
    for name in ("repeats", "labels"):
        assert [one.offset for one in excluded(f"{tmp_path}/{name}")] == [3, 6]


@pytest.mark.parametrize("bad", [1, 2, 57, 100])
def test_the_last_record_of_the_shortest_part_that_fails_is_found(bad: int) -> None:
    assert last_needed(100, lambda count: f"at {count}" if count >= bad else None) == (bad, f"at {bad}")


def test_a_failure_without_any_record_is_the_fault_of_none() -> None:
    assert last_needed(100, lambda _: "why") is None
    assert last_needed(100, lambda _: None) is None


RECORDS = range(100)


@pytest.mark.parametrize("bad", [(), (0,), (99,), (0, 1, 2), (3, 60), (20, 21, 99), (39, 40, 41)])
def test_the_records_that_fail_are_found_by_halves(bad: tuple[int, ...]) -> None:
    runs = 0

    def error(tried: Sequence[int]) -> str | None:
        nonlocal runs
        runs += 1
        return "why" if not set(bad).isdisjoint(tried) else None

    assert list(offenders(RECORDS, error, 10)) == [(one, "why") for one in bad]
    assert runs <= 1 + len(bad) * (1 + 7 + 1) + 3


def test_records_that_fail_only_together_are_not_found() -> None:
    def error(tried: Sequence[int]) -> str | None:
        return "why" if {3, 60} <= set(tried) else None

    assert list(offenders(RECORDS, error, 9)) == []


def test_where_each_record_fails_not_all_are_tried() -> None:
    runs: list[Sequence[int]] = []

    def error(tried: Sequence[int]) -> str | None:
        runs.append(tried)
        return "why"

    assert len(list(offenders(RECORDS, error, 20))) > 20
    assert len(runs) < 40


def test_a_row_is_as_large_as_kafka_finds_it(spark: SparkSession, kafka: Kafka, fresh: Fresh) -> None:
    into, limit = fresh("into"), 70_000
    kafka.ensure([Topic(into, config={"max.message.bytes": str(limit)})])
    headers = F.array(F.struct(F.lit("version").alias("key"), F.lit(b"7").alias("value")))

    def row(length: int) -> DataFrame:
        value = F.expr(f"CAST(repeat('x', {length}) AS BINARY)")
        return spark.range(1).select(F.lit(b"key").alias("key"), value.alias("value"), headers.alias("headers"))

    length = limit - 1_000
    length += limit - row(length).select(row_size()).collect()[0][0]
    told = {"kafka.bootstrap.servers": kafka.servers, "topic": into, "includeHeaders": "true"}
    row(length).write.format("kafka").options(**told).save()
    with pytest.raises(Py4JJavaError, match="RecordTooLarge"):
        row(length + 1).write.format("kafka").options(**told).save()

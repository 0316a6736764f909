"""The lakes of a pipeline as they are filled by Spark: started, started again, and waited for."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from tests.channels.traffic import send

from penstock.analysis.connectors import BinderConnector, KafkaConnector, SparkConnector
from penstock.analysis.engine import Engine
from penstock.analysis.settings import SparkSettings
from penstock.audit.account import Outcome
from penstock.channels.kafka import Kafka
from penstock.channels.sqlite import SqliteChannels
from penstock.core.contracts import Channels
from penstock.core.errors import Misconfigured
from penstock.core.record import Origin, Record
from penstock.core.scan import scan
from penstock.pipeline.config import Config, topics
from penstock.pipeline.description import Description
from penstock.pipeline.pipeline import Pipeline
from penstock.run.lakes import Lakes
from penstock.run.queries import Queries

Fresh = Callable[[str], str]
Eventually = Callable[..., None]


class Case:
    """A pipeline with one lake and no query."""

    def __init__(
        self, spark: SparkSession, channels: Channels, connector: SparkConnector, folder: Path, name: str
    ) -> None:
        app = Pipeline("p")
        app.channel(name, schema="n BIGINT NOT NULL", event_time="timestamp_seconds(n)")
        app.store(name, "delta://lake")
        self.name, self.channels, self.folder, self.description = name, channels, folder, app.describe()
        channels.ensure(topics(self.description))
        shapes = {one: channel.shape for one, channel in self.description.channels.items()}
        settings = SparkSettings(every="100 ms")
        self.engine = Engine(spark, settings, connector, str(folder / "checkpoints"), shapes)
        self.config = Config.read(folder, environ={})

    def start(self, topic: str | None = None) -> tuple[Queries, Lakes]:
        ids = {name: topic or self.channels.topic_id(name) for name in self.description.channels}
        queries = Queries(self.engine, self.description, self.channels, ids)
        lakes = Lakes(self.engine, self.description, self.config, self.channels, ids)
        lakes.require()
        queries.start()
        lakes.start(queries)
        return queries, lakes

    def send(self, first: int, values: Sequence[bytes]) -> None:
        records = [Record(value, Origin("s", 1, first + at, 1), b"k") for at, value in enumerate(values)]
        send(self.channels, self.name, records)

    def rows(self) -> list[int]:
        table = DeltaTable(str(self.folder / "lake")).to_pyarrow_table(columns=["_seq"])
        return sorted(table["_seq"].to_pylist())

    def dead(self) -> list[bytes | None]:
        return [entry.value for entry in scan(self.channels, f"{self.name}.dead")]


@pytest.fixture(params=["kafka", "files"])
def case(request: pytest.FixtureRequest, spark: SparkSession, fresh: Fresh, tmp_path: Path) -> Case:
    name = fresh("things").replace("-", "_")
    if request.param == "kafka":
        kafka: Kafka = request.getfixturevalue("kafka")
        return Case(spark, kafka, KafkaConnector(kafka.servers), tmp_path, name)
    files = SqliteChannels(tmp_path / "channels")
    return Case(spark, files, BinderConnector(files), tmp_path, name)


def taken(lakes: Lakes) -> int:
    return sum(share.taken for account in lakes.accounts() for share in account.shares.values())


def test_a_lake_is_filled_goes_on_and_accounts(case: Case, eventually: Eventually) -> None:
    """No query is declared; what does not fit has one dead letter, however often the process begins anew."""
    case.send(0, [b'{"n": 1}', b'{"n": 2} x', b'{"n": 3}'])
    for first in (3, 6):
        queries, lakes = case.start()
        eventually(lambda lakes=lakes, first=first: taken(lakes) == first)
        queries.stop()
        case.send(first, [b'{"n": 1}', b"?", b'{"n": 253402300799}'])
    queries, lakes = case.start()
    eventually(lambda: taken(lakes) == 9)
    (account,) = lakes.accounts()
    (share,) = account.shares.values()
    queries.stop()
    assert account.stage == f"store:delta/{case.name}"
    assert [share.outcomes[one] for one in (Outcome.PASSED, Outcome.DUPLICATE, Outcome.REFUSED)] == [4, 0, 5]
    assert share.until == {at: end for at, (_, end) in case.channels.bounds(case.name).items()}
    assert case.rows() == [0, 2, 3, 6]
    assert sorted(case.dead(), key=str) == sorted([b'{"n": 2} x', *[b"?", b'{"n": 253402300799}'] * 2], key=str)
    figures = next(iter(lakes.figures().values()))
    assert (figures["state"], figures["lag"]) == ("loading", 0)


def test_a_lake_that_is_away_is_waited_for(
    spark: SparkSession, tmp_path: Path, eventually: Eventually, fresh: Fresh
) -> None:
    files = SqliteChannels(tmp_path / "channels")
    case = Case(spark, files, BinderConnector(files), tmp_path, fresh("things").replace("-", "_"))
    case.send(0, [b'{"n": 1}'])
    queries, lakes = case.start()
    eventually(lambda: taken(lakes) == 1)
    log = tmp_path / "lake" / "_delta_log"
    log.rename(tmp_path / "away")
    log.write_text("")
    case.send(1, [b'{"n": 2}'])
    eventually(lambda: next(iter(lakes.figures().values()))["state"] == "waiting")
    log.unlink()
    (tmp_path / "away").rename(log)
    eventually(lambda: taken(lakes) == 2)
    queries.stop()
    assert case.rows() == [0, 1]


def test_a_record_that_the_validation_fails_with_is_a_dead_letter(
    spark: SparkSession, kafka: Kafka, tmp_path: Path, eventually: Eventually, fresh: Fresh
) -> None:
    """The seconds of this one are more than Spark can make a time of: the expression itself fails."""
    case = Case(spark, kafka, KafkaConnector(kafka.servers), tmp_path, fresh("things").replace("-", "_"))
    case.send(0, [b'{"n": 1}', json.dumps({"n": 2**63 - 1}).encode(), b'{"n": 3}'])
    queries, lakes = case.start()
    eventually(lambda: taken(lakes) == 3, 120)
    queries.stop()
    assert case.rows() == [0, 2]
    assert len(case.dead()) == 1


def test_a_lake_of_another_topic_is_refused_before_anything_starts(
    spark: SparkSession, tmp_path: Path, fresh: Fresh
) -> None:
    files = SqliteChannels(tmp_path / "channels")
    case = Case(spark, files, BinderConnector(files), tmp_path, fresh("things").replace("-", "_"))
    case.start()[0].stop()
    with pytest.raises(Misconfigured):
        case.start("another")


def test_a_lake_needs_no_query_of_its_own_for_its_dead_letters() -> None:
    app = Pipeline("p")
    app.channel("kept", schema="n BIGINT")
    app.channel("other", schema="n BIGINT")
    app.store("kept", "delta://lake")
    app.store("other", "redis://")
    described: Description = app.describe()
    assert [one.name for one in described.validated] == ["other"]
    assert [one.channel for one in described.lakes] == ["kept"]

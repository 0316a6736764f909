"""Everything compared once with the channels: a real broker, Spark, Redis and lakes."""

import asyncio
import json
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import redis
from confluent_kafka import Producer
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from tests.operate.engines import set_up
from tests.servers import RedisServer

from penstock.analysis.checkpoints.batches import covered
from penstock.analysis.engine import Engine
from penstock.analysis.launch import launch
from penstock.analysis.settings import SparkSettings
from penstock.audit.balance import Balance
from penstock.audit.judge import Verdict
from penstock.channels.kafka import Kafka
from penstock.cli.audit import deepened
from penstock.core.record import Origin, Record
from penstock.core.scan import scan
from penstock.operate.deep_audit import Deep, merged
from penstock.pipeline.config import Config
from penstock.pipeline.description import Description
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.stores import make_store
from penstock.run.accounts import announce
from penstock.run.lakes import Lake
from penstock.stores.redis import RedisStore

Fresh = Callable[[str], str]
Eventually = Callable[..., None]


@dataclass(frozen=True)
class Case:
    kafka: Kafka
    engine: Engine
    description: Description
    config: Config
    redis: "redis.Redis"

    def deep(self) -> Deep:
        found = Deep(self.description, self.config, start=lambda: nullcontext(self.engine))
        found.run()
        return found

    def lake(self, channel: str) -> DeltaTable:
        return DeltaTable(str(self.config.folder / channel))


@pytest.fixture
def case(
    kafka: Kafka,
    spark: SparkSession,
    fresh: Fresh,
    tmp_path: Path,
    shared_redis: RedisServer,
    eventually: Eventually,
) -> Case:
    name = fresh("deep").replace("-", "_")
    things, counts = f"things_{name}", f"counts_{name}"
    app = Pipeline(name)
    app.channel(things, schema="name STRING NOT NULL, n BIGINT")
    app.source("ws://x", into=things)
    app.sql_query(
        f"count_{name}", into=counts, key="name", sql=f"SELECT name, count(1) AS times, seen() FROM {things} GROUP BY 1"
    )
    app.store(counts, "redis://")
    app.store(counts, f"delta://{counts}")
    app.store(things, f"delta://{things}")
    settings = SparkSettings(every="200 ms", real_time_queries=0)
    description, config, engine = set_up(app, kafka, shared_redis.url, tmp_path, spark, settings)
    records = [
        Record(json.dumps({"name": f"a{n % 7}", "n": n}).encode(), Origin("kiosk", 1, n, n + 1), b"%d" % n)
        for n in range(60)
    ]

    async def send() -> None:
        async with kafka.sender() as sender:
            await sender.send(things, [*records, Record(b"?", Origin("kiosk", 1, 60, 1), b"x")])

    asyncio.run(send())
    own = replace(
        engine,
        announce=lambda query, note: announce(
            kafka, description.bookmarks, query.name, query.into, note.writer, note.generation
        ),
    ).knowing(description.queries)
    query = description.queries[0]
    running, _ = launch(own, query, 0, {})
    ends = {partition: end for partition, (_, end) in kafka.bounds(things).items()}
    try:
        eventually(lambda: (covered(f"{own.checkpoints}/{query.name}") or {}).get(things) == ends)
    finally:
        running.stop()
    with closing(RedisStore(shared_redis.url, counts).open()) as store:
        store.positions()
        store.write(list(scan(kafka, counts)), {})
    for spec in description.lakes:
        filling = Lake(own, spec, description, config, kafka, "").start()
        described = make_store(spec, description, config)
        due = {partition: end for partition, (_, end) in kafka.bounds(spec.channel).items()}
        try:
            eventually(lambda described=described, due=due: described.stands() == due)
        finally:
            filling.stop()
    return Case(kafka, own, description, config, shared_redis.client())


def test_what_no_count_shows_is_found(case: Case) -> None:
    things, counts = case.description.queries[0].inputs[0], case.description.queries[0].into
    whole = case.deep()
    assert not whole.discrepancies
    assert not whole.doubts
    assert len(whole.checked) == 4
    changed = case.lake(things).to_pyarrow_table().slice(7, 1).to_pylist()[0]
    location = f"_partition = {changed['_partition']} AND _offset = {changed['_offset']}"
    case.lake(things).update(predicate=location, new_values={"n": 1_000_000})
    case.redis.hset(f'penstock:{counts}:row:["a3"]', "row", b"{}")
    case.redis.hset(f"penstock:{counts}:row:strange", "row", b"{}")
    producer = Producer({"bootstrap.servers": case.kafka.servers})
    producer.produce(counts, b"{}", key=b'["a1"]', headers=[("version", b"999999")])
    producer.flush(30)
    found = case.deep()
    told = {(one.kind, one.stage): one for one in found.discrepancies}
    assert {(kind, stage): one.count for (kind, stage), one in told.items()} == {
        ("changed", f"store:delta/{things}"): 1,
        ("changed", f"store:redis/{counts}"): 1,
        ("forged", f"store:redis/{counts}"): 1,
        ("forged", f"channel:{counts}"): 1,
    }
    assert f"offset {changed['_offset']}: n is 1000000" in told["changed", f"store:delta/{things}"].examples[0]
    assert told["forged", f"store:redis/{counts}"].examples == ("key strange",)
    assert "999999" in told["forged", f"channel:{counts}"].examples[0]
    assert merged((), found) == tuple(found.discrepancies)


def test_without_a_run_it_says_what_it_could_not_check(tmp_path: Path) -> None:
    found = deepened(Balance(0, 0, ()), tmp_path, None, None)
    assert found.verdict is Verdict.NOT_KNOWN
    assert [(one.kind, one.subject) for one in found.doubts] == [("store", "--deep")]

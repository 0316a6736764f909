"""The audit as a process of its own, on a real broker: what it counts, mirrors and raises."""

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions
from confluent_kafka.admin import AdminClient
from tests.damaging import Damage, deleted, emptied, overwritten

from penstock.audit.account import Account, Outcome, Share
from penstock.audit.balance import Balance, balance
from penstock.audit.hops import Gap
from penstock.audit.ledger import Ledger
from penstock.channels.kafka import Kafka
from penstock.core.clock import SystemClock
from penstock.core.errors import Misconfigured
from penstock.core.record import Origin, Record
from penstock.pipeline.config import topics
from penstock.pipeline.pipeline import Pipeline
from penstock.run.status import Status

Fresh = Callable[[str], str]
Eventually = Callable[..., None]


def send(kafka: Kafka, channel: str, *records: Record) -> None:
    async def go() -> None:
        async with kafka.sender() as sender:
            await sender.send(channel, records)

    asyncio.run(go())


def numbered(*seqs: int) -> list[Record]:
    now = SystemClock().now()
    return [Record(b"{}", Origin("kiosk", 1, seq, now), b"%d" % (seq % 5)) for seq in seqs]


@contextmanager
def auditing(folder: Path, name: str, kafka: Kafka, **settings: str) -> Iterator[None]:
    """`penstock tier audit` for a pipeline with one channel of this name."""
    file, told = folder / "pipeline.py", folder / "ready"
    lines = ("from penstock import Pipeline", f'app = Pipeline("{name}")', f'app.source("ws://x", into="{name}")')
    file.write_text("\n".join([*lines, f'app.store("{name}", "redis://")']))
    command = [sys.executable, "-m", "penstock", "tier", "audit", str(file), "--folder", str(folder)]
    environ = {**os.environ, "PENSTOCK_CHANNELS_ADDRESS": kafka.where, **settings}
    process = subprocess.Popen([*command, "--ready", str(told)], env=environ)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def counted(folder: Path) -> Balance | None:
    path = folder / ".penstock" / "audit" / "ledger.db"
    try:
        with closing(Ledger(path, read_only=True)) as ledger:
            found = balance(ledger.content(), SystemClock().now(), grace=0)
    except Misconfigured:
        return None  # It is not made yet.
    return found if found.channels else None


def records(folder: Path) -> int:
    found = counted(folder)
    return found.channels[0].records if found else 0


@pytest.fixture
def name(kafka: Kafka, fresh: Fresh) -> str:
    name = fresh("audited")
    app = Pipeline(name)
    app.source("ws://x", into=name)
    kafka.ensure(topics(app.describe()))
    return name


@pytest.mark.parametrize("engine", ["python", "spark"])
def test_a_gap_is_found_by_either_engine(
    engine: str, kafka: Kafka, name: str, tmp_path: Path, eventually: Eventually
) -> None:
    send(kafka, name, *numbered(*range(1, 500), *range(502, 1_001), 7))
    with auditing(tmp_path, name, kafka, PENSTOCK_AUDIT_ENGINE=engine):
        eventually(lambda: records(tmp_path) == 999, 90)
        send(kafka, name, *numbered(*range(1_001, 1_101)))
        eventually(lambda: records(tmp_path) == 1_099, 90)
        # What is due is missing once the audit has seen the end of every partition.
        eventually(lambda: (found := counted(tmp_path)) is not None and found.missing, 90)
    found = counted(tmp_path)
    assert found is not None
    assert found.hops[0].gaps == (Gap("kiosk", 1, 500, 501),)
    assert found.channels[0].duplicates == 1


def test_what_stages_have_read_is_mirrored_to_consumer_groups(
    kafka: Kafka, name: str, tmp_path: Path, eventually: Eventually
) -> None:
    send(kafka, name, *numbered(*range(1, 51)))
    read = {partition: end - 3 for partition, (_, end) in kafka.bounds(name).items()}
    share = Share({0: 0, 1: 0}, read, 44, {Outcome.PASSED: 44})
    stage = f"store:redis/{name}"
    account = Account(stage, "life", 1, {name: share}, step=1)
    send(kafka, f"penstock.{name}.bookmarks", Record(account.dumps(), key=account.key))
    asked = ConsumerGroupTopicPartitions(f"penstock.{name}.{stage}")
    admin = AdminClient({"bootstrap.servers": kafka.servers})

    def mirrored() -> dict[int, int]:
        (answer,) = admin.list_consumer_group_offsets([asked]).values()
        return {at.partition: at.offset for at in answer.result(10).topic_partitions}

    with auditing(tmp_path, name, kafka):
        eventually(lambda: mirrored() == read)
    found = counted(tmp_path)
    assert found is not None
    (hop,) = (hop for hop in found.hops if hop.stage == stage)
    assert (hop.taken, hop.in_flight, hop.missing) == (44, 6, 0)


def test_a_missing_record_is_an_alarm_on_the_status_channel_and_at_the_webhook(
    kafka: Kafka, name: str, tmp_path: Path, eventually: Eventually
) -> None:
    posted: list[dict[str, Any]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """A test has nothing to tell."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    send(kafka, name, *numbered(1, 2, 4))
    hook = f"http://127.0.0.1:{server.server_port}/alarms"
    with auditing(tmp_path, name, kafka, PENSTOCK_AUDIT_WEBHOOK=hook, PENSTOCK_AUDIT_GRACE="0 s"):
        eventually(lambda: any(said["data"]["name"] == "missing" for said in posted))
    server.shutdown()
    server.server_close()
    (said,) = (said["data"] for said in posted if said["data"]["name"] == "missing")
    assert said["stage"] == f"source:{name}"
    assert "kiosk/1: 3" in said["text"]
    told = Status.read(kafka, f"penstock.{name}.status").balance
    assert told is not None
    assert [alarm["name"] for alarm in told["alarms"]] == ["missing"]
    assert told["whole"] is False


def doubted(kafka: Kafka, name: str) -> list[str]:
    told = Status.read(kafka, f"penstock.{name}.status").balance
    return [doubt["subject"] for doubt in told["doubts"]] if told else []


@pytest.mark.parametrize("damage", [overwritten, emptied, deleted])
def test_a_ledger_that_is_damaged_while_it_runs_is_made_anew(
    tmp_path: Path, name: str, kafka: Kafka, eventually: Eventually, damage: Damage
) -> None:
    send(kafka, name, *numbered(*range(1, 501)))
    ledger = tmp_path / ".penstock" / "audit" / "ledger.db"
    with auditing(tmp_path, name, kafka):
        eventually(lambda: records(tmp_path) == 500)
        for file in (ledger.with_name("ledger.db-wal"), ledger):
            if file.exists() and file.stat().st_size:
                damage(file, random.Random(1))
        send(kafka, name, *numbered(*range(501, 601)))
        eventually(lambda: records(tmp_path) == 600, 30)
        found = counted(tmp_path)
        eventually(lambda: str(ledger) in doubted(kafka, name))
    assert found is not None
    assert found.channels[0].missing == 0
    if damage is not deleted:
        assert (tmp_path / ".penstock" / "audit" / "ledger.db.old-1").exists()

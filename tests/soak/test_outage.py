"""Kafka is away under load: the spool takes everything, memory stays flat, and the balance closes afterwards."""

import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.channels.servers import KafkaServer
from tests.soak import auditing, collecting
from tests.soak.sizes import AWAY, PATIENCE, RATE, figure

from penstock.audit.auditor import Auditor
from penstock.audit.balance import Balance, balance
from penstock.audit.ledger import Ledger
from penstock.channels.kafka import Kafka
from penstock.core.clock import SystemClock
from penstock.core.contracts import Topic
from penstock.simulate.feed import Feed, serve
from penstock.simulate.rsvps import Rsvps

CHANNEL = "outage"
SENDERS = 5


class Collector:
    """The process, and what it said last."""

    def __init__(self, process: Process) -> None:
        self.process, self.said = process, dict[str, Any]()
        self.memory = self.peak = 0
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        own = psutil.Process(self.process.pid)
        async for line in self.process.stdout:
            self.said = json.loads(line)
            try:
                self.memory = own.memory_info().rss
            except psutil.NoSuchProcess:
                return
            self.peak = max(self.peak, self.memory)

    async def until(self, figure: str, least: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while self.said.get(figure, -1) < least:  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.05)

    async def until_drained(self) -> None:
        async with asyncio.timeout(PATIENCE):
            while self.said.get("away", True):  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.05)


@pytest.fixture
def broker(kafka_server: KafkaServer) -> Iterator[KafkaServer]:
    yield kafka_server
    # Whatever came of it: others need it.
    kafka_server.restart()


async def test_a_broker_that_is_away_under_load_costs_no_record_and_no_memory(
    broker: KafkaServer, tmp_path: Path
) -> None:
    kafka = Kafka(broker.servers)
    kafka.ensure([Topic(CHANNEL, 3), *(Topic(f"{CHANNEL}.{kind}") for kind in ("dead", "beats", "marks"))])
    count = int(RATE * (AWAY + 15))
    feed = Feed(Rsvps(7), RATE, SENDERS, int(time.time()), count=count)
    async with serve(feed, "127.0.0.1", 0) as serving:
        command = (collecting.__file__, str(tmp_path / "spool"), broker.servers, CHANNEL, serving.url)
        collector = Collector(await asyncio.create_subprocess_exec(sys.executable, *command, stdout=PIPE))
        try:
            await collector.until("count", int(5 * RATE))
            before, collector.peak = collector.memory, 0
            broker.kill()
            await collector.until("spooled", int(AWAY * RATE * 0.9))
            waiting, peak = int(collector.said["spooled"]), collector.peak
            await asyncio.to_thread(broker.start)
            began, at = time.monotonic(), int(collector.said["count"])
            await collector.until_drained()
            took = time.monotonic() - began
            passed = int(collector.said["count"]) - at + waiting
            async with asyncio.timeout(PATIENCE):
                assert await collector.process.wait() == 0
        finally:
            if collector.process.returncode is None:
                collector.process.kill()
                await collector.process.wait()
    found = await asyncio.to_thread(audited, kafka, tmp_path)
    assert found.whole
    [channel] = found.channels
    assert (channel.distinct, channel.missing, channel.in_flight, channel.duplicates) == (count, 0, 0, 0)
    figure(
        f"Kafka away for {AWAY} s, {RATE:,} records/s", f"{waiting:,} records waited on disk, none lost, none doubled"
    )
    figure(
        "  the collector meanwhile",
        f"memory {before / 2**20:.0f} MB before, {peak / 2**20:.0f} MB at most",
    )
    figure("  drained", f"at {passed / took:,.0f} records/s, {passed / took / RATE:.1f} times the input rate")


def audited(kafka: Kafka, folder: Path) -> Balance:
    with closing(Ledger(folder / "ledger.db")) as ledger:
        auditor = Auditor(kafka, ledger, auditing.watching(CHANNEL), f"{CHANNEL}.beats")
        while auditor.step(1.0) or auditor.behind():
            pass
        auditor.close()
        return balance(ledger.content(), SystemClock().now() + 10**9)

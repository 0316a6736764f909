"""A real broker that goes away under load, and comes back."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.channels.servers import KafkaServer
from tests.collect.waiting import until

from penstock.channels.kafka import Kafka
from penstock.channels.sqlite import SqliteChannels
from penstock.collect.ingest import IngestLoop
from penstock.collect.spool import Spool
from penstock.collect.websocket import WebSocketSource
from penstock.core.contracts import Entry, Topic
from penstock.core.record import Origin
from penstock.core.scan import scan
from penstock.simulate.feed import Feed, serve
from penstock.simulate.rsvps import Rsvps

COUNT, SENDERS = 12_000, 4
# Its beginning is long ago: all of it is due at once.
FEED = Feed(Rsvps(7), 2_000, SENDERS, 1_700_000_000, count=COUNT)


def origin(entry: Entry) -> Origin:
    found = Origin.of(entry.headers)
    assert found is not None
    return found


class Run:
    """A collector between a feed and a channel of the broker."""

    def __init__(self, kafka: Kafka, name: str, url: str, folder: Path) -> None:
        self.kafka, self.name = kafka, name
        kafka.ensure([Topic(name, 3), *(Topic(f"{name}.{kind}") for kind in ("dead", "beats", "marks"))])
        self.pump = IngestLoop(
            WebSocketSource(url, "rsvps", resume=True),
            name,
            kafka,
            heartbeats=f"{name}.beats",
            bookmarks=f"{name}.marks",
            key="group.group_id",
            spool=Spool(SqliteChannels(folder), name, timeout=0.5),
        )
        self.running = asyncio.create_task(self.pump.run(asyncio.Event()))

    def told(self, figure: str) -> int:
        return int(str(self.pump.figures().get(figure, 0)))

    def whole(self) -> None:
        """Each record is there once, and those of a key are in their order."""
        entries = [(entry.key, origin(entry)) for entry in scan(self.kafka, self.name)]
        assert Counter(one for _, one in entries) == Counter(
            Origin(FEED.name(n % SENDERS), FEED.epoch, n // SENDERS + 1, FEED.time_of(n)) for n in range(COUNT)
        )
        last: dict[tuple[bytes | None, str], int] = {}
        for key, one in entries:
            assert one.seq > last.get((key, one.sender), 0)
            last[key, one.sender] = one.seq


@pytest.fixture
def broker(kafka_server: KafkaServer) -> Iterator[KafkaServer]:
    yield kafka_server
    # Whatever came of it: others need it.
    kafka_server.restart()


async def test_a_broker_that_is_killed_and_comes_back_costs_no_record(broker: KafkaServer, tmp_path: Path) -> None:
    async with serve(FEED, "127.0.0.1", 0) as serving:
        run = Run(Kafka(broker.servers), "outlasted", serving.url, tmp_path)
        await until(lambda: run.told("count") > 2_000, patience=120)
        broker.kill()
        await until(lambda: run.told("spooled") > 4_000, patience=120)
        await asyncio.to_thread(broker.start)
        async with asyncio.timeout(120):
            await run.running
    assert run.told("spooled") == 0
    run.whole()


async def test_a_broker_that_pauses_costs_no_record_and_doubles_none(broker: KafkaServer, tmp_path: Path) -> None:
    async with serve(FEED, "127.0.0.1", 0) as serving:
        run = Run(Kafka(broker.servers), "paused", serving.url, tmp_path)
        await until(lambda: run.told("count") > 2_000, patience=120)
        with broker.paused():
            await until(lambda: run.told("spooled") > 4_000, patience=120)
        async with asyncio.timeout(120):
            await run.running
    assert run.told("spooled") == 0
    run.whole()


async def test_a_collector_that_is_cancelled_meanwhile_goes_on_with_what_waits(
    broker: KafkaServer, tmp_path: Path
) -> None:
    async with serve(FEED, "127.0.0.1", 0) as serving:
        run = Run(Kafka(broker.servers), "cancelled-meanwhile", serving.url, tmp_path)
        await until(lambda: run.told("count") > 2_000, patience=120)
        broker.kill()
        await until(lambda: run.told("spooled") > 2_000, patience=120)
        run.running.cancel()
        await asyncio.gather(run.running, return_exceptions=True)
        await asyncio.to_thread(broker.start)
        again = Run(Kafka(broker.servers), "cancelled-meanwhile", serving.url, tmp_path)
        async with asyncio.timeout(120):
            await again.running
    again.whole()
    assert again.told("spooled") == 0

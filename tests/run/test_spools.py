"""Records that wait on disk for a source or a worker that is no more; the broker that they are for is real."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from tests.ports import later_port
from tests.running import Run

from penstock.channels.kafka import Kafka
from penstock.channels.memory import MemoryChannels
from penstock.channels.sqlite import SqliteChannels
from penstock.collect.spool import Spool
from penstock.core.contracts import Entry
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.record import Origin, Record
from penstock.core.scan import scan
from penstock.pipeline.config import Config
from penstock.pipeline.description import Description
from penstock.pipeline.pipeline import Pipeline
from penstock.run.spools import forward, orphaned
from penstock.run.tier import Tier, run

Eventually = Callable[..., None]
Fresh = Callable[[str], str]


class Away:
    """A channel that is."""

    async def send(self, channel: str, records: Sequence[Record]) -> None:
        raise Unavailable(channel, "it is away")


def number(n: int) -> Origin:
    return Origin("meter-7", 1, n, n)


def leave(folder: Path, spool: str, channel: str, count: int = 3) -> Spool:
    """Let records be acknowledged into a spool, as a collector does whose channel is away."""
    (folder / ".penstock").mkdir(exist_ok=True)
    one = Spool(SqliteChannels(folder / ".penstock" / "spool"), spool)

    async def acknowledge() -> None:
        async with one.open(Away()) as sender:
            await sender.send(channel, [Record(b"%d" % n, number(n), b"key") for n in range(1, count + 1)])

    asyncio.run(acknowledge())
    return one


def described(name: str, port: int) -> Description:
    app = Pipeline(name)
    app.source(f"listen+tcp://127.0.0.1:{port}", into=name)
    return app.describe()


def wired(folder: Path, kafka: Kafka, **more: str) -> Config:
    told: Mapping[str, str] = {f"PENSTOCK_COLLECT_{name.upper()}": value for name, value in more.items()}
    return Config.read(folder, environ={"PENSTOCK_CHANNELS_ADDRESS": kafka.where, **told})


def collected(description: Description, config: Config, until: Callable[[], None]) -> None:
    """Run the tier until something is so."""
    stop, failures = threading.Event(), list[BaseException]()

    def work() -> None:
        try:
            run(Tier.COLLECT, description, config, stop, lambda: None)
        except BaseException as error:  # noqa: BLE001 (raised again below)
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        until()
    finally:
        stop.set()
        thread.join()
    if failures:
        raise failures[0]


def stopped() -> threading.Event:
    """For one that should not even begin."""
    stop = threading.Event()
    stop.set()
    return stop


def entries(kafka: Kafka, channel: str) -> list[Entry]:
    return list(scan(kafka, channel)) if channel in kafka.names() else []


async def test_what_the_channel_holds_already_is_not_brought_again(tmp_path: Path) -> None:
    """The life that left it had still sent some, and heard nothing of it."""
    channels, abandoned = MemoryChannels(2), await asyncio.to_thread(leave, tmp_path, "former", "orders")
    channels.append("orders", b"2", b"key", number(2).headers())
    await forward(abandoned, channels, asyncio.Event())
    assert [one.value for one in channels.entries("orders")] == [b"2", b"1", b"3"]
    assert list(abandoned.records()) == []


@pytest.mark.parametrize("spool", ["{}.3", "former"], ids=["of a worker", "of a source"])
def test_what_waits_for_one_that_is_no_more_is_brought_to_its_channel(
    kafka: Kafka, tmp_path: Path, fresh: Fresh, eventually: Eventually, free_port: int, spool: str
) -> None:
    name = fresh("left")
    abandoned = leave(tmp_path, spool.format(name), name)
    config = wired(tmp_path, kafka, workers="2")
    collected(described(name, free_port), config, lambda: eventually(lambda: not list(abandoned.records())))
    found = entries(kafka, name)
    assert [(Origin.read(one.headers), one.key, one.value) for one in found] == [
        (number(n), b"key", b"%d" % n) for n in (1, 2, 3)
    ]


def test_also_where_no_source_is_left(kafka: Kafka, tmp_path: Path, fresh: Fresh, eventually: Eventually) -> None:
    app = Pipeline(name := fresh("sourceless"))
    app.channel(name)
    abandoned = leave(tmp_path, name, name)
    arrived = partial(eventually, lambda: not list(abandoned.records()))
    collected(app.describe(), wired(tmp_path, kafka), arrived)
    assert len(entries(kafka, name)) == 3


def test_a_run_starts_a_collector_for_what_waits(
    kafka: Kafka, tmp_path: Path, fresh: Fresh, eventually: Eventually
) -> None:
    """Whether it has a source or not."""
    name = fresh("run-sourceless")
    (tmp_path / "pipeline.py").write_text(
        f"from penstock import Pipeline\n\napp = Pipeline({name!r})\napp.channel({name!r})\n"
    )
    (tmp_path / "penstock.toml").write_text(f'[channels]\naddress = "{kafka.where}"\n')
    abandoned = leave(tmp_path, name, name)
    with closing(Run(tmp_path)) as running:
        running.start()
        eventually(lambda: not list(abandoned.records()))
    assert len(entries(kafka, name)) == 3


def test_what_waits_for_a_channel_of_no_source_here_is_said(kafka: Kafka, tmp_path: Path, fresh: Fresh) -> None:
    leave(tmp_path, "orders.3", "orders")
    with pytest.raises(
        Misconfigured,
        match=r"spool/orders\.3: 3 acknowledged records .* orders ",
    ):
        run(Tier.COLLECT, described(fresh("others"), 1), wired(tmp_path, kafka), stopped(), lambda: None)


@pytest.mark.parametrize("setting", [{"spool": "0"}, {"standby": "true"}], ids=["no spool", "a standby"])
def test_what_waits_where_spools_are_not_used_is_said(
    kafka: Kafka, tmp_path: Path, fresh: Fresh, setting: dict[str, str]
) -> None:
    name = fresh("unused")
    leave(tmp_path, f"{name}.1", name)
    with pytest.raises(Misconfigured, match=r"3 acknowledged records .* settings"):
        run(Tier.COLLECT, described(name, 1), wired(tmp_path, kafka, **setting), stopped(), lambda: None)


def test_a_spool_that_is_empty_or_of_a_worker_of_now_or_open_is_not_left(kafka: Kafka, tmp_path: Path) -> None:
    description, config = described("orders", 1), wired(tmp_path, kafka, workers="2")
    leave(tmp_path, "orders", "orders")
    leave(tmp_path, "orders.1", "orders")
    leave(tmp_path, "empty", "orders", count=0)
    other = leave(tmp_path, "other", "elsewhere")
    with other.disk.hold("other"):
        assert orphaned(description, config, kafka) == []
    with pytest.raises(Misconfigured, match="elsewhere is not a channel"):
        orphaned(description, config, kafka)


async def test_a_stop_is_heard_while_the_channel_is_away(tmp_path: Path) -> None:
    spool, stop = await asyncio.to_thread(leave, tmp_path, "orders.3", "orders"), asyncio.Event()
    bringing = asyncio.create_task(forward(spool, Kafka("127.0.0.1:1"), stop))
    stop.set()
    async with asyncio.timeout(60):
        await bringing
    assert len(list(spool.records())) == 3


@pytest.fixture
def free_port() -> int:
    return later_port()

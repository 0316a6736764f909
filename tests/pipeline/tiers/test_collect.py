"""The collection tier with a real feed and a real broker, and what the audit makes of it."""

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from penstock.audit.balance import ChannelBalance, balance
from penstock.audit.ledger import Ledger
from penstock.channels.files import Files
from penstock.channels.kafka import Kafka
from penstock.clock import SystemClock
from penstock.contracts import Topic
from penstock.errors import Misconfigured
from penstock.pipeline.description import Description, Pipeline
from penstock.pipeline.tiers import Tier, run
from penstock.pipeline.wiring import Wiring
from penstock.record import Record

Eventually = Callable[..., None]


def described(name: str, url: str) -> Description:
    app = Pipeline(name)
    app.source(url, into=name, key="group.group_id")
    return app.describe()


@contextmanager
def running(tiers: tuple[Tier, ...], description: Description, wiring: Wiring) -> Iterator[None]:
    """Tiers in threads of this process."""
    stop, failures = threading.Event(), list[BaseException]()

    def work(tier: Tier, ready: threading.Event) -> None:
        try:
            run(tier, description, wiring, stop, ready.set)
        except BaseException as error:  # noqa: BLE001 (raised again below)
            failures.append(error)
            ready.set()

    threads = []
    for tier in tiers:
        ready = threading.Event()
        threads.append(threading.Thread(target=work, args=(tier, ready)))
        threads[-1].start()
        ready.wait()
    try:
        if not failures:
            yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


@pytest.fixture
def wiring(kafka: Kafka, tmp_path: Path) -> Wiring:
    return Wiring.read(tmp_path, environ={"PENSTOCK_CHANNELS_ADDRESS": kafka.where})


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def feeding(port: int, *options: str) -> Iterator[None]:
    command = [sys.executable, "-m", "penstock", "feed", "rsvps", "--port", str(port), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield
    finally:
        process.terminate()
        process.communicate(timeout=20)


def counted(wiring: Wiring, channel: str) -> ChannelBalance:
    with closing(Ledger(wiring.ledger, read_only=True)) as ledger:
        found = balance(ledger.content(), SystemClock().now())
    (one,) = [one for one in found.channels if one.channel == channel]
    return one


def test_a_feed_that_resumes_is_whole_after_an_outage(
    wiring: Wiring, port: int, eventually: Eventually, fresh: Callable[[str], str]
) -> None:
    name = fresh("resumed")
    description = described(name, f"ws://127.0.0.1:{port}/rsvps")
    epoch = str(SystemClock().now() // 1_000_000)
    options = ("--rate", "500", "--senders", "3", "--count", "3000", "--epoch", epoch)
    with running((Tier.AUDIT, Tier.COLLECT), description, wiring):
        with feeding(port, *options):
            eventually(lambda: counted(wiring, name).records > 300)
        with feeding(port, *options):
            eventually(lambda: counted(wiring, name).records == 3_000)
        found = counted(wiring, name)
    facts = (found.senders, found.distinct, found.duplicates, found.missing, found.unknown_seconds)
    assert facts == (3, 3_000, 0, 0, 0)


def test_a_feed_that_cannot_resume_leaves_an_unknown_interval(
    wiring: Wiring, port: int, eventually: Eventually, fresh: Callable[[str], str]
) -> None:
    name = fresh("blind")
    description = described(name, f"ws://127.0.0.1:{port}/rsvps")
    options = ("--rate", "200", "--no-resume")
    with running((Tier.AUDIT, Tier.COLLECT), description, wiring):
        with feeding(port, *options):
            eventually(lambda: counted(wiring, name).records > 100)
        before = counted(wiring, name).records
        with feeding(port, *options):
            eventually(lambda: counted(wiring, name).records > before + 100)
            eventually(lambda: counted(wiring, name).unknown_seconds > 0)
        found = counted(wiring, name)
    # The collector has numbered them: nothing that was heard is missing, and the rest is not said to be whole.
    assert (found.senders, found.duplicates, found.missing) == (1, 0, 0)


def test_a_collector_that_was_away_from_such_a_feed_says_so(
    wiring: Wiring, port: int, eventually: Eventually, fresh: Callable[[str], str]
) -> None:
    name = fresh("away")
    description = described(name, f"ws://127.0.0.1:{port}/rsvps")
    with running((Tier.AUDIT,), description, wiring), feeding(port, "--rate", "200", "--no-resume"):
        with running((Tier.COLLECT,), description, wiring):
            eventually(lambda: counted(wiring, name).records > 50)
            assert counted(wiring, name).unknown_seconds == 0
        with running((Tier.COLLECT,), description, wiring):
            eventually(lambda: counted(wiring, name).unknown_seconds > 0)


def test_a_simulation_that_nobody_started_is_said(wiring: Wiring, fresh: Callable[[str], str]) -> None:
    description = described(fresh("simulated"), "simulate://rsvps")
    with (
        pytest.raises(Misconfigured, match=r'it is simulated.*use "penstock run"'),
        running((Tier.COLLECT,), description, wiring),
    ):
        pass


def test_an_address_that_is_no_feed_is_said(wiring: Wiring, fresh: Callable[[str], str]) -> None:
    description = described(fresh("nofeed"), "ftp://example")
    with (
        pytest.raises(Misconfigured, match="ftp://example is no address that is known here"),
        running((Tier.COLLECT,), description, wiring),
    ):
        pass


def test_records_that_wait_on_disk_are_not_left_behind_by_a_setting(kafka: Kafka, tmp_path: Path) -> None:
    async def leave_one() -> None:
        async with Files(tmp_path / ".penstock" / "spool").sender() as disk:
            await disk.send("waits", [Record(b"x", extra=[("penstock-for", b"waits")])])

    description = described("waits", "ws://127.0.0.1:1/feed")
    settings = f'[channels]\naddress = "kafka://{kafka.servers}"\n[collect]\nspool = 0\n'
    (tmp_path / "penstock.toml").write_text(settings)
    (tmp_path / ".penstock").mkdir()
    Files(tmp_path / ".penstock" / "spool").ensure([Topic("waits")])
    asyncio.run(leave_one())
    with pytest.raises(Misconfigured, match="records that were acknowledged wait on disk"):
        run(Tier.COLLECT, description, Wiring.read(tmp_path, environ={}), threading.Event(), lambda: None)

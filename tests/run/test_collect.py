"""The collection tier with a real feed and a real broker, and what the audit makes of it."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import httpx
import orjson
import pytest
from tests.ports import later_port

from penstock.audit.balance import ChannelBalance, balance
from penstock.audit.ledger import Ledger
from penstock.channels.kafka import LARGEST, Kafka
from penstock.channels.sqlite import SqliteChannels
from penstock.collect.dedup import DEAD_BYTES
from penstock.collect.receipts import dead_reason
from penstock.core.clock import SystemClock
from penstock.core.contracts import Topic
from penstock.core.errors import Misconfigured
from penstock.core.record import LONGEST_SENDER, Origin, Record
from penstock.core.scan import scan
from penstock.pipeline.config import Config, topics
from penstock.pipeline.description import Description
from penstock.pipeline.pipeline import Pipeline
from penstock.run.collect import limit
from penstock.run.tier import Tier, run

Eventually = Callable[..., None]


def described(name: str, url: str) -> Description:
    app = Pipeline(name)
    app.source(url, into=name, partition_by="group.group_id")
    return app.describe()


@contextmanager
def running(tiers: tuple[Tier, ...], description: Description, config: Config) -> Iterator[None]:
    """Tiers in threads of this process."""
    stop, failures = threading.Event(), list[BaseException]()

    def work(tier: Tier, ready: threading.Event) -> None:
        try:
            run(tier, description, config, stop, ready.set)
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
def config(kafka: Kafka, tmp_path: Path) -> Config:
    return Config.read(tmp_path, environ={"PENSTOCK_CHANNELS_ADDRESS": kafka.where})


@pytest.fixture
def port() -> int:
    return later_port()


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


def counted(config: Config, channel: str) -> ChannelBalance:
    with closing(Ledger(config.ledger, read_only=True)) as ledger:
        found = balance(ledger.content(), SystemClock().now())
    (one,) = [one for one in found.channels if one.channel == channel]
    return one


@pytest.mark.parametrize("kind", ["http", "tcp"])
def test_a_source_that_cannot_listen_is_said_before_the_tier_is_ready(
    config: Config, fresh: Callable[[str], str], kind: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        app = Pipeline("apart")
        app.source(f"file://{config.folder}", into=fresh("first"))
        app.source(f"listen+{kind}://127.0.0.1:{other.getsockname()[1]}", into=fresh("second"), name="door")
        config.bind().ensure(topics(app.describe()))
        ready = threading.Event()
        with pytest.raises(Misconfigured, match=r"source door, address .*Address already in use; choose another port"):
            run(Tier.COLLECT, app.describe(), config, threading.Event(), ready.set)
        assert not ready.is_set()


def test_a_sender_by_the_name_of_another_source_takes_nothing_from_it(
    config: Config, port: int, eventually: Eventually, fresh: Callable[[str], str]
) -> None:
    app, into = Pipeline(fresh("names")), fresh("into")
    app.source(f"file://{config.folder}/*.log", into=into, name="logs", every="20 ms")
    app.source(f"listen+tcp://127.0.0.1:{port}", into=into, name="door")
    description = app.describe()
    channels = config.bind()
    channels.ensure(topics(description))

    def found() -> list[bytes | None]:
        return [entry.value for entry in scan(channels, into)]

    def origins() -> list[Origin | None]:
        return [Origin.read(entry.headers) for entry in scan(channels, into)]

    for number, generation in enumerate((b"1", b"2")):
        with running((Tier.COLLECT,), description, config):
            with socket.create_connection(("127.0.0.1", port)) as client, client.makefile("rwb") as lines:
                lines.write(
                    b'{"sender":"logs","epoch":9223372036854775807,"seq":%d}\nintruder %b\n' % (number + 1, generation)
                )
                lines.flush()
                lines.readline()
                assert orjson.loads(lines.readline()) == {"safe": number + 1}
            (config.folder / f"{generation.decode()}.log").write_bytes(b"line %b\n" % generation)
            eventually(lambda generation=generation: b"line " + generation in found())
    assert sorted(one or b"" for one in found()) == [b"intruder 1", b"intruder 2", b"line 1", b"line 2"]
    assert len({(one.sender, one.epoch, one.seq) for one in origins() if one}) == 4
    assert {one.sender for one in origins() if one} == {"logs", "door"}


def test_a_feed_that_resumes_is_whole_after_an_outage(
    config: Config, port: int, eventually: Eventually, fresh: Callable[[str], str]
) -> None:
    name = fresh("resumed")
    description = described(name, f"ws://127.0.0.1:{port}/rsvps")
    epoch = str(SystemClock().now() // 1_000_000)
    options = ("--rate", "500", "--senders", "3", "--count", "3000", "--epoch", epoch)
    with running((Tier.AUDIT, Tier.COLLECT), description, config):
        with feeding(port, *options):
            eventually(lambda: counted(config, name).records > 300)
        with feeding(port, *options):
            eventually(lambda: counted(config, name).records == 3_000)
        found = counted(config, name)
    facts = (found.senders, found.distinct, found.duplicates, found.missing, found.unknown_seconds)
    assert facts == (3, 3_000, 0, 0, 0)


def test_a_feed_that_cannot_resume_leaves_an_unknown_interval(
    config: Config, port: int, eventually: Eventually, fresh: Callable[[str], str]
) -> None:
    name = fresh("blind")
    description = described(name, f"ws://127.0.0.1:{port}/rsvps")
    options = ("--rate", "200", "--no-resume")
    with running((Tier.AUDIT, Tier.COLLECT), description, config):
        with feeding(port, *options):
            eventually(lambda: counted(config, name).records > 100)
        before = counted(config, name).records
        with feeding(port, *options):
            eventually(lambda: counted(config, name).records > before + 100)
            eventually(lambda: counted(config, name).unknown_seconds > 0)
        found = counted(config, name)
    # The collector has numbered them: nothing that was heard is missing, and the rest is not said to be whole.
    assert (found.senders, found.duplicates, found.missing) == (1, 0, 0)


def test_a_collector_that_was_away_from_such_a_feed_says_so(
    config: Config, port: int, eventually: Eventually, fresh: Callable[[str], str]
) -> None:
    name = fresh("away")
    description = described(name, f"ws://127.0.0.1:{port}/rsvps")
    with running((Tier.AUDIT,), description, config), feeding(port, "--rate", "200", "--no-resume"):
        with running((Tier.COLLECT,), description, config):
            eventually(lambda: counted(config, name).records > 50)
            assert counted(config, name).unknown_seconds == 0
        with running((Tier.COLLECT,), description, config):
            eventually(lambda: counted(config, name).unknown_seconds > 0)


def test_a_simulation_that_nobody_started_is_said(config: Config, fresh: Callable[[str], str]) -> None:
    description = described(fresh("simulated"), "simulate://rsvps")
    with (
        pytest.raises(Misconfigured, match=r'it is simulated.*use "penstock run"'),
        running((Tier.COLLECT,), description, config),
    ):
        pass


def test_an_address_that_is_no_feed_is_said(kafka: Kafka, tmp_path: Path, fresh: Callable[[str], str]) -> None:
    name = fresh("nofeed")
    environ = {"PENSTOCK_CHANNELS_ADDRESS": kafka.where, f"PENSTOCK_SOURCES_{name.upper()}": "ftp://example"}
    with (
        pytest.raises(Misconfigured, match="ftp://example"),
        running((Tier.COLLECT,), described(name, "ws://example"), Config.read(tmp_path, environ=environ)),
    ):
        pass


@pytest.mark.parametrize("setting", ["spool = 0", "standby = true"])
def test_records_that_wait_on_disk_are_not_left_behind_by_a_setting(kafka: Kafka, tmp_path: Path, setting: str) -> None:
    """With a standby they would wait until this machine has its turn, and another one could take them once more."""

    async def leave_one() -> None:
        async with SqliteChannels(tmp_path / ".penstock" / "spool").sender() as disk:
            await disk.send("waits", [Record(b"x", extra=[("penstock-for", b"waits")])])

    description = described("waits", "ws://127.0.0.1:1/feed")
    settings = f'[channels]\naddress = "kafka://{kafka.servers}"\n[collect]\n{setting}\n'
    (tmp_path / "penstock.toml").write_text(settings)
    (tmp_path / ".penstock").mkdir()
    SqliteChannels(tmp_path / ".penstock" / "spool").ensure([Topic("waits")])
    asyncio.run(leave_one())
    with pytest.raises(Misconfigured, match="acknowledged records wait on disk"):
        run(Tier.COLLECT, description, Config.read(tmp_path, environ={}), threading.Event(), lambda: None)


def test_a_record_by_http_has_a_receipt_that_tells_its_place(
    config: Config, port: int, eventually: Eventually, fresh: Callable[[str], str]
) -> None:
    app = Pipeline(name := fresh("received"))
    app.source(f"listen+http://127.0.0.1:{port}/in", into=name)
    address = f"http://127.0.0.1:{port}"
    with running((Tier.COLLECT, Tier.AUDIT), app.describe(), config), httpx.Client(base_url=address) as client:
        eventually(lambda: answers(port))
        posted = client.post("/in", content=b"one\ntwo\nthree", headers={"content-type": "application/x-ndjson"})
        assert posted.status_code == 202
        told = client.get(posted.headers["location"]).json()
        assert (told["state"], told["channel"], told["found"]) == ("safe", name, 3)
        eventually(lambda: counted(config, name).distinct == 3)


@pytest.mark.parametrize("takes", [50_000, 5_000_000])
def test_how_large_a_record_may_be_is_for_its_topic_to_say(
    kafka: Kafka, config: Config, port: int, eventually: Eventually, fresh: Callable[[str], str], takes: int
) -> None:
    """What it takes lies there; what it does not is a dead letter, and what comes after it is collected."""
    app = Pipeline(name := fresh("sized"))
    app.channel(name, config={"max.message.bytes": str(takes)})
    app.source(f"listen+http://127.0.0.1:{port}/in", into=name, max_size=10_000_000)
    fits, too_large = os.urandom(takes * 4 // 5), os.urandom(takes + 1)
    with running((Tier.COLLECT,), app.describe(), config), httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        eventually(lambda: answers(port))
        for value in (fits, too_large, b"after"):
            assert client.post("/in", content=value, timeout=30).status_code == 202
    assert {entry.value for entry in scan(kafka, name)} == {fits, b"after"}
    (letter,) = scan(kafka, f"{name}.dead")
    assert letter.value == too_large[:DEAD_BYTES]
    assert f"more than the {limit(kafka, name)} that the channel takes" in (dead_reason(letter) or "")


@pytest.mark.parametrize("takes", [2_000, 20_000, 1_048_588, 5_000_000])
async def test_a_record_as_large_as_may_be_is_taken_with_the_longest_headers(
    kafka: Kafka, fresh: Callable[[str], str], takes: int
) -> None:
    kafka.ensure([Topic(name := fresh("longest"), config={"max.message.bytes": str(takes)})])
    last = 2**63 - 1
    largest = Record(os.urandom(limit(kafka, name) - 8), Origin("𝄞" * LONGEST_SENDER, last, last, last), b"the key ")
    async with kafka.sender() as sender:
        await sender.send(name, [largest])
    assert [entry.value for entry in scan(kafka, name)] == [largest.value]


def test_a_topic_that_takes_more_than_its_client_sends_is_believed_no_further(
    kafka: Kafka, fresh: Callable[[str], str]
) -> None:
    kafka.ensure([Topic(name := fresh("huge"), config={"max.message.bytes": "200000000"})])
    assert limit(kafka, name) < LARGEST


def test_two_workers_share_a_port_and_both_are_accounted_for(
    kafka: Kafka, tmp_path: Path, port: int, eventually: Eventually, fresh: Callable[[str], str]
) -> None:
    app = Pipeline(name := fresh("shared"))
    app.source(f"listen+http://127.0.0.1:{port}/in", into=name)
    environ = {"PENSTOCK_CHANNELS_ADDRESS": kafka.where, "PENSTOCK_COLLECT_WORKERS": "2"}
    first = Config.read(tmp_path, environ=environ)
    second = Config.read(tmp_path, environ={**environ, "PENSTOCK_COLLECT_WORKER": "1"})
    description = app.describe()
    with (
        running((Tier.COLLECT, Tier.AUDIT), description, first),
        running((Tier.COLLECT,), description, second),
    ):
        eventually(lambda: answers(port))
        for n in range(100):
            # Each connection goes to one of them.
            posted = httpx.post(f"http://127.0.0.1:{port}/in", content=b"%d" % n)
            assert posted.status_code == 202
            assert httpx.get(f"http://127.0.0.1:{port}{posted.headers['location']}").json()["state"] == "safe"
        eventually(lambda: counted(first, name).distinct == 100)
    senders = {one.sender for one in counted(first, name).by_sender}
    assert senders == {f"{name}.http", f"{name}.1.http"}
    assert counted(first, name).missing == 0


def test_a_standby_takes_over_and_goes_on_where_the_other_was(
    kafka: Kafka, tmp_path: Path, port: int, eventually: Eventually, fresh: Callable[[str], str]
) -> None:
    name = fresh("seated")
    description = described(name, f"ws://127.0.0.1:{port}/rsvps")
    environ = {"PENSTOCK_CHANNELS_ADDRESS": kafka.where, "PENSTOCK_COLLECT_STANDBY": "true"}
    one, other = (Config.read(tmp_path / part, environ=environ) for part in ("one", "other"))
    for config in (one, other):
        config.folder.mkdir()

    def count() -> int:
        return sum(end for _, end in kafka.bounds(name).values())

    with feeding(port, "--rate", "500", "--senders", "3", "--count", "4000"), ExitStack() as holder:
        holder.enter_context(running((Tier.COLLECT,), description, other))
        eventually(lambda: count() > 200)
        with running((Tier.COLLECT, Tier.AUDIT), description, one):
            before = count()
            eventually(lambda: count() > before + 200)
            # The one that waits has connected to nobody.
            assert counted_twice(kafka, name) == 0
            holder.close()
            eventually(lambda: counted(one, name).distinct == 4_000, 120)
    assert (counted(one, name).missing, counted(one, name).duplicates) == (0, 0)


def counted_twice(kafka: Kafka, name: str) -> int:
    origins = [Origin.read(entry.headers) for entry in scan(kafka, name)]
    return len(origins) - len(set(origins))


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0

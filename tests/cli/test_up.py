"""`penstock up` and `penstock down` as a person meets them: processes that outlive a command."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import redis
from tests.channels.traffic import send
from typer.testing import CliRunner

from penstock.channels.kafka import Kafka
from penstock.cli import app
from penstock.core.contracts import Entry, Topic
from penstock.core.errors import Misconfigured
from penstock.core.record import Origin, Record
from penstock.run.services import Services
from penstock.supervise.folder import StateFolder

Eventually = Callable[..., None]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
REDIS_ALONE = '[channels]\naddress = "file://"\n'
"""Kafka takes seconds to start, Redis a moment: where it does not matter what is up, it is Redis."""


class Workplace:
    """A folder in which a person gives commands."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, folder / ".penstock"

    def penstock(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "penstock", *arguments]
        return subprocess.run(command, cwd=self.folder, env=CLEAN, capture_output=True, text=True, timeout=120)

    def started(self, *arguments: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "penstock", *arguments]
        return subprocess.Popen(
            command, cwd=self.folder, env=CLEAN, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def up(self, *arguments: str) -> Services:
        told = self.penstock("up", *arguments)
        assert told.returncode == 0, told.stderr
        found = Services.at(self.state)
        assert found is not None
        assert f"up: {found.where}\n" in told.stdout
        return found

    def children(self) -> dict[str, int]:
        """The processes that the supervisor of the services keeps now."""
        try:
            noted = json.loads((self.state / "services-children.json").read_text())
        except FileNotFoundError:
            return {}
        return {name: pid for name, (pid, _) in noted.items()}

    @property
    def log(self) -> str:
        return (self.state / "logs" / "services.log").read_text()


@pytest.fixture
def location(tmp_path: Path) -> Iterator[Workplace]:
    found = Workplace(tmp_path)
    yield found
    if StateFolder(found.state).owner() or Services.at(found.state):
        found.penstock("down", "--force")


@pytest.fixture
def quick(location: Workplace) -> Workplace:
    (location.folder / "penstock.toml").write_text(REDIS_ALONE)
    return location


def gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def answers(url: str | None) -> bool:
    with redis.Redis.from_url(url or "") as client:
        return bool(client.ping())


def held(kafka: Kafka, channel: str) -> list[Entry]:
    ends = {partition: end for partition, (_, end) in kafka.bounds(channel).items()}
    found: list[Entry] = []
    with kafka.reader({channel: {}}) as reader:
        while any(reader.positions(channel)[partition] < end for partition, end in ends.items()):
            found += reader.read(10_000, 1)
    return found


# --- with Redis alone -------------------------------------------------------------------------------------------------


def test_what_is_up_outlives_the_command_until_down(quick: Workplace) -> None:
    found = quick.up()
    assert found.kafka is None
    with redis.Redis.from_url(found.redis or "") as client:
        client.set("kept", "yes")
    # A session of its own: the end of the terminal does not concern it.
    assert os.getsid(found.pid) == found.pid
    pids = quick.children()
    stopped = quick.penstock("down")
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert stopped.stdout == f"stopped: Redis at {found.redis}; the data is kept in {quick.state}\n"
    assert all(gone(pid) for pid in (found.pid, *pids.values()))
    # The next one goes on with the data, at the same address.
    assert quick.up().redis == found.redis
    with redis.Redis.from_url(found.redis or "") as client:
        assert client.get("kept") == b"yes"


def test_up_again_and_status_say_what_is_up(quick: Workplace) -> None:
    found = quick.up()
    again = quick.penstock("up")
    assert (again.returncode, again.stdout, again.stderr) == (0, f"up already: Redis at {found.redis}\n", "")
    assert Services.at(quick.state) == found
    more = quick.penstock("up", "--brokers", "3")
    assert (more.returncode, more.stderr.partition(": ")[2][:9]) == (2, "--brokers")
    told = quick.penstock("status")
    assert told.returncode == 0
    assert told.stdout.startswith(f"no pipeline runs here; the services are up: Redis at {found.redis}; ")
    assert json.loads(quick.penstock("status", "--json").stdout)["services"]["redis"] == found.redis


def test_where_nothing_is_up_down_says_so_and_leaves_no_trace(location: Workplace) -> None:
    told = location.penstock("down")
    assert (told.returncode, told.stdout, told.stderr) == (0, "nothing is running here\n", "")
    assert not location.state.exists()


def test_a_service_that_dies_is_started_again(quick: Workplace, eventually: Eventually) -> None:
    found = quick.up()
    before = quick.children()["redis"]
    os.kill(before, signal.SIGKILL)
    eventually(lambda: quick.children().get("redis") not in (None, before) and quick.log.count("redis is ready") == 2)
    assert answers(found.redis)
    assert "redis died: it was ended by SIGKILL" in quick.log


def test_what_a_killed_supervisor_leaves_is_ended_and_up_works_again(quick: Workplace, eventually: Eventually) -> None:
    found = quick.up()
    pid = quick.children()["redis"]
    os.kill(found.pid, signal.SIGKILL)
    eventually(lambda: Services.at(quick.state) is None)
    # Where a system does not end children with their parent, they are in the note of whoever comes next.
    assert quick.penstock("down").stdout == "nothing is running here\n"
    assert gone(pid)
    assert quick.up().redis == found.redis


def test_a_pid_that_belongs_to_somebody_else_by_now_is_left_alone(quick: Workplace) -> None:
    quick.up()
    quick.penstock("down")
    with subprocess.Popen(["sleep", "60"]) as bystander:
        (quick.state / "services.lock").write_text(f"{bystander.pid} 1.0\n")
        note = {"redis": [bystander.pid, 1.0]}
        (quick.state / "services-children.json").write_text(json.dumps(note))
        assert quick.penstock("down").stdout == "nothing is running here\n"
        assert not gone(bystander.pid)
        bystander.kill()


def test_a_service_that_does_not_come_up_is_told_with_the_end_of_its_log(quick: Workplace) -> None:
    spoilt = quick.state / "redis" / "appendonlydir"
    spoilt.parent.mkdir(parents=True)
    spoilt.write_text("not a folder")
    (quick.state / "redis" / "appendonly.aof").write_text("not an append-only file\r\n")
    told = quick.penstock("up")
    assert told.returncode == 2
    assert "penstock: redis is unavailable: it ended with code 1 (" in told.stderr
    assert "the last lines of its log:" in told.stderr
    assert "Traceback" not in told.stderr + quick.log
    assert Services.at(quick.state) is None
    assert not quick.children()


def test_what_the_supervisor_is_refused_is_the_answer_of_up(quick: Workplace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (quick.folder / "penstock.toml").write_text(f"{REDIS_ALONE}[local]\nredis_port = {port}\n")
        told = quick.penstock("up")
    assert told.returncode == 2
    assert told.stderr.startswith(f"penstock: [local] redis_port: port {port} is in use; ")


def misconfigured(location: Workplace, *options: str) -> Misconfigured:
    error = CliRunner().invoke(app, ["up", "--folder", str(location.folder), *options]).exception
    assert isinstance(error, Misconfigured)
    return error


def test_in_the_foreground_it_stays_until_ctrl_c(quick: Workplace, eventually: Eventually) -> None:
    process = quick.started("up", "--foreground")
    eventually(lambda: (found := Services.at(quick.state)) is not None and found.up)
    found = Services.at(quick.state)
    assert found is not None
    assert (found.pid, answers(found.redis)) == (process.pid, True)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert said.endswith("stopped; the next start continues from here\n")
    assert Services.at(quick.state) is None


def test_what_the_settings_place_elsewhere_is_not_started(location: Workplace) -> None:
    (location.folder / "penstock.toml").write_text(
        '[channels]\naddress = "kafka://broker:9092"\n[redis]\nurl = "redis://me:secret@far:6379/0"\n'
    )
    told = CliRunner().invoke(app, ["up", "--folder", str(location.folder)])
    assert "kafka://broker:9092 and Redis at redis://far:6379/0" in told.stdout
    assert not location.state.exists()


def test_brokers_that_are_asked_for_where_kafka_lies_elsewhere_are_not_passed_over(quick: Workplace) -> None:
    error = misconfigured(quick, "--brokers", "3")
    assert (error.location, "file://" in error.problem) == ("--brokers", True)
    assert Services.at(quick.state) is None


def test_a_folder_that_is_not_there_is_not_made(location: Workplace) -> None:
    assert misconfigured(location, "--folder", str(location.folder / "typo")).location == "--folder"
    assert not (location.folder / "typo").exists()


@pytest.mark.parametrize("brokers", ["0", "2", "4"])
def test_a_number_of_brokers_without_a_majority_is_refused(location: Workplace, brokers: str) -> None:
    assert misconfigured(location, "--brokers", brokers).location == "--brokers"


# --- with Kafka -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("jars")
def test_ctrl_c_while_it_starts_leaves_nothing_behind(location: Workplace, eventually: Eventually) -> None:
    process = location.started("up")
    eventually(lambda: {"kafka-1", "redis"} <= set(location.children()))
    pids = location.children().values()
    supervisor = Services.at(location.state)
    assert supervisor is not None
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said.endswith("stopped; nothing is running\n")
    assert all(gone(pid) for pid in (*pids, supervisor.pid))
    assert Services.at(location.state) is None


@pytest.mark.usefixtures("jars")
def test_a_run_uses_what_is_up_and_both_keep_the_same_data(location: Workplace, eventually: Eventually) -> None:
    (location.folder / "small.py").write_text(
        'from penstock import Pipeline\n\napp = Pipeline("small")\napp.channel("letters")\n'
    )

    def ran() -> "subprocess.Popen[str]":
        process = location.started("run", "small.py")
        assert process.stdout is not None
        for line in process.stdout:
            if " small runs; " in line:
                return process
        raise AssertionError(process.communicate()[1])

    def stop(process: "subprocess.Popen[str]") -> None:
        process.terminate()
        process.communicate(timeout=60)

    found = location.up()
    kafka = Kafka(found.kafka or "")
    kafka.ensure([Topic("letters", 2)])
    send(kafka, "letters", [Record(b"before")])

    # A run on what is up, which stays when the run goes.
    run = ran()
    assert json.loads((location.state / "run.json").read_text())["channels"] == kafka.where
    assert set(location.children()) == {"kafka-1", "redis"}
    refused = location.penstock("down")
    assert refused.returncode == 2
    assert f"a pipeline runs here (process {run.pid}); stop it first" in refused.stderr
    stop(run)
    assert Services.at(location.state) == found
    location.penstock("down")

    # A run by itself finds what was produced before, and has the services for itself.
    run = ran()
    assert [entry.value for entry in held(kafka, "letters")] == [b"before"]
    told = location.penstock("up")
    assert (told.returncode, told.stderr) == (0, "")
    assert f"the pipeline that runs here (process {run.pid})" in told.stdout
    assert location.penstock("down", "--force").stdout == f"the pipeline is stopped (process {run.pid})\n"
    assert run.wait(20) == 0
    run.communicate()
    assert Services.at(location.state) is None


@pytest.mark.usefixtures("jars")
def test_when_the_leader_of_a_partition_dies_another_takes_over_and_nothing_is_lost(
    location: Workplace, eventually: Eventually
) -> None:
    found = location.up("--brokers", "3")
    made = location.penstock("topics", "--create", "--topic", "test", "--replication-factor", "3", "--partitions", "3")
    assert (made.returncode, made.stderr) == (0, "")
    kafka = Kafka(found.kafka or "")
    assert kafka.topic("test").config["min.insync.replicas"] == "2"
    leader = kafka.copies("test")[0].leader
    sent: list[int] = []
    enough = threading.Event()

    def sending() -> None:
        async def go() -> None:
            async with kafka.sender() as sender:
                while not enough.is_set():
                    numbers = range(len(sent), len(sent) + 10)
                    records = [Record(b"", Origin("one", 1, n, 0), b"%d" % (n % 50)) for n in numbers]
                    await sender.send("test", records)
                    sent.extend(numbers)
                    await asyncio.sleep(0.001)

        asyncio.run(go())

    flow = threading.Thread(target=sending)
    flow.start()
    try:
        eventually(lambda: len(sent) > 500)
        os.kill(location.children()[f"kafka-{leader}"], signal.SIGKILL)
        at_death = len(sent)
        eventually(lambda: kafka.copies("test")[0].leader not in (None, leader))
        eventually(lambda: len(sent) > at_death + 500)
        # And it comes back, and catches up.
        eventually(lambda: all(len(copies.in_sync) == 3 for copies in kafka.copies("test").values()))
        assert kafka.brokers() == 3
    finally:
        enough.set()
        flow.join(60)
    numbers = [origin.seq for entry in held(kafka, "test") if (origin := Origin.of(entry.headers))]
    assert sorted(numbers) == sent

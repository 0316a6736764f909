"""What tests of several rooms share: one broker, one Spark session, one browser; all of them real.

`make test` runs the tests in two processes, file by file, and each of these has its own.
"""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright
from pyspark.sql import SparkSession
from tests.channels.servers import HURRIED, KafkaServer
from tests.servers import RedisServer
from xdist.scheduler import LoadFileScheduling

from penstock.analysis.session import session
from penstock.analysis.settings import SparkSettings
from penstock.channels.kafka import Kafka
from penstock.run.warm import is_warmed_up, kafka_archive, spark_archive
from penstock.supervise.folder import LocalSettings, StateFolder
from penstock.supervise.java import Jars, Java, ensure_jars, find_java
from penstock.supervise.kafka import kafka_services
from penstock.supervise.supervisor import Supervisor

_FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def pytest_configure() -> None:
    """Give SIGINT back to the processes that tests start: what runs in the background of a script ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_WHOLE_PIPELINES = (
    "tests/soak/",
    "tests/analysis/killed/",
    "tests/analysis/test_poison.py",
    "tests/test_run",
    "tests/test_examples",
    "tests/test_quickstart.py",
    "tests/cli/test_up.py",
    "tests/cli/test_query.py",
    "tests/cli/test_run.py",
)
"""Tests that run several JVMs at a time. One process runs all of them, one after the other: two would not fit on two
cores."""


class _ByFile(LoadFileScheduling):  # type: ignore[misc]  # it has no types
    """Distributes the tests by file over the processes, but all whole pipelines to one."""

    def _split_scope(self, nodeid: str) -> str:
        return "pipelines" if nodeid.startswith(_WHOLE_PIPELINES) else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _ByFile:
    return _ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the whole pipelines, which take longest."""
    items.sort(key=lambda item: not item.nodeid.startswith(_WHOLE_PIPELINES))


@pytest.fixture(scope="session")
def java() -> Java:
    return find_java()


@pytest.fixture(scope="session")
def jars(java: Java) -> Jars:
    """The jars, and with them the archives that make the starts of this run quick."""
    found = ensure_jars(java)
    if not is_warmed_up(java, found):
        subprocess.run([sys.executable, "-m", "penstock", "warm"], check=True, capture_output=True)
    return found


@pytest.fixture(scope="session")
def kafka(java: Java, jars: Jars, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """A real broker, for all tests that do not break it."""
    with StateFolder(tmp_path_factory.mktemp("kafka") / ".penstock").locked() as folder:
        services, servers = kafka_services(java, jars, folder, LocalSettings(), kafka_archive(java, jars).use_flags())
        supervisor = Supervisor(services, folder)
        supervisor.start()
        yield Kafka(servers)
        supervisor.stop()


@pytest.fixture(scope="session")
def kafka_server(java: Java, jars: Jars, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaServer]:
    """A real broker, for tests that kill it; they leave it started."""
    with StateFolder(tmp_path_factory.mktemp("channels") / ".penstock").locked() as folder:
        (service,), servers = kafka_services(java, jars, folder, LocalSettings(), kafka_archive(java, jars).use_flags())
        assert service.folder is not None
        with (service.folder / "server.properties").open("a") as properties:
            properties.write(HURRIED)
        server = KafkaServer(service, servers)
        server.start()
        yield server
        server.kill()


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis for a test that kills it."""
    folder = tmp_path / "redis"
    folder.mkdir()
    server = RedisServer(folder)
    server.start()
    yield server
    server.kill()


_numbers = count(1)


@pytest.fixture
def fresh() -> Callable[[str], str]:
    """A name for a channel that no other test has."""
    return lambda name: f"{name}-{next(_numbers)}"


@pytest.fixture(scope="session")
def spark(java: Java, jars: Jars) -> Iterator[SparkSession]:
    """A real Spark session, for all tests."""
    archive = spark_archive(java, jars).use_flags()
    with session("tests", SparkSettings(), java.path, jars.spark, 12, None, archive) as running:
        yield running


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Wait until something is true."""

    def wait(condition: Callable[[], object], patience: float = 60) -> None:
        until = time.monotonic() + patience
        while not condition():
            assert time.monotonic() < until, "it did not come true"
            time.sleep(0.05)

    return wait


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """A real browser. Of a module, not of the session: while it is open, no event loop can run in this thread."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.fail("there is no chromium on the PATH; install it, on Debian with: apt install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_FLAGS)
        yield browser
        browser.close()

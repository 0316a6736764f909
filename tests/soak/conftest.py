"""What the tests of this folder share, and the table of their figures."""

from collections.abc import Iterator

import pytest
from tests.soak.sizes import FIGURES, FULL

from penstock.supervise.folder import LocalSettings, StateFolder
from penstock.supervise.redis import redis_service
from penstock.supervise.supervisor import Supervisor


@pytest.fixture(scope="package")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with StateFolder(tmp_path_factory.mktemp("redis") / ".penstock").locked() as folder:
        service, url = redis_service(folder, LocalSettings())
        supervisor = Supervisor([service], folder)
        supervisor.start()
        yield url
        supervisor.stop()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not FULL or not FIGURES:
        return
    terminalreporter.section("figures")
    width = max(len(what) for what, _ in FIGURES)
    for what, value in FIGURES:
        terminalreporter.write_line(f"{what:<{width}}  {value}")

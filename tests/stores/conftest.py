import time
from collections.abc import Callable

import pytest
from tests.servers import RedisServer


@pytest.fixture
def redis_server(shared_redis: RedisServer) -> RedisServer:
    """A Redis that holds nothing yet."""
    with shared_redis.client() as client:
        client.flushall()
    return shared_redis


@pytest.fixture
def eventually() -> Callable[[Callable[[], object]], None]:
    """Wait until something is true."""

    def wait(condition: Callable[[], object]) -> None:
        until = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < until, "it did not come true"
            time.sleep(0.005)

    return wait

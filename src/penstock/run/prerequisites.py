"""Checks that this machine has all that a pipeline needs, before anything is downloaded or started."""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from penstock.collect.listen import Endpoint, endpoint
from penstock.core.errors import Misconfigured, raise_all
from penstock.pipeline.config import Config
from penstock.pipeline.description import Description
from penstock.run.services import ROLE, Needs, Services
from penstock.supervise.folder import StateFolder, require_free
from penstock.supervise.java import cache_folder, cached_jars, find_java
from penstock.supervise.redis import find_redis

STATE, JARS = 256 << 20, 1 << 30
"""Bytes that have to be free for the state, and for jars and archives."""

Check = Callable[[], object]


def require(config: Config, needs: Needs, description: Description | None = None) -> None:
    """Raise Misconfigured with all that is missing for a run, or for the services if there is no pipeline."""
    _kill_leftovers(config)
    missing: list[Misconfigured] = []
    for check in _checks(config, needs, description):
        try:
            check()
        except Misconfigured as error:
            missing.append(error)
    raise_all(missing)


def _kill_leftovers(config: Config) -> None:
    """Kill the leftovers of a killed run, which may use ports; Misconfigured if a run is active."""
    if not config.state.is_dir():
        return
    with StateFolder(config.state).locked():
        if Services.at(config.state) is None:
            with StateFolder(config.state, ROLE).locked():
                pass


def _checks(config: Config, needs: Needs, description: Description | None) -> Iterator[Check]:
    if needs.kafka or description is not None:
        yield find_java
        if cached_jars() is None:
            yield partial(_check_space, cache_folder(), JARS, "the jars and archives of Kafka and Spark")
    yield partial(_check_space, config.state, STATE, "records, checkpoints and logs")
    ports: dict[str, int | None] = {}
    if Services.at(config.state) is None:
        if needs.redis:
            yield find_redis
            ports["[local] redis_port"] = config.local.redis_port
        if needs.kafka:
            ports["[local] kafka_port"] = config.local.kafka_port
    if description is not None:
        if description.pages:
            ports["[page] port"] = config.page.port
        for source in description.sources:
            if (url := config.source_address(source)).startswith("listen+"):
                yield partial(_check_listener, source.name, endpoint(url, source.name), config.collect.workers > 1)
    for setting, port in ports.items():
        if port is not None:
            yield partial(require_free, port, setting)


def _check_listener(name: str, at: Endpoint, shared: bool) -> None:
    with at.listen(name, shared):
        pass


def _check_space(folder: Path, needed: int, what: str) -> None:
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if (free := shutil.disk_usage(parent).free) < needed:
        problem = f"{free >> 20} MiB are free, but {what} need {needed >> 20} MiB"
        raise Misconfigured(str(folder), problem, "free some space, or use another disk")

"""What a pipeline needs of this machine, checked before anything is fetched: all that is missing, at once."""

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
"""Bytes that have to be free where the state lies, and where jars and archives will."""

Check = Callable[[], object]


def require(config: Config, needs: Needs, description: Description | None = None) -> None:
    """Misconfigured when something is missing that a run needs, or the services alone where no pipeline is given."""
    _end_leftovers(config)
    missing: list[Misconfigured] = []
    for one in _checks(config, needs, description):
        try:
            one()
        except Misconfigured as error:
            missing.append(error)
    raise_all(missing)


def _end_leftovers(config: Config) -> None:
    """End what a killed run has left behind, which may hold ports; Misconfigured when one runs here."""
    if not config.state.is_dir():
        return
    with StateFolder(config.state).locked():
        if Services.find(config) is None:
            with StateFolder(config.state, ROLE).locked():
                pass


def _checks(config: Config, needs: Needs, description: Description | None) -> Iterator[Check]:
    if needs.kafka or description is not None:
        yield find_java
        if cached_jars() is None:
            yield partial(_space, cache_folder(), JARS, "the jars and archives of Kafka and Spark")
    yield partial(_space, config.state, STATE, "records, checkpoints and logs")
    ports: dict[str, int | None] = {}
    if Services.find(config) is None:
        if needs.redis:
            yield find_redis
            ports["[local] redis_port"] = config.local.redis_port
        if needs.kafka:
            ports["[local] kafka_port"] = config.local.kafka_port
    if description is not None:
        if description.pages:
            ports["[page] port"] = config.page.port
        for source in description.sources:
            if (url := config.address(source)).startswith("listen+"):
                yield partial(_listen, source.name, endpoint(url, source.name), config.collect.workers > 1)
    for setting, port in ports.items():
        if port is not None:
            yield partial(require_free, port, setting)


def _listen(name: str, at: Endpoint, shared: bool) -> None:
    with at.listen(name, shared):
        pass


def _space(folder: Path, needed: int, what: str) -> None:
    place = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if (free := shutil.disk_usage(place).free) < needed:
        problem = f"{free >> 20} MiB are free, and {what} need {needed >> 20} MiB to begin with"
        raise Misconfigured(str(folder), problem, "make room, or use another disk")

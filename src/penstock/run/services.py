"""The local services of a pipeline, Kafka and Redis, and the files in its state folder by which commands find them.

Either `penstock up` starts the services, until `penstock down`; or a run starts its own. Both use the same data. Before
that, `require` checks that this machine has all that they need.
"""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from penstock.collect.listen import Endpoint, endpoint
from penstock.core.errors import Misconfigured, raise_all
from penstock.core.text import redact_address
from penstock.pipeline.config import LOCAL, LOCALS, Config
from penstock.pipeline.description import Description
from penstock.run.warm import is_warmed_up, kafka_archive
from penstock.supervise.folder import StateFolder, from_note, require_free, write_note
from penstock.supervise.java import cache_folder, cached_jars, ensure_jars, find_java
from penstock.supervise.kafka import kafka_services
from penstock.supervise.process import Service, tied_to_parent
from penstock.supervise.redis import find_redis, redis_service
from penstock.supervise.supervisor import Event, Supervisor

ROLE = "services"
STATE, JARS = 256 << 20, 1 << 30
"""Bytes that have to be free for the state, and for jars and archives."""


class Screen(Protocol):
    """Shows the progress to the user."""

    def say(self, text: str) -> None: ...

    def event(self, event: Event) -> None: ...

    def jars(self, done: int, total: int) -> None: ...


def prepare_machine(screen: Screen) -> None:
    """Download the jars and run the warm-up, once per machine."""
    java = find_java()
    jars = ensure_jars(java, progress=screen.jars)
    if not is_warmed_up(java, jars):
        screen.say("preparing Java for quick starts (once, half a minute)")
        # If the warm-up fails, everything works, but starts later.
        with (cache_folder().parent / "warm.log").open("wb") as log:
            subprocess.run(
                tied_to_parent(sys.executable, "-m", "penstock", "warm"), stdout=log, stderr=log, check=False
            )


@dataclass(frozen=True)
class Services:
    """The addresses of the services of a folder, as stored there for other commands."""

    pid: int
    kafka: str | None = None
    """The brokers: host:port,…"""
    redis: str | None = None
    up: bool = False
    """All of them are ready."""

    FILE = "services.json"

    @classmethod
    def at(cls, state: Path) -> "Services | None":
        """The services that run in this state folder; None if there are none."""
        return from_note(cls, StateFolder(state, ROLE).read_note(cls.FILE))

    @property
    def where(self) -> str:
        """Their addresses, as text."""
        addresses = {"Kafka": self.kafka, "Redis": self.redis}
        return ", ".join(f"{name} at {address}" for name, address in addresses.items() if address)

    def write(self, folder: StateFolder) -> None:
        write_note(folder.path / self.FILE, asdict(self))


@dataclass(frozen=True)
class Needs:
    """The services that have to run here, because the settings have no address for them."""

    kafka: bool
    redis: bool

    @classmethod
    def all(cls, config: Config) -> "Needs":
        return cls(config.channels.address == "kafka://", config.redis.url == LOCAL)


@contextmanager
def provide_services(config: Config, needs: Needs) -> Iterator[tuple[list[Service], Services]]:
    """Yield the services that a run has to start, and the addresses of all services.

    If `penstock up` has started the services, the run starts none; Misconfigured if one of them is missing.
    """
    if (found := Services.at(config.state)) is None:
        with _locked_services(config, needs) as (_, services, found):
            yield services, found
        return
    if not found.up:
        raise still_starting(config, found)
    missing = [name for name in ("kafka", "redis") if getattr(needs, name) and getattr(found, name) is None]
    if missing:
        raise Misconfigured(
            str(config.folder.absolute()),
            f"{' and '.join(missing)} is not among the running services",
            "restart them: penstock down, then penstock up",
        )
    yield [], found


def still_starting(config: Config, found: Services) -> Misconfigured:
    return Misconfigured(
        str(config.folder.absolute()),
        f"process {found.pid} is still starting the services",
        "try again when they are ready",
    )


@contextmanager
def run_services(
    config: Config, needs: Needs, stop: threading.Event, on_event: Callable[[Event], None]
) -> Iterator[tuple[Supervisor, Services]]:
    """Start the services; yield once they are ready, or `stop` is set; stop them afterwards."""
    with _locked_services(config, needs) as (folder, services, found):
        supervisor = Supervisor(services, folder, on_event)
        try:
            supervisor.start(stop)
            if not stop.is_set():
                found = replace(found, up=True)
                found.write(folder)
            yield supervisor, found
        finally:
            supervisor.stop()


@contextmanager
def _locked_services(config: Config, needs: Needs) -> Iterator[tuple[StateFolder, list[Service], Services]]:
    """Lock the folder for its services."""
    with StateFolder(config.state, ROLE).locked() as folder:
        services: list[Service] = []
        found = Services(os.getpid())
        if needs.kafka:
            java = find_java()
            jars = ensure_jars(java)
            flags = kafka_archive(java, jars).use_flags()
            brokers, servers = kafka_services(java, jars, folder, config.local, flags)
            services += brokers
            found = replace(found, kafka=servers)
        if needs.redis:
            service, url = redis_service(folder, config.local)
            services.append(service)
            found = replace(found, redis=url)
        found.write(folder)
        try:
            yield folder, services, found
        finally:
            (folder.path / Services.FILE).unlink(missing_ok=True)


def with_running_services(config: Config) -> Config:
    """The configuration with the addresses of the run, or of the services, in its folder.

    Misconfigured if services are needed and do not run, or are still starting.
    """
    found, running = Services.at(config.state), RunningPipeline.at(config.state)
    if running is not None and running.address:
        config = config.with_addresses(running.address, running.redis or config.redis.url)
    elif found is not None:
        config = config.with_services(found.kafka, found.redis)
    elif config.with_services(None, None).channels.address in LOCALS:
        raise Misconfigured(
            str(config.folder.absolute()),
            "nothing runs here",
            "start a pipeline (penstock run FILE, penstock demo), or only the services: penstock up",
        )
    if found is not None and not found.up and config.channels.address in (f"kafka://{found.kafka}", found.redis):
        raise still_starting(config, found)
    return config


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


def _checks(config: Config, needs: Needs, description: Description | None) -> Iterator[Callable[[], object]]:
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


@dataclass(frozen=True)
class RunningPipeline:
    """The run of a folder, as stored in its state folder for other commands."""

    pid: int
    pipeline: str
    status: str
    channels: str
    """Their address without secrets."""
    page: str | None
    redis: str | None
    file: str = ""
    """The file of the pipeline."""
    address: str = ""
    """The full address of its channels, for commands that have other settings than the run."""

    FILE = "run.json"

    @classmethod
    def at(cls, state: Path) -> "RunningPipeline | None":
        """The run that has locked this state folder."""
        return from_note(cls, StateFolder(state).read_note(cls.FILE))

    @classmethod
    def crashed(cls, state: Path) -> bool:
        """Whether a run crashed here. A run that stops removes the file."""
        return (state / cls.FILE).exists() and StateFolder(state).owner() is None

    @classmethod
    def find(cls, config: Config) -> "RunningPipeline":
        """The run in this folder; Misconfigured if there is none."""
        if (found := cls.at(config.state)) is None:
            raise Misconfigured(
                str(config.folder.absolute()), "nothing runs here", "start it: penstock run FILE, or penstock demo"
            )
        return found

    @classmethod
    def file_in(cls, config: Config) -> Path:
        """The file of the pipeline that runs in this folder; Misconfigured if there is none."""
        if (found := cls.at(config.state)) is not None and found.file:
            return Path(found.file)
        problem = "nothing runs here" if found is None else "the run has not stored its file"
        raise Misconfigured(str(config.folder.absolute()), problem, "name the file of the pipeline: --pipeline FILE")

    def write(self, state: Path) -> None:
        """Write the file. Only its owner can read it, because addresses may contain passwords."""
        write_note(state / self.FILE, asdict(self))

    def to_json(self) -> dict[str, object]:
        """The fields without secrets."""
        fields = asdict(self)
        del fields["address"]
        return {**fields, "redis": self.redis and redact_address(self.redis)}

"""The services of this machine that a pipeline stands on: Kafka and Redis, kept in its state folder.

Either `penstock up` has started them, and they stay until `penstock down`; or a run starts them for itself. Both keep
the same data: what was produced on the one is there on the other.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from penstock.core.errors import Misconfigured
from penstock.pipeline.config import LOCAL, LOCALS, Config
from penstock.run.run_file import Running
from penstock.run.warm import is_warm, kafka_archive
from penstock.supervise.folder import StateFolder, from_note, write_note
from penstock.supervise.java import Jars, Java, cache_folder, ensure_jars, find_java
from penstock.supervise.kafka import kafka_services
from penstock.supervise.process import Service, tied_to_parent
from penstock.supervise.redis import redis_service
from penstock.supervise.supervisor import Event, Supervisor

ROLE = "services"


class Screen(Protocol):
    """Who shows a person how things start and go."""

    def say(self, text: str) -> None: ...

    def event(self, event: Event) -> None: ...

    def jars(self, done: int, total: int) -> None: ...


@dataclass(frozen=True)
class Machine:
    """What this machine runs the JVMs with."""

    java: Java
    jars: Jars


def prepared(screen: Screen) -> Machine:
    """What is done once per machine and takes a while: the jars, and the archives for quick starts."""
    java = find_java()
    jars = ensure_jars(java, progress=screen.jars)
    if not is_warm(java, jars):
        screen.say("preparing Java for quick starts (once, half a minute)")
        # In a process of its own; without it, everything works, only later.
        with (cache_folder().parent / "warm.log").open("wb") as log:
            subprocess.run(
                tied_to_parent(sys.executable, "-m", "penstock", "warm"), stdout=log, stderr=log, check=False
            )
    return Machine(java, jars)


@dataclass(frozen=True)
class Services:
    """Where the services of a folder can be found; kept there for the other commands."""

    pid: int
    kafka: str | None = None
    """Its brokers, as host:port, with commas between them."""
    redis: str | None = None
    up: bool = False
    """All of them have answered."""

    FILE = "services.json"

    @classmethod
    def find(cls, config: Config) -> "Services | None":
        """Those that run in this folder, whoever has started them."""
        return cls.at(config.state)

    @classmethod
    def at(cls, state: Path) -> "Services | None":
        return from_note(cls, StateFolder(state, ROLE).read_note(cls.FILE))

    @property
    def where(self) -> str:
        """Their addresses, for people."""
        places = {"Kafka": self.kafka, "Redis": self.redis}
        return ", ".join(f"{name} at {place}" for name, place in places.items() if place)

    def has(self, address: str) -> bool:
        """The channels at this address are kept by them."""
        return address in (f"kafka://{self.kafka}", self.redis)

    def write(self, folder: StateFolder) -> None:
        write_note(folder.path / self.FILE, asdict(self))


@dataclass(frozen=True)
class Needs:
    """Which services have to run here, because the settings name no others."""

    kafka: bool
    redis: bool

    @classmethod
    def all(cls, config: Config) -> "Needs":
        return cls(config.channels.address == "kafka://", config.redis.url == LOCAL)


@contextmanager
def provided(config: Config, needs: Needs, machine: Machine) -> Iterator[tuple[list[Service], Services]]:
    """What has to be started for these needs, and where all will be found; the folder's services are held meanwhile.

    Nothing has to be started when `penstock up` has done so; Misconfigured when that lacks something.
    """
    if (found := Services.find(config)) is None:
        with _held(config, needs, machine) as (_, services, found):
            yield services, found
        return
    if not found.up:
        raise starting(config, found)
    missing = [name for name in ("kafka", "redis") if getattr(needs, name) and getattr(found, name) is None]
    if missing:
        raise Misconfigured(
            str(config.folder.absolute()),
            f"{' and '.join(missing)} is needed, and not among the services that are up",
            "start them again: penstock down, then penstock up",
        )
    yield [], found


def starting(config: Config, found: Services) -> Misconfigured:
    return Misconfigured(
        str(config.folder.absolute()),
        f"the process {found.pid} is just starting the services",
        "try again once they are up",
    )


@contextmanager
def serving(
    config: Config, needs: Needs, machine: Machine | None, stop: threading.Event, on_event: Callable[[Event], None]
) -> Iterator[tuple[Supervisor, Services]]:
    """Start the services alone and yield once they are ready, or `stop` is set; stop them afterwards."""
    with _held(config, needs, machine) as (folder, services, found):
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
def _held(
    config: Config, needs: Needs, machine: Machine | None
) -> Iterator[tuple[StateFolder, list[Service], Services]]:
    """The services of a folder, which is held for them. `machine` may be None where no Kafka is needed."""
    with StateFolder(config.state, ROLE).locked() as folder:
        services: list[Service] = []
        found = Services(os.getpid())
        if needs.kafka:
            assert machine is not None
            archive = kafka_archive(machine.java, machine.jars)
            brokers, servers = kafka_services(machine.java, machine.jars, folder, config.local, archive.use_flags())
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


def here(config: Config) -> Config:
    """The wiring with the addresses of what runs in its folder, whatever settings a run there was started with.

    Misconfigured when that is needed, and nothing does; or what is needed is just being started.
    """
    found, running = Services.find(config), Running.at(config.state)
    if running is not None and running.address:
        config = config.placed(running.address, running.redis or config.redis.url)
    elif found is not None:
        config = config.at(found.kafka, found.redis)
    elif config.at(None, None).channels.address in LOCALS:
        raise Misconfigured(
            str(config.folder.absolute()),
            "nothing runs here",
            "start a pipeline (penstock run FILE, penstock demo), or the services alone: penstock up",
        )
    if found is not None and not found.up and found.has(config.channels.address):
        raise starting(config, found)
    return config

"""A pipeline on this machine: the services that it needs, and its tiers, all supervised."""

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.error import URLError

import psutil

from penstock.channels.kafka import Kafka
from penstock.errors import Misconfigured
from penstock.pipeline.description import Description
from penstock.pipeline.pulse import Figures, pulse
from penstock.pipeline.tiers import Tier
from penstock.pipeline.warm import is_warm, kafka_archive
from penstock.pipeline.wiring import Wiring, simulated
from penstock.supervise.events import Event
from penstock.supervise.folder import StateFolder
from penstock.supervise.jars import Jars, cache_folder, ensure_jars
from penstock.supervise.java import Java, find_java
from penstock.supervise.kafka import kafka_services
from penstock.supervise.process import tied
from penstock.supervise.redis import redis_service
from penstock.supervise.service import Service
from penstock.supervise.supervisor import Supervisor

USUAL_PORT = 8787


@dataclass(frozen=True)
class Running:
    """Where a run can be found; kept in the state folder for the other commands."""

    pid: int
    pipeline: str
    status: str
    servers: str
    page: str | None
    redis: str | None
    file: str = ""
    """The pipeline's own file."""

    FILE = "run.json"

    @classmethod
    def find(cls, wiring: Wiring) -> "Running":
        """The run in this folder; Misconfigured when there is none."""
        folder = StateFolder(wiring.state)
        file = folder.path / cls.FILE
        if folder.holder() is None or not file.exists():
            raise Misconfigured(
                str(wiring.folder.absolute()), "nothing runs here", "start it: penstock run FILE, or penstock demo"
            )
        return cls(**json.loads(file.read_text()))


class Screen(Protocol):
    """Who shows a person how a run starts and goes."""

    def say(self, text: str) -> None: ...

    def event(self, event: Event) -> None: ...

    def jars(self, done: int, total: int) -> None: ...


@dataclass(frozen=True)
class Machine:
    """What this machine runs the JVMs with."""

    java: Java
    jars: Jars


class LocalRun:
    """Everything that `penstock run` starts, in a state folder that it holds."""

    def __init__(self, file: Path, description: Description, wiring: Wiring, profile: str | None) -> None:
        self._file, self._description, self._wiring, self._profile = file, description, wiring, profile

    def prepare(self, screen: Screen) -> Machine:
        """What is done once per machine and takes a while: the jars, and the archives for quick starts."""
        java = find_java()
        jars = ensure_jars(java, progress=screen.jars)
        if not is_warm(java, jars):
            screen.say("preparing Java for quick starts (once, half a minute)")
            _warm()
        return Machine(java, jars)

    @contextmanager
    def started(self, machine: Machine, stop: threading.Event, screen: Screen) -> Iterator[tuple[Supervisor, Running]]:
        """Start all and yield once everything is ready, or `stop` is set; stop all afterwards."""
        with StateFolder(self._wiring.state).held() as folder:
            services, running = self._services(machine, folder)
            (folder.path / Running.FILE).write_text(json.dumps(asdict(running)))
            supervisor = Supervisor(services, folder, screen.event)
            try:
                supervisor.start(stop)
                with pulse(Kafka(running.servers, self._wiring.kafka), running.status, "run", _Usage(supervisor)):
                    yield supervisor, running
            finally:
                supervisor.stop()
                (folder.path / Running.FILE).unlink(missing_ok=True)

    def _services(self, machine: Machine, folder: StateFolder) -> tuple[list[Service], Running]:
        wiring, description = self._wiring, self._description
        services: list[Service] = []
        env: dict[str, str] = {"PYTHONUNBUFFERED": "1"}
        servers, redis = wiring.kafka.servers, wiring.redis.url
        if servers == "local":
            archive = kafka_archive(machine.java, machine.jars)
            brokers, servers = kafka_services(machine.java, machine.jars, folder, wiring.local, archive.used())
            services += brokers
        env["PENSTOCK_KAFKA_SERVERS"] = servers
        brokers_ready = tuple(service.name for service in services)
        stores_ready: tuple[str, ...] = ()
        if redis == "local" and any(store.url == "redis://" for store in description.stores):
            service, redis = redis_service(folder, wiring.local)
            services.append(service)
            stores_ready = (service.name,)
        env["PENSTOCK_REDIS_URL"] = redis
        feeds = []
        for source in description.sources:
            if (simulation := simulated(wiring.address(source))) is not None:
                service, url = _simulation(source.name, *simulation, folder)
                feeds.append(service)
                env[f"PENSTOCK_SOURCES_{source.name.upper()}"] = url
        services += feeds
        page = None
        if description.pages:
            host, port = wiring.page.host, self._page_port(folder)
            env["PENSTOCK_PAGE_PORT"] = str(port)
            page = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
        for tier in self._tiers():
            needs = brokers_ready
            if tier is Tier.LOAD:
                needs += stores_ready
            if tier is Tier.COLLECT:
                needs += tuple(feed.name for feed in feeds)
            services.append(self._tier(tier, folder, env, needs, page))
        found = Running(
            os.getpid(),
            description.name,
            description.status,
            servers,
            page,
            None if redis == "local" else redis,
            str(self._file.absolute()),
        )
        return services, found

    def _tiers(self) -> list[Tier]:
        description = self._description
        wanted = {
            Tier.ANALYSE: bool(description.queries or description.sifted),
            Tier.COLLECT: bool(description.sources),
            Tier.LOAD: bool(description.stores),
            Tier.AUDIT: True,
            Tier.DELIVER: bool(description.pages),
        }
        return [tier for tier, needed in wanted.items() if needed]

    def _tier(
        self, tier: Tier, folder: StateFolder, env: dict[str, str], needs: tuple[str, ...], page: str | None
    ) -> Service:
        told = folder.sub("ready") / tier
        told.unlink(missing_ok=True)
        profile = ("--profile", self._profile) if self._profile else ()
        file, home = str(self._file.absolute()), str(self._wiring.folder.absolute())
        command = (
            sys.executable,
            "-m",
            "penstock",
            "tier",
            tier,
            file,
            "--folder",
            home,
            "--ready",
            str(told),
            *profile,
        )
        ready: Callable[[], bool] = _Told(told)
        if tier is Tier.DELIVER:
            # Both: another run may answer at that address, before ours finds it taken.
            bound, healthy = ready, _Answers(f"{page}/healthz")
            ready = lambda: bound() and healthy()  # noqa: E731
        # Spark takes longest: it begins at once, and waits for the brokers by itself.
        early = tier is Tier.ANALYSE
        return Service(
            str(tier), command, folder.log(tier), ready, env,
            needs=() if early else needs, uses=needs if early else (), patience=180,
        )  # fmt: skip

    def _page_port(self, folder: StateFolder) -> int:
        wanted = self._wiring.page.port
        if wanted is None:
            with suppress(Misconfigured):
                return folder.port("page", USUAL_PORT)
        return folder.port("page", wanted, "[page] port")


def _simulation(source: str, name: str, options: dict[str, str], folder: StateFolder) -> tuple[Service, str]:
    """A feed of the outside world, as a service of its own."""
    port = folder.port(f"feed-{source}")
    # One epoch for the whole run: a feed that dies and is started again goes on as if it had never been away.
    options = {"epoch": str(int(time.time()) + 1), **options}
    flags = [part for option, value in options.items() for part in (f"--{option}", value) if part]
    command = (sys.executable, "-m", "penstock", "feed", name, "--port", str(port), *flags)
    return (
        Service(f"feed-{source}", command, folder.log(f"feed-{source}"), _Answers(f"http://127.0.0.1:{port}/")),
        f"ws://127.0.0.1:{port}/{name}",
    )


class _Told:
    """Asks whether the process that a file names is alive: the word of one that died counts no more."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __call__(self) -> bool:
        try:
            return psutil.pid_exists(int(self._file.read_text()))
        except (FileNotFoundError, ValueError):
            return False


def _warm() -> None:
    """In a process of its own; without it, everything works, only later."""
    with (cache_folder().parent / "warm.log").open("wb") as log:
        subprocess.run(tied(sys.executable, "-m", "penstock", "warm"), stdout=log, stderr=log, check=False)


# What runs here is not asked through a proxy, whatever the environment says of the world outside.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class _Answers:
    """Asks an address whether it answers with 200."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __call__(self) -> bool:
        try:
            with _DIRECT.open(self._url, timeout=1) as response:
                return bool(response.status == 200)
        except (URLError, OSError):
            return False


class _Usage:
    """The usage of all services, looked up every few seconds: adding up the pages of a JVM takes a while."""

    _EVERY = 5.0

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._at = -self._EVERY
        self._told: dict[str, Any] = {}

    def __call__(self) -> Figures:
        if time.monotonic() - self._at >= self._EVERY:
            self._told = {name: asdict(usage) for name, usage in self._supervisor.processes().items()}
            self._at = time.monotonic()
        return {"usage": self._told}

"""`penstock run`: a pipeline on this machine, with its services and tiers under one supervisor."""

import os
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from urllib.error import URLError

import psutil

from penstock.core.errors import Misconfigured
from penstock.pipeline.config import LOCAL, Config, parse_simulation
from penstock.pipeline.description import Description
from penstock.pipeline.sources import can_be_shared
from penstock.run.new_checkpoint import Renewal
from penstock.run.prerequisites import require
from penstock.run.services import Machine, Needs, RunningPipeline, Screen, provide_services
from penstock.run.spools import waiting
from penstock.run.status import Figures, report_status
from penstock.run.tier import Tier, ensure_channels
from penstock.supervise.folder import DiskSpace, StateFolder
from penstock.supervise.process import Service
from penstock.supervise.supervisor import Event, EventKind, Supervisor

USUAL_PORT = 8787


class LocalRun:
    """A run: its services and tiers, in a locked state folder."""

    def __init__(
        self,
        file: Path,
        description: Description,
        config: Config,
        profile: str | None,
        renewal: Renewal | None = None,
    ) -> None:
        """`renewal`: the queries that get a new checkpoint before the start."""
        self._file, self._description, self._config, self._profile = file, description, config, profile
        self._renewal = renewal

    def require(self) -> None:
        """Raise Misconfigured if this machine lacks something that the run needs."""
        require(self._config, self._needs(), self._description)

    @contextmanager
    def started(
        self, machine: Machine, stop: threading.Event, screen: Screen
    ) -> Iterator[tuple[Supervisor, RunningPipeline]]:
        """Start all; yield once all is ready, or `stop` is set; stop all afterwards."""
        config = self._config
        with (
            StateFolder(config.state).locked() as folder,
            provide_services(config, self._needs(), machine) as (services, found),
        ):
            config = config.with_services(found.kafka, found.redis)
            tiers, running = self._services(config, folder, services)
            running.write(folder.path)

            def on_services_ready() -> None:
                if found.pid == os.getpid():
                    replace(found, up=True).write(folder)
                ensure_channels(config.bind(), self._description, screen.say)
                if self._renewal is not None:
                    for done in self._renewal.apply(self._description, config.checkpoints, config.bind()):
                        screen.say(done)

            events = _Events(services, screen, on_services_ready)
            supervisor = Supervisor([*services, *tiers], folder, events.event)
            try:
                events.check()
                supervisor.start(stop)
                space = DiskSpace(config.state, config.local.reserve)
                with report_status(config.bind(), running.status, "run", _Usage(supervisor, space)):
                    yield supervisor, running
            finally:
                supervisor.stop()
                (folder.path / RunningPipeline.FILE).unlink(missing_ok=True)

    def _needs(self) -> Needs:
        """Redis is needed if a store or the channels use it."""
        needs, address = Needs.all(self._config), self._config.channels.address
        stored = any(store.url == "redis://" for store in self._description.stores)
        return Needs(needs.kafka, needs.redis and (stored or address == "redis://"))

    def _services(
        self, config: Config, folder: StateFolder, below: list[Service]
    ) -> tuple[list[Service], RunningPipeline]:
        """The tiers, and the simulated feeds. `below`: the services that the run starts for them."""
        description = self._description
        services: list[Service] = []
        env: dict[str, str] = {
            "PYTHONUNBUFFERED": "1",
            "PENSTOCK_CHANNELS_ADDRESS": config.channels.address,
            "PENSTOCK_REDIS_URL": config.redis.url,
        }
        feeds = []
        for source in description.sources:
            if (simulation := parse_simulation(config.source_address(source))) is not None:
                service, url = _simulation(source.name, *simulation, folder)
                feeds.append(service)
                env[f"PENSTOCK_SOURCES_{source.name.upper()}"] = url
        services += feeds
        page = None
        if description.pages:
            host, port = config.page.host, self._page_port(folder)
            env["PENSTOCK_PAGE_PORT"] = str(port)
            page = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
        for tier in self._tiers():
            needs = tuple(service.name for service in below)
            if tier is Tier.COLLECT:
                needs += tuple(feed.name for feed in feeds)
            services.append(self._tier(tier, folder, env, needs, page))
            if tier is Tier.COLLECT:
                services += self._workers(services[-1], folder)
        found = RunningPipeline(
            os.getpid(),
            description.name,
            description.status,
            config.bind().where,
            page,
            None if config.redis.url == LOCAL else config.redis.url,
            str(self._file.absolute()),
            config.channels.address,
        )
        return services, found

    def _workers(self, first: Service, folder: StateFolder) -> list[Service]:
        """Further collector processes."""
        if not any(can_be_shared(source, self._config) for source in self._description.sources):
            return []
        found = []
        for worker in range(1, self._config.collect.workers):
            name = f"{first.name}-{worker}"
            ready = folder.sub("ready") / name
            ready.unlink(missing_ok=True)
            command = tuple(str(ready) if part.endswith(f"/{first.name}") else part for part in first.command)
            env = {**first.env, "PENSTOCK_COLLECT_WORKER": str(worker)}
            found.append(
                replace(first, name=name, command=command, log=folder.log(name), ready=_ReadyFile(ready), env=env)
            )
        return found

    def _tiers(self) -> list[Tier]:
        description = self._description
        wanted = {
            Tier.ANALYSE: bool(description.queries or description.with_dead_letters or description.lakes),
            # Records of a removed source may wait on disk.
            Tier.COLLECT: bool(description.sources) or any(waiting(self._config)),
            Tier.LOAD: len(description.stores) > len(description.lakes),
            Tier.AUDIT: True,
            Tier.DELIVER: bool(description.pages),
        }
        return [tier for tier, needed in wanted.items() if needed]

    def _tier(
        self, tier: Tier, folder: StateFolder, env: dict[str, str], needs: tuple[str, ...], page: str | None
    ) -> Service:
        ready_file = folder.sub("ready") / tier
        ready_file.unlink(missing_ok=True)
        profile = ("--profile", self._profile) if self._profile else ()
        file, own_folder = str(self._file.absolute()), str(self._config.folder.absolute())
        command = (
            sys.executable,
            "-m",
            "penstock",
            "tier",
            tier,
            file,
            "--folder",
            own_folder,
            "--ready",
            str(ready_file),
            *profile,
        )
        ready: Callable[[], bool] = _ReadyFile(ready_file)
        if tier is Tier.DELIVER:
            # Both, because another process may answer at that address.
            bound, healthy = ready, _HttpReady(f"{page}/healthz")
            ready = lambda: bound() and healthy()  # noqa: E731
        # Spark takes longest: it starts first and waits for the brokers. But new checkpoints have to exist before.
        early = tier is Tier.ANALYSE and self._renewal is None
        return Service(
            str(tier), command, folder.log(tier), ready, env,
            needs=() if early else needs, uses=needs if early else (), ready_within=180,
            stdin=tier is Tier.COLLECT and any(source.url.startswith("stdin:") for source in self._description.sources),
        )  # fmt: skip

    def _page_port(self, folder: StateFolder) -> int:
        port = self._config.page.port
        if port is None:
            with suppress(Misconfigured):
                return folder.port("page", USUAL_PORT)
        return folder.port("page", port, "[page] port")


def _simulation(source: str, name: str, options: dict[str, str], folder: StateFolder) -> tuple[Service, str]:
    """A simulated feed as a service, and its address."""
    port = folder.port(f"feed-{source}")
    # One epoch for the whole run, so that a restarted feed continues.
    options = {"epoch": str(int(time.time()) + 1), **options}
    flags = [part for option, value in options.items() for part in (f"--{option}", value) if part]
    command = (sys.executable, "-m", "penstock", "feed", name, "--port", str(port), *flags)
    return (
        Service(f"feed-{source}", command, folder.log(f"feed-{source}"), _HttpReady(f"http://127.0.0.1:{port}/")),
        f"ws://127.0.0.1:{port}/{name}",
    )


class _Events:
    """Passes events on, and calls `on_ready` once when all services are ready, before another process starts."""

    def __init__(self, services: list[Service], screen: Screen, on_ready: Callable[[], None]) -> None:
        self._awaited: set[str] | None = {service.name for service in services}
        self._screen, self._on_ready = screen, on_ready

    def event(self, event: Event) -> None:
        self._screen.event(event)
        if self._awaited is not None and event.kind is EventKind.READY:
            self._awaited.discard(event.service)
            self.check()

    def check(self) -> None:
        if self._awaited is not None and not self._awaited:
            self._awaited = None
            self._on_ready()


class _ReadyFile:
    """A readiness probe: the process whose pid is in the file is running."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __call__(self) -> bool:
        try:
            return psutil.pid_exists(int(self._file.read_text()))
        except (FileNotFoundError, ValueError):
            return False


# Without a proxy, which the environment may set.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class _HttpReady:
    """A readiness probe: the address answers with 200."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __call__(self) -> bool:
        try:
            with _DIRECT.open(self._url, timeout=1) as response:
                return bool(response.status == 200)
        except (URLError, OSError):
            return False


class _Usage:
    """The usage of all services. Memory is measured every few seconds, because it is slow for a JVM."""

    _EVERY = 5.0

    def __init__(self, supervisor: Supervisor, space: DiskSpace) -> None:
        self._supervisor, self._space = supervisor, space
        self._at = -self._EVERY
        self._memory: dict[str, int] = {}

    def __call__(self) -> Figures:
        if measured := time.monotonic() - self._at >= self._EVERY:
            self._at = time.monotonic()
        usage = self._supervisor.processes(measured)
        if measured:
            self._memory = {name: one.memory for name, one in usage.items()}
        report = {name: {**asdict(one), "memory": self._memory.get(name, 0)} for name, one in usage.items()}
        return {"usage": report, "disk": self._space.figures()}

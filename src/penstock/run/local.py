"""`penstock run`: a pipeline on this machine, with its services and tiers under one supervisor."""

import os
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from urllib.error import URLError

import psutil

from penstock.core.errors import Misconfigured
from penstock.pipeline.config import LOCAL, Config, parse_simulation
from penstock.pipeline.description import Description
from penstock.pipeline.sources import can_be_shared
from penstock.run.new_checkpoint import Renewal
from penstock.run.services import Needs, RunningPipeline, Screen, provide_services, require
from penstock.run.spools import waiting
from penstock.run.status import Figures, report_status
from penstock.run.tier import Tier, ensure_channels
from penstock.supervise.folder import DiskSpace, StateFolder
from penstock.supervise.process import Service
from penstock.supervise.supervisor import Event, EventKind, Supervisor

USUAL_PORT = 8787


@dataclass(frozen=True)
class LocalRun:
    """A run: its services and tiers, in a locked state folder."""

    file: Path
    description: Description
    config: Config
    profile: str | None
    renewal: Renewal | None = None
    """The queries that get a new checkpoint before the start."""

    def require(self) -> None:
        """Raise Misconfigured if this machine lacks something that the run needs."""
        require(self.config, self._needs(), self.description)

    @contextmanager
    def started(self, stop: threading.Event, screen: Screen) -> Iterator[tuple[Supervisor, RunningPipeline]]:
        """Start all; yield once all is ready, or `stop` is set; stop all afterwards."""
        config = self.config
        with (
            StateFolder(config.state).locked() as folder,
            provide_services(config, self._needs()) as (services, found),
        ):
            config = config.with_services(found.kafka, found.redis)
            tiers, running = self._services(config, folder, services)
            running.write(folder.path)

            def on_services_ready() -> None:
                """Prepare the channels, before a process starts that needs them."""
                if found.pid == os.getpid():
                    replace(found, up=True).write(folder)
                ensure_channels(config.bind(), self.description, screen.say)
                if self.renewal is not None:
                    for done in self.renewal.apply(self.description, config.checkpoints, config.bind()):
                        screen.say(done)

            awaited = {service.name for service in services}

            def on_event(event: Event) -> None:
                screen.event(event)
                if event.kind is EventKind.READY and event.service in awaited:
                    awaited.remove(event.service)
                    if not awaited:
                        on_services_ready()

            supervisor = Supervisor([*services, *tiers], folder, on_event)
            try:
                if not awaited:
                    on_services_ready()
                supervisor.start(stop)
                space = DiskSpace(config.state, config.local.reserve)

                def figures() -> Figures:
                    usage = {name: asdict(one) for name, one in supervisor.processes().items()}
                    return {"usage": usage, "disk": space.figures()}

                with report_status(config.bind(), running.status, "run", figures):
                    yield supervisor, running
            finally:
                supervisor.stop()
                (folder.path / RunningPipeline.FILE).unlink(missing_ok=True)

    def _needs(self) -> Needs:
        """Redis is needed if a store or the channels use it."""
        needs = Needs.all(self.config)
        urls = [self.config.channels.address, *(store.url for store in self.description.stores)]
        return replace(needs, redis=needs.redis and "redis://" in urls)

    def _services(
        self, config: Config, folder: StateFolder, below: list[Service]
    ) -> tuple[list[Service], RunningPipeline]:
        """The tiers, and the simulated feeds. `below`: the services that the run starts for them."""
        description = self.description
        env = {
            "PYTHONUNBUFFERED": "1",
            "PENSTOCK_CHANNELS_ADDRESS": config.channels.address,
            "PENSTOCK_REDIS_URL": config.redis.url,
        }
        services: list[Service] = []
        for source in description.sources:
            if (simulation := parse_simulation(config.source_address(source))) is not None:
                service, url = _simulation(source.name, *simulation, folder)
                services.append(service)
                env[f"PENSTOCK_SOURCES_{source.name.upper()}"] = url
        needs = tuple(service.name for service in below)
        feeds = tuple(feed.name for feed in services)
        page = None
        if description.pages:
            host, port = config.page.host, self._page_port(folder)
            env["PENSTOCK_PAGE_PORT"] = str(port)
            page = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
        for tier in self._tiers():
            if tier is Tier.COLLECT:
                services += [
                    self._tier(tier, folder, env, needs + feeds, page, worker) for worker in range(self._workers())
                ]
            else:
                services.append(self._tier(tier, folder, env, needs, page))
        found = RunningPipeline(
            os.getpid(),
            description.name,
            description.status,
            config.bind().where,
            page,
            None if config.redis.url == LOCAL else config.redis.url,
            str(self.file.absolute()),
            config.channels.address,
        )
        return services, found

    def _workers(self) -> int:
        """The number of collector processes."""
        shared = any(can_be_shared(source, self.config) for source in self.description.sources)
        return self.config.collect.workers if shared else 1

    def _tiers(self) -> list[Tier]:
        description = self.description
        wanted = {
            Tier.ANALYSE: bool(description.queries or description.with_dead_letters or description.lakes),
            # Records of a removed source may wait on disk.
            Tier.COLLECT: bool(description.sources) or any(waiting(self.config)),
            Tier.LOAD: len(description.stores) > len(description.lakes),
            Tier.AUDIT: True,
            Tier.DELIVER: bool(description.pages),
        }
        return [tier for tier, needed in wanted.items() if needed]

    def _tier(
        self,
        tier: Tier,
        folder: StateFolder,
        env: dict[str, str],
        needs: tuple[str, ...],
        page: str | None,
        worker: int = 0,
    ) -> Service:
        name = f"{tier}-{worker}" if worker else str(tier)
        if worker:
            env = {**env, "PENSTOCK_COLLECT_WORKER": str(worker)}
        ready_file = folder.sub("ready") / name
        ready_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "penstock", "tier", tier, str(self.file.absolute())]
        command += ["--folder", str(self.config.folder.absolute()), "--ready", str(ready_file)]
        command += ["--profile", self.profile] if self.profile else []

        def ready() -> bool:
            # Both, because another process may answer at that address.
            return _has_ready_file(ready_file) and (tier is not Tier.DELIVER or _answers(f"{page}/healthz"))

        # Spark takes longest: it starts first and waits for the brokers. But new checkpoints have to exist before.
        early = tier is Tier.ANALYSE and self.renewal is None
        return Service(
            name,
            tuple(command),
            folder.log(name),
            ready,
            env,
            needs=() if early else needs,
            uses=needs if early else (),
            ready_within=180,
            stdin=tier is Tier.COLLECT and any(source.url.startswith("stdin:") for source in self.description.sources),
        )

    def _page_port(self, folder: StateFolder) -> int:
        port = self.config.page.port
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
        Service(
            f"feed-{source}", command, folder.log(f"feed-{source}"), partial(_answers, f"http://127.0.0.1:{port}/")
        ),
        f"ws://127.0.0.1:{port}/{name}",
    )


def _has_ready_file(file: Path) -> bool:
    """A readiness probe: the process whose pid is in the file is running."""
    try:
        return psutil.pid_exists(int(file.read_text()))
    except (FileNotFoundError, ValueError):
        return False


# Without a proxy, which the environment may set.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _answers(url: str) -> bool:
    """A readiness probe: the address answers with 200."""
    try:
        with _DIRECT.open(url, timeout=1) as response:
            return bool(response.status == 200)
    except (URLError, OSError):
        return False

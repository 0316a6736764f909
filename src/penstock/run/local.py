"""A pipeline on this machine: the services that it needs, and its tiers, all supervised."""

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
from penstock.pipeline.config import LOCAL, Config, simulated
from penstock.pipeline.description import Description
from penstock.pipeline.sources import shareable
from penstock.run.new_checkpoint import Renewal
from penstock.run.prerequisites import require
from penstock.run.run_file import Running
from penstock.run.services import Machine, Needs, Screen, provided
from penstock.run.spools import waiting
from penstock.run.status import Figures, pulse
from penstock.run.tier import Tier, bring_about
from penstock.supervise.folder import StateFolder
from penstock.supervise.limits import DiskSpace
from penstock.supervise.process import Service
from penstock.supervise.supervisor import Event, EventKind, Supervisor

USUAL_PORT = 8787


class LocalRun:
    """Everything that `penstock run` starts, in a state folder that it holds."""

    def __init__(
        self,
        file: Path,
        description: Description,
        config: Config,
        profile: str | None,
        renewal: Renewal | None = None,
    ) -> None:
        """`renewal`: which queries get a new checkpoint, before they are started."""
        self._file, self._description, self._wiring, self._profile = file, description, config, profile
        self._renewal = renewal

    def require(self) -> None:
        """Misconfigured when this machine lacks something that the run needs. Nothing is fetched, nothing started."""
        require(self._wiring, self._needs(), self._description)

    @contextmanager
    def started(self, machine: Machine, stop: threading.Event, screen: Screen) -> Iterator[tuple[Supervisor, Running]]:
        """Start all and yield once everything is ready, or `stop` is set; stop all afterwards."""
        config = self._wiring
        with (
            StateFolder(config.state).locked() as folder,
            provided(config, self._needs(), machine) as (services, found),
        ):
            config = config.at(found.kafka, found.redis)
            tiers, running = self._services(config, folder, services)
            running.write(folder.path)

            def answered() -> None:
                if found.pid == os.getpid():
                    replace(found, up=True).write(folder)
                bring_about(config.bind(), self._description, screen.say)
                if self._renewal is not None:
                    for done in self._renewal.apply(self._description, config.checkpoints, config.bind()):
                        screen.say(done)

            arriving = _Arriving(services, screen, answered)
            supervisor = Supervisor([*services, *tiers], folder, arriving.event)
            try:
                arriving.look()
                supervisor.start(stop)
                space = DiskSpace(config.state, config.local.reserve)
                with pulse(config.bind(), running.status, "run", _Usage(supervisor, space)):
                    yield supervisor, running
            finally:
                supervisor.stop()
                (folder.path / Running.FILE).unlink(missing_ok=True)

    def _needs(self) -> Needs:
        """Redis is started where a store or the channels lie in it."""
        usual, address = Needs.all(self._wiring), self._wiring.channels.address
        stored = any(store.url == "redis://" for store in self._description.stores)
        return Needs(usual.kafka, usual.redis and (stored or address == "redis://"))

    def _services(self, config: Config, folder: StateFolder, below: list[Service]) -> tuple[list[Service], Running]:
        """The tiers, and the feeds that they read; `below` are the services that are started for them."""
        description = self._description
        services: list[Service] = []
        env: dict[str, str] = {
            "PYTHONUNBUFFERED": "1",
            "PENSTOCK_CHANNELS_ADDRESS": config.channels.address,
            "PENSTOCK_REDIS_URL": config.redis.url,
        }
        feeds = []
        for source in description.sources:
            if (simulation := simulated(config.address(source))) is not None:
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
        found = Running(
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
        """Further processes that listen beside the first."""
        if not any(shareable(source, self._wiring) for source in self._description.sources):
            return []
        found = []
        for worker in range(1, self._wiring.collect.workers):
            name = f"{first.name}-{worker}"
            told = folder.sub("ready") / name
            told.unlink(missing_ok=True)
            command = tuple(str(told) if part.endswith(f"/{first.name}") else part for part in first.command)
            env = {**first.env, "PENSTOCK_COLLECT_WORKER": str(worker)}
            found.append(replace(first, name=name, command=command, log=folder.log(name), ready=_Told(told), env=env))
        return found

    def _tiers(self) -> list[Tier]:
        description = self._description
        wanted = {
            Tier.ANALYSE: bool(description.queries or description.with_dead_letters or description.lakes),
            # Of a source that is no more, records may wait on disk.
            Tier.COLLECT: bool(description.sources) or any(waiting(self._wiring)),
            Tier.LOAD: len(description.stores) > len(description.lakes),
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
        # Spark takes longest: it begins at once, and waits for the brokers by itself; but not for new checkpoints.
        early = tier is Tier.ANALYSE and self._renewal is None
        return Service(
            str(tier), command, folder.log(tier), ready, env,
            needs=() if early else needs, uses=needs if early else (), ready_within=180,
            stdin=tier is Tier.COLLECT and any(source.url.startswith("stdin:") for source in self._description.sources),
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


class _Arriving:
    """Passes events on, and calls `answered` once: when all of the services are ready, before another one starts."""

    def __init__(self, services: list[Service], screen: Screen, answered: Callable[[], None]) -> None:
        self._awaited: set[str] | None = {service.name for service in services}
        self._screen, self._answered = screen, answered

    def event(self, event: Event) -> None:
        self._screen.event(event)
        if self._awaited is not None and event.kind is EventKind.READY:
            self._awaited.discard(event.service)
            self.look()

    def look(self) -> None:
        if self._awaited is not None and not self._awaited:
            self._awaited = None
            self._answered()


class _Told:
    """Asks whether the process that a file names is alive: the word of one that died counts no more."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __call__(self) -> bool:
        try:
            return psutil.pid_exists(int(self._file.read_text()))
        except (FileNotFoundError, ValueError):
            return False


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
    """The usage of all services; their memory every few seconds: adding up the pages of a JVM takes a while."""

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
        told = {name: {**asdict(one), "memory": self._memory.get(name, 0)} for name, one in usage.items()}
        return {"usage": told, "disk": self._space.figures()}

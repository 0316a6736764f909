"""`penstock up`: the services of this machine alone, in the background, until `penstock down`."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import Folder, Profile
from penstock.cli.progress import Screen, folder_option
from penstock.core.errors import Misconfigured, PenstockError, Unavailable
from penstock.core.text import redact_address
from penstock.pipeline.config import Config
from penstock.run.prerequisites import require
from penstock.run.services import ROLE, Machine, Needs, Services, prepared, serving, starting
from penstock.supervise.events import Event
from penstock.supervise.folder import StateFolder
from penstock.supervise.limits import raise_files, too_few
from penstock.supervise.process import rotate, tail
from penstock.supervise.signals import stop_on_signals

_SIZES = (1, 3, 5)
_TICK = 0.1


def up(
    brokers: Annotated[
        int | None,
        typer.Option(
            metavar="1|3|5",
            help="How many brokers Kafka has; the folder keeps that number.",
            show_default="as many as there were, or one",
        ),
    ] = None,
    folder: Folder = Path(),
    profile: Profile = None,
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay; Ctrl-C stops them. For containers.")] = False,
    tell: Annotated[int | None, typer.Option(hidden=True, help="The descriptor of a pipe to whoever waits.")] = None,
) -> None:
    """Start Kafka and Redis alone, in the background: those of them that the settings do not place elsewhere.

    Pipelines that are run in the same folder, and the other commands, use them. `penstock down` stops them, and their
    data stays for the next time.
    """
    if not folder.is_dir():
        raise Misconfigured("--folder", f"there is no folder {folder}", "make it first")
    config = _with(Config.read(folder, profile), brokers)
    needs = Needs.all(config)
    if tell is None and (needs.kafka or needs.redis) and (found := Services.find(config)) is not None:
        typer.echo(_already(config, found, brokers))
        return
    if tell is None and brokers is not None and not needs.kafka:
        elsewhere = (
            f"{brokers} asked for, and the settings place the channels at {redact_address(config.channels.address)}"
        )
        raise Misconfigured("--brokers", elsewhere, "leave it out: no Kafka is started here")
    if not (needs.kafka or needs.redis):
        channels, redis = redact_address(config.channels.address), redact_address(config.redis.url)
        typer.echo(f"nothing has to be started: the settings place the channels at {channels} and Redis at {redis}")
        return
    # Until something was started there is nothing to stop in order: a signal ends this at once.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with Screen(dated=tell is not None) as screen, _telling(tell) as waiting:
        if few := too_few(raise_files()):
            screen.say(few, "bold yellow")
        if tell is None:
            require(config, needs)
        machine = prepared(screen) if needs.kafka else None
        if foreground:
            _serve(config, needs, machine, screen, waiting)
        else:
            _detach(config, profile, screen)


def _with(config: Config, brokers: int | None) -> Config:
    if brokers is None:
        return config
    if brokers not in _SIZES:
        problem = f"{brokers} asked for; 2F + 1 brokers go on when F of them are lost"
        raise Misconfigured("--brokers", problem, "use 1, 3 or 5")
    return replace(config, local=config.local.model_copy(update={"brokers": brokers}))


def _already(config: Config, found: Services, brokers: int | None) -> str:
    if found.pid == (run := StateFolder(config.state).holder()):
        return f"up already: {found.where}; the pipeline that runs here (process {run}) has them, and they end with it"
    if not found.up:
        raise starting(config, found)
    have = len(found.kafka.split(",")) if found.kafka else 0
    if brokers not in (None, have):
        raise Misconfigured("--brokers", f"{brokers} asked for, and {have} of them run here already")
    return f"up already: {found.where}"


# --- the one that stays -----------------------------------------------------------------------------------------------


def _serve(config: Config, needs: Needs, machine: Machine | None, screen: Screen, waiting: Connection | None) -> None:
    def told(event: Event) -> None:
        screen.event(event)
        _tell(waiting, event)

    with stop_on_signals() as stop:
        with serving(config, needs, machine, stop, told) as (supervisor, found):
            if not stop.is_set():
                screen.say(f"up: {found.where}", "bold green")
                _tell(waiting, found)
                supervisor.run_until(stop)
            screen.say("stopping")
        screen.say("stopped; the next start goes on from here")


@contextmanager
def _telling(descriptor: int | None) -> Iterator[Connection | None]:
    """The pipe to the process that waits until all are ready; it is told what is in the way, too."""
    if descriptor is None:
        yield None
        return
    with Connection(descriptor, readable=False) as waiting:
        try:
            yield waiting
        except PenstockError as error:
            _tell(waiting, error)
            raise


def _tell(waiting: Connection | None, what: Event | Services | PenstockError) -> None:
    # Nobody waits any more once all are ready.
    with suppress(OSError):
        if waiting is not None:
            waiting.send(what)


# --- the one that goes ------------------------------------------------------------------------------------------------


def _detach(config: Config, profile: str | None, screen: Screen) -> None:
    """Start the process that stays, wait until it says that all are ready, and leave it alone."""
    # Whoever cannot hold the folder learns it here, before anything is started.
    with StateFolder(config.state, ROLE).held() as folder:
        log = folder.log(ROLE)
        rotate(log)
    with stop_on_signals() as stop:
        process, heard = _started(config, profile, log)
        try:
            found = _ready(heard, stop, screen)
        except EOFError:
            lines = "\n".join(tail(log, 20))
            why = f"it ended with code {process.wait()} ({log}); the last lines of its log:\n{lines}"
            raise Unavailable("the process that keeps the services", why) from None
        except PenstockError:
            process.wait()
            raise
        except BaseException:
            _end(process)
            raise
        if found is None:
            screen.say("stopping")
            _end(process)
            screen.say("stopped; nothing is up")
            raise typer.Exit(130)
    there = folder_option(config.folder)
    screen.say(f"up: {found.where}", "bold green")
    screen.say(f"penstock topics --list{there} shows what is there; penstock down{there} stops them")


def _started(config: Config, profile: str | None, log: Path) -> tuple["subprocess.Popen[bytes]", Connection]:
    """A process in a session of its own: neither the end of this one nor that of the terminal concerns it."""
    heard, said = Pipe(duplex=False)
    command = [sys.executable, "-m", "penstock", "up", "--foreground", "--tell", str(said.fileno())]
    command += ["--folder", str(config.folder.absolute())]
    command += ["--profile", profile] if profile else []
    command += ["--brokers", str(config.local.brokers)] if config.local.brokers else []
    with said, log.open("ab") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[said.fileno()],
        )
    return process, heard


def _ready(heard: Connection, stop: threading.Event, screen: Screen) -> Services | None:
    """Show what it tells until all are ready; None when `stop` is set before that, EOFError when it falls silent."""
    with heard:
        while not stop.is_set():
            if not heard.poll(_TICK):
                continue
            match heard.recv():
                case Services() as found:
                    return found
                case Event() as event:
                    screen.event(event)
                case PenstockError() as error:
                    raise error
    return None


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Have it stop what it has started, in order; at once when a person insists."""
    process.terminate()
    try:
        process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()

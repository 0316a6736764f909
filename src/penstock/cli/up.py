"""`penstock up` and `penstock down`: Kafka and Redis in the background."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated

import psutil
import typer

from penstock.cli.options import Folder, Profile
from penstock.cli.progress import Screen, folder_option
from penstock.core.errors import Misconfigured, PenstockError, Unavailable
from penstock.core.text import redact_address
from penstock.pipeline.config import Config
from penstock.run.prerequisites import require
from penstock.run.services import ROLE, Machine, Needs, Services, prepare_machine, run_services, still_starting
from penstock.supervise.folder import NAME, StateFolder
from penstock.supervise.process import file_limit_warning, raise_file_limit, rotate, stop_on_signals, tail
from penstock.supervise.supervisor import Event

_BROKERS = (1, 3, 5)
_POLL = 0.1
STOP_TIMEOUT = 60.0


def up(
    brokers: Annotated[
        int | None,
        typer.Option(
            metavar="1|3|5",
            help="The number of Kafka brokers. It stays the same for the folder.",
            show_default="as before, or 1",
        ),
    ] = None,
    folder: Folder = Path(),
    profile: Profile = None,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay in the foreground until Ctrl-C, for containers.")
    ] = False,
    report: Annotated[int | None, typer.Option(hidden=True, help="The descriptor of a pipe for events.")] = None,
) -> None:
    """Start Kafka and Redis in the background, except those that the settings place elsewhere.

    Pipelines and commands in the same folder use them. `penstock down` stops them. Their data is kept.
    """
    if not folder.is_dir():
        raise Misconfigured("--folder", f"folder {folder} not found", "create it first")
    config = _with_brokers(Config.read(folder, profile), brokers)
    needs = Needs.all(config)
    if report is None and (needs.kafka or needs.redis) and (found := Services.find(config)) is not None:
        typer.echo(_already_up(config, found, brokers))
        return
    channels, redis = redact_address(config.channels.address), redact_address(config.redis.url)
    if report is None and brokers is not None and not needs.kafka:
        raise Misconfigured("--brokers", f"the settings place the channels at {channels}", "leave it out")
    if not (needs.kafka or needs.redis):
        typer.echo(f"nothing to start: the settings place the channels at {channels} and Redis at {redis}")
        return
    # Nothing is started yet: a signal ends the process at once.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with Screen(dated=report is not None) as screen, _pipe_to_parent(report) as parent:
        if few := file_limit_warning(raise_file_limit()):
            screen.say(few, "bold yellow")
        if report is None:
            require(config, needs)
        machine = prepare_machine(screen) if needs.kafka else None
        if foreground:
            _serve(config, needs, machine, screen, parent)
        else:
            _detach(config, profile, screen)


def _with_brokers(config: Config, brokers: int | None) -> Config:
    if brokers is None:
        return config
    if brokers not in _BROKERS:
        raise Misconfigured("--brokers", f"{brokers} brokers are not possible", "use 1, 3 or 5")
    return replace(config, local=config.local.model_copy(update={"brokers": brokers}))


def _already_up(config: Config, found: Services, brokers: int | None) -> str:
    if found.pid == (run := StateFolder(config.state).owner()):
        return (
            f"up already: {found.where}; they belong to the pipeline that runs here (process {run}), and stop with it"
        )
    if not found.up:
        raise still_starting(config, found)
    count = len(found.kafka.split(",")) if found.kafka else 0
    if brokers not in (None, count):
        raise Misconfigured("--brokers", f"{count} brokers run here already, not {brokers}", "penstock down first")
    return f"up already: {found.where}"


# --- the process that keeps the services ------------------------------------------------------------------------------


def _serve(config: Config, needs: Needs, machine: Machine | None, screen: Screen, parent: Connection | None) -> None:
    def on_event(event: Event) -> None:
        screen.event(event)
        _send(parent, event)

    with stop_on_signals() as stop, screen.stopping():
        with run_services(config, needs, machine, stop, on_event) as (supervisor, found):
            if not stop.is_set():
                screen.say(f"up: {found.where}", "bold green")
                _send(parent, found)
                supervisor.run_until(stop)
            screen.say("stopping")
        screen.say("stopped; the next start continues from here")


@contextmanager
def _pipe_to_parent(descriptor: int | None) -> Iterator[Connection | None]:
    """The pipe to the process that waits for the services. It also gets errors."""
    if descriptor is None:
        yield None
        return
    with Connection(descriptor, readable=False) as parent:
        try:
            yield parent
        except PenstockError as error:
            _send(parent, error)
            raise


def _send(parent: Connection | None, message: Event | Services | PenstockError) -> None:
    # The parent ends once the services are up.
    with suppress(OSError):
        if parent is not None:
            parent.send(message)


# --- the process that starts it and waits -----------------------------------------------------------------------------


def _detach(config: Config, profile: str | None, screen: Screen) -> None:
    """Start the process that keeps the services, and wait until they are up."""
    # Fails here if another process uses the folder.
    with StateFolder(config.state, ROLE).locked() as folder:
        log = folder.log(ROLE)
        rotate(log)
    with stop_on_signals() as stop:
        process, events = _started(config, profile, log)
        try:
            found = _wait_until_up(events, stop, screen)
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
            screen.say("stopped; nothing is running")
            raise typer.Exit(130)
    option = folder_option(config.folder)
    screen.say(f"up: {found.where}", "bold green")
    screen.say(f"to list topics: penstock topics --list{option}; to stop: penstock down{option}")


def _started(config: Config, profile: str | None, log: Path) -> tuple["subprocess.Popen[bytes]", Connection]:
    """A process in a session of its own, which survives this process and its terminal."""
    events, sender = Pipe(duplex=False)
    command = [sys.executable, "-m", "penstock", "up", "--foreground", "--report", str(sender.fileno())]
    command += ["--folder", str(config.folder.absolute())]
    command += ["--profile", profile] if profile else []
    command += ["--brokers", str(config.local.brokers)] if config.local.brokers else []
    with sender, log.open("ab") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[sender.fileno()],
        )
    return process, events


def _wait_until_up(events: Connection, stop: threading.Event, screen: Screen) -> Services | None:
    """Show events until the services are up; None when `stop` is set first, EOFError when the process has ended."""
    with events:
        while not stop.is_set():
            if not events.poll(_POLL):
                continue
            match events.recv():
                case Services() as found:
                    return found
                case Event() as event:
                    screen.event(event)
                case PenstockError() as error:
                    raise error
    return None


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Stop the process; at once on Ctrl-C."""
    process.terminate()
    try:
        process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()


# --- down -------------------------------------------------------------------------------------------------------------


def down(
    folder: Folder = Path(),
    force: Annotated[bool, typer.Option("--force", help="Also stop a pipeline that runs in the folder.")] = False,
) -> None:
    """Stop Kafka and Redis of this folder, and wait until they have ended. Their data is kept for the next start."""
    state = folder / NAME
    run, services = StateFolder(state), StateFolder(state, ROLE)
    if (pipeline := run.owner()) is not None:
        if not force:
            raise Misconfigured(
                str(folder.absolute()),
                f"a pipeline runs here (process {pipeline})",
                f"stop it first (Ctrl-C there, or kill {pipeline}), or stop both: penstock down --force",
            )
        _stop(run, pipeline)
        typer.echo(f"the pipeline is stopped (process {pipeline})")
    if (pid := services.owner()) is not None:
        found = Services.at(state)
        _stop(services, pid)
        typer.echo(f"stopped: {found.where if found else f'process {pid}'}; the data is kept in {services.path}")
        return
    if services.path.is_dir():
        # Ends the processes that a killed supervisor has left.
        with services.locked():
            pass
    if pipeline is None:
        typer.echo("nothing is running here")


def _stop(folder: StateFolder, pid: int) -> None:
    """Send SIGTERM, and wait until the process has released the folder and ended."""
    try:
        process = psutil.Process(pid)
        os.kill(pid, signal.SIGTERM)
    except (ProcessLookupError, psutil.NoSuchProcess):
        return
    except PermissionError as error:
        raise Misconfigured(
            str(folder.path), f"process {pid} belongs to another user", "stop it as that user"
        ) from error
    until = time.monotonic() + STOP_TIMEOUT
    while folder.owner() == pid or _is_running(process):
        if time.monotonic() > until:
            why = f"it did not stop within {STOP_TIMEOUT:g} s; see {folder.path / 'logs'}"
            raise Unavailable(f"process {pid}", why)
        time.sleep(_POLL)


def _is_running(process: psutil.Process) -> bool:
    try:
        # A zombie stays in the process table until its parent waits for it.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

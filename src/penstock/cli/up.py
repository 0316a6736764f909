"""`penstock up` and `penstock down`: Kafka and Redis in the background."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import psutil
import typer

from penstock.cli.options import Folder, Profile
from penstock.cli.progress import Screen, folder_option
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.text import redact_address
from penstock.pipeline.config import Config
from penstock.run.services import ROLE, Needs, Services, prepare_machine, require, run_services, still_starting
from penstock.supervise.folder import NAME, StateFolder
from penstock.supervise.process import rotate, stop_on_signals, tail

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
) -> None:
    """Start Kafka and Redis in the background, except those that the settings place elsewhere.

    Pipelines and commands in the same folder use them. `penstock down` stops them. Their data is kept.
    """
    if not folder.is_dir():
        raise Misconfigured("--folder", f"folder {folder} not found", "create it first")
    config = Config.read(folder, profile)
    if brokers is not None:
        if brokers not in _BROKERS:
            raise Misconfigured("--brokers", f"{brokers} brokers are not possible", "use 1, 3 or 5")
        config = replace(config, local=config.local.model_copy(update={"brokers": brokers}))
    needs = Needs.all(config)
    if (needs.kafka or needs.redis) and (found := Services.at(config.state)) is not None:
        typer.echo(_already_up(config, found, brokers))
        return
    channels, redis = redact_address(config.channels.address), redact_address(config.redis.url)
    if brokers is not None and not needs.kafka:
        raise Misconfigured("--brokers", f"the settings place the channels at {channels}", "leave it out")
    if not (needs.kafka or needs.redis):
        typer.echo(f"nothing to start: the settings place the channels at {channels} and Redis at {redis}")
        return
    with Screen() as screen:
        screen.raise_file_limit()
        require(config, needs)
        if needs.kafka:
            prepare_machine(screen)
        if foreground:
            _serve(config, needs, screen)
        else:
            _detach(config, profile, brokers, screen)


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


def _serve(config: Config, needs: Needs, screen: Screen) -> None:
    """Keep the services running until a signal."""
    with stop_on_signals() as stop, screen.stopping():
        with run_services(config, needs, stop, screen.event) as (supervisor, found):
            if not stop.is_set():
                screen.say(f"up: {found.where}", "bold green")
                supervisor.run_until(stop)
            screen.say("stopping")
        screen.say("stopped; the next start continues from here")


def _detach(config: Config, profile: str | None, brokers: int | None, screen: Screen) -> None:
    """Start the same command as a background process that keeps the services, and wait until they are up."""
    # Fails here if another process uses the folder.
    with StateFolder(config.state, ROLE).locked() as folder:
        log = folder.log(ROLE)
        rotate(log)
    command = [sys.executable, "-m", "penstock", "up", "--foreground", "--folder", str(config.folder.absolute())]
    command += ["--profile", profile] if profile else []
    command += ["--brokers", str(brokers)] if brokers else []
    screen.say(f"starting the services; their log is {log}")
    with stop_on_signals() as stop:
        with log.open("ab") as out:
            # In a session of its own, it survives this process and its terminal.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            while not ((found := Services.at(config.state)) and found.up and found.pid == process.pid):
                if process.poll() is not None:
                    lines = "\n".join(tail(log, 20))
                    why = f"it ended with code {process.returncode}; the end of {log}:\n{lines}"
                    raise Unavailable("the process that keeps the services", why)
                if stop.wait(_POLL):
                    screen.say("stopping")
                    _end(process)
                    screen.say("stopped; nothing is running")
                    raise typer.Exit(130)
        except KeyboardInterrupt:
            _end(process)
            raise
    option = folder_option(config.folder)
    screen.say(f"up: {found.where}", "bold green")
    screen.say(f"to list topics: penstock topics --list{option}; to stop: penstock down{option}")


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
    while folder.owner() == pid or not _ended(process):
        if time.monotonic() > until:
            why = f"it did not stop within {STOP_TIMEOUT:g} s; see {folder.path / 'logs'}"
            raise Unavailable(f"process {pid}", why)
        time.sleep(_POLL)


def _ended(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        # A zombie stays in the process table until its parent waits for it.
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True

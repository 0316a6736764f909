"""`penstock down`: stop what `penstock up` has started."""

import os
import signal
import time
from pathlib import Path
from typing import Annotated

import psutil
import typer

from penstock.cli.options import Folder
from penstock.core.errors import Misconfigured, Unavailable
from penstock.run.services import ROLE, Services
from penstock.supervise.folder import NAME, StateFolder

PATIENCE = 60.0
_TICK = 0.05


def down(
    folder: Folder = Path(),
    force: Annotated[bool, typer.Option("--force", help="Stop a pipeline that runs on them, too.")] = False,
) -> None:
    """Stop Kafka and Redis in this folder, and wait until they are gone. Their data stays: `penstock up` goes on."""
    state = folder / NAME
    run, services = StateFolder(state), StateFolder(state, ROLE)
    if (pipeline := run.owner()) is not None:
        if not force:
            raise Misconfigured(
                str(folder.absolute()),
                f"a pipeline runs here, as the process {pipeline}",
                f"stop it first (Ctrl-C there, or kill {pipeline}); or all of it: penstock down --force",
            )
        _stop(run, pipeline)
        typer.echo(f"the pipeline is stopped (process {pipeline})")
    if (pid := services.owner()) is not None:
        found = Services.at(state)
        _stop(services, pid)
        typer.echo(f"stopped: {found.where if found else f'the process {pid}'}; the data stays in {services.path}")
        return
    if services.path.is_dir():
        # What a supervisor that was killed has left is ended by whoever holds the folder next.
        with services.locked():
            pass
    if pipeline is None:
        typer.echo("nothing is up here")


def _stop(folder: StateFolder, pid: int) -> None:
    """Ask the process to stop, and wait until it has let go of the folder, and so all that it kept is gone, and it."""
    try:
        process = psutil.Process(pid)
        os.kill(pid, signal.SIGTERM)
    except (ProcessLookupError, psutil.NoSuchProcess):
        return
    except PermissionError as error:
        raise Misconfigured(
            str(folder.path), f"the process {pid} belongs to somebody else", "stop it as that user"
        ) from error
    until = time.monotonic() + PATIENCE
    while folder.owner() == pid or _lives(process):
        if time.monotonic() > until:
            raise Unavailable(
                f"the process {pid}", f"it did not stop within {PATIENCE:g} s; see {folder.path / 'logs'}"
            )
        time.sleep(_TICK)


def _lives(process: psutil.Process) -> bool:
    try:
        # A process that has ended stays in the table until its parent has asked.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

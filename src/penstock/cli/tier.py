"""`penstock tier`: one tier of a pipeline in this process, for several machines."""

import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import File, Profile
from penstock.core.text import RedactingFormatter
from penstock.pipeline.config import Config
from penstock.pipeline.load import load
from penstock.run.tier import Tier, run
from penstock.supervise.process import stop_on_signals


def tier(
    which: Annotated[Tier, typer.Argument(help="The tier to run.")],
    file: File,
    profile: Profile = None,
    folder: Annotated[
        Path | None, typer.Option(help="The folder of its state.", show_default="the folder of the file")
    ] = None,
    ready: Annotated[
        Path | None, typer.Option(help="A file to which the process id is written once the tier is ready.")
    ] = None,
) -> None:
    """Run one tier of a pipeline in a process of its own. The services have the addresses in penstock.toml.

    `penstock run` starts all tiers on one machine. With several machines, start each tier on its own machine.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    logging.getLogger("py4j").setLevel(logging.WARNING)

    def write_ready() -> None:
        if ready is not None:
            ready.parent.mkdir(parents=True, exist_ok=True)
            # Renamed into place: a reader never sees a part of it.
            new = ready.with_name(f"{ready.name}.new")
            new.write_text(str(os.getpid()))
            new.replace(ready)

    if ready is not None:
        ready.unlink(missing_ok=True)
    description, config = load(file), Config.read(folder or file.parent, profile)
    with stop_on_signals() as stop, description.locating():
        run(which, description, config, stop, write_ready)

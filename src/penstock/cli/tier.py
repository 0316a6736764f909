"""`penstock tier`: one tier of a pipeline in this process, for machines of its own."""

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
from penstock.supervise.signals import stop_on_signals


def tier(
    which: Annotated[Tier, typer.Argument(help="Which tier to run.")],
    file: File,
    profile: Profile = None,
    folder: Annotated[Path | None, typer.Option(help="Where its state lies.", show_default="beside the file")] = None,
    ready: Annotated[Path | None, typer.Option(help="A file that gets the pid once the tier does its work.")] = None,
) -> None:
    """Run one tier of a pipeline, as a process of its own: the services are found by the addresses in penstock.toml.

    `penstock run` starts all of them on one machine; on several machines, start each where it belongs.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    logging.getLogger("py4j").setLevel(logging.WARNING)

    def tell() -> None:
        if ready is not None:
            ready.parent.mkdir(parents=True, exist_ok=True)
            # Whole from the beginning: whoever waits for the file reads it at once.
            new = ready.with_name(f"{ready.name}.new")
            new.write_text(str(os.getpid()))
            new.replace(ready)

    if ready is not None:
        ready.unlink(missing_ok=True)
    description, config = load(file), Config.read(folder or file.parent, profile)
    with stop_on_signals() as stop, description.locating():
        run(which, description, config, stop, tell)

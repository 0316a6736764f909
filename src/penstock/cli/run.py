"""`penstock run` and `penstock demo`: a pipeline on this machine."""

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import File, Profile, parse_time
from penstock.cli.progress import Screen
from penstock.core.errors import Misconfigured
from penstock.core.text import RedactingFormatter
from penstock.pipeline.config import Config
from penstock.pipeline.load import load
from penstock.plan.checks import check, unconnected
from penstock.run.local import LocalRun
from penstock.run.new_checkpoint import OPTION, Begin, Renewal
from penstock.run.services import prepare_machine
from penstock.run.tier import Tier
from penstock.run.tier import run as run_tier
from penstock.supervise.folder import DiskSpace, write_note
from penstock.supervise.process import stop_on_signals


def run(
    file: File,
    profile: Profile = None,
    new_checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="QUERY",
            help="Give this query a new checkpoint, and keep the old one aside. May be repeated.",
            show_default=False,
        ),
    ] = None,
    begin: Annotated[
        str | None,
        typer.Option(
            OPTION,
            metavar="beginning|end|TIME|CHANNEL:PARTITION=OFFSET,…",
            help="Where a new checkpoint starts to read. A time is 10m (ago), or 2026-11-15T10:00.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run a pipeline on this machine, with Kafka, Redis, Spark and its web page. Stop it with Ctrl-C.

    Its state is in the folder .penstock beside the file. The next run continues where this one stopped.
    """
    run_supervised(file, file.parent, profile, _renewal(new_checkpoint or (), begin))


def demo(profile: Profile = None) -> None:
    """Run the RSVP analyzer: a simulated feed of event replies, Kafka, Spark, Redis, a lake, and a live page.

    Its state is in the folder .penstock of the current folder. Its code is a single file that you can copy.
    """
    import penstock.demo

    run_supervised(Path(penstock.demo.__file__).with_name("pipeline.py"), Path(), profile)


def _renewal(names: Sequence[str], begin: str | None) -> Renewal | None:
    if not names and begin is None:
        return None
    if not names:
        raise Misconfigured(OPTION, "it needs a query", "add --new-checkpoint QUERY")
    if begin is None:
        raise Misconfigured("--new-checkpoint", "it needs a start", f"add {OPTION} beginning, or another start")
    return Renewal(tuple(dict.fromkeys(names)), beginning(begin))


def beginning(text: str) -> Begin:
    """`beginning`, `end`, offsets such as `rsvps:0=120,rsvps:1=80`, or a time."""
    if text in ("beginning", "end"):
        return Begin(end=text == "end")
    if "=" not in text:
        return Begin(timestamp=parse_time(OPTION, text))
    offsets: dict[str, dict[int, int]] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([^:=\s]+):(\d+)=(\d+)\s*", part)
        if match is None:
            raise Misconfigured(OPTION, f'"{part}" is not an offset', "write CHANNEL:PARTITION=OFFSET,…")
        offsets.setdefault(match[1], {})[int(match[2])] = int(match[3])
    return Begin(offsets=offsets)


def run_supervised(file: Path, folder: Path, profile: str | None, renewal: Renewal | None = None) -> None:
    """Run the pipeline of a file with its state in a folder, and show the progress."""
    with Screen() as screen:
        screen.raise_file_limit()
        screen.say(f"reading {file.name}")
        description = load(file)
        config = Config.read(folder, profile)
        if full := DiskSpace(config.folder, config.local.reserve).shortage():
            screen.say(full, "bold yellow")
        with description.locating():
            check(description, config, os.environ)
        for finding in unconnected(description):
            screen.say(f"{finding.level}: {finding}", "yellow")
        if renewal is not None:
            renewal.require(description)
        local = LocalRun(file, description, config, profile, renewal)
        local.require()
        prepare_machine(screen)
        with stop_on_signals() as stop, screen.stopping():
            with local.started(stop, screen) as (supervisor, running):
                if not stop.is_set():
                    screen.running(description.name, running, folder)
                    supervisor.run_until(stop)
                screen.say("stopping; a second Ctrl-C stops at once, and nothing is lost either way")
            screen.say("stopped; the next run continues from here")


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
            write_note(ready, os.getpid())

    if ready is not None:
        ready.unlink(missing_ok=True)
    description, config = load(file), Config.read(folder or file.parent, profile)
    with stop_on_signals() as stop, description.locating():
        run_tier(which, description, config, stop, write_ready)

"""`penstock run`: a pipeline on this machine."""

import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import File, Profile, parse_time
from penstock.cli.progress import Screen
from penstock.core.errors import Misconfigured
from penstock.pipeline.config import Config
from penstock.pipeline.load import load
from penstock.plan.checks import check, unconnected
from penstock.run.local import LocalRun
from penstock.run.new_checkpoint import OPTION, Begin, Renewal
from penstock.run.services import prepared
from penstock.supervise.limits import Space, raise_files, too_few
from penstock.supervise.signals import stop_on_signals

NOTHING_LOST = (
    "nothing is lost: what was acknowledged is in the channels and spools, and the next run goes on from there"
)


def run(
    file: File,
    profile: Profile = None,
    new_checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="QUERY",
            help="This query begins anew, and its checkpoint is set aside; may be given several times.",
            show_default=False,
        ),
    ] = None,
    begin: Annotated[
        str | None,
        typer.Option(
            OPTION,
            metavar="beginning|end|MOMENT|CHANNEL:PARTITION=OFFSET,…",
            help="Where a new checkpoint begins; a moment is 10m (ago), or 2026-11-15T10:00.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run a pipeline on this machine, with all that it needs: Kafka, Redis, Spark, and its page. Ctrl-C stops it.

    State lies in .penstock beside the file, and the next run goes on where this one stopped.
    """
    supervised(file, file.parent, profile, _renewal(new_checkpoint or (), begin))


def _renewal(names: Sequence[str], begin: str | None) -> Renewal | None:
    if not names and begin is None:
        return None
    if not names:
        raise Misconfigured(OPTION, "it is not said for which query", "give --new-checkpoint QUERY as well")
    if begin is None:
        problem = "it is not said where the new one begins"
        raise Misconfigured("--new-checkpoint", problem, f"give {OPTION} beginning, or another place")
    return Renewal(tuple(dict.fromkeys(names)), beginning(begin))


def beginning(text: str) -> Begin:
    """`beginning`, `end`, offsets such as `rsvps:0=120,rsvps:1=80`, or a moment."""
    if text in ("beginning", "end"):
        return Begin(end=text == "end")
    if "=" not in text:
        return Begin(timestamp=parse_time(OPTION, text))
    offsets: dict[str, dict[int, int]] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([^:=\s]+):(\d+)=(\d+)\s*", part)
        if match is None:
            raise Misconfigured(OPTION, f'"{part}" is no offset', "write CHANNEL:PARTITION=OFFSET,…")
        offsets.setdefault(match[1], {})[int(match[2])] = int(match[3])
    return Begin(offsets=offsets)


def supervised(file: Path, folder: Path, profile: str | None, renewal: Renewal | None = None) -> None:
    """Run a file's pipeline with its state in a folder, and show how it goes."""
    # Until the run itself begins there is nothing to stop in order: a signal ends this at once.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with Screen() as screen:
        if few := too_few(raise_files()):
            screen.say(few, "bold yellow")
        screen.say(f"reading {file.name}")
        description = load(file)
        config = Config.read(folder, profile)
        if full := Space(config.folder, config.local.reserve).lacking():
            screen.say(full, "bold yellow")
        with description.locating():
            check(description, config, os.environ)
        for finding in unconnected(description):
            screen.say(f"{finding.level}: {finding}", "yellow")
        if renewal is not None:
            renewal.require(description)
        local = LocalRun(file, description, config, profile, renewal)
        local.require()
        machine = prepared(screen)
        with stop_on_signals() as stop, _told_if_cut_short(screen):
            with local.started(machine, stop, screen) as (supervisor, running):
                if not stop.is_set():
                    screen.running(description.name, running, folder)
                    supervisor.run_until(stop)
                screen.say("stopping; Ctrl-C again stops at once, and nothing is lost either way")
            screen.say("stopped; the next run goes on from here")


@contextmanager
def _told_if_cut_short(screen: Screen) -> Iterator[None]:
    """A second Ctrl-C kills what has not stopped yet: say what that means for the records."""
    try:
        yield
    except KeyboardInterrupt:
        screen.say(f"killed before all had stopped; {NOTHING_LOST}", "yellow")
        raise

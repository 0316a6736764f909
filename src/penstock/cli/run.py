"""`penstock run`: a pipeline on this machine."""

import signal
import sys
from pathlib import Path

from penstock.cli.options import File, Profile
from penstock.cli.progress import Screen
from penstock.pipeline.checks import check
from penstock.pipeline.load import load
from penstock.pipeline.run import LocalRun
from penstock.pipeline.services import prepared
from penstock.pipeline.wiring import Wiring
from penstock.supervise.signals import stop_on_signals


def run(file: File, profile: Profile = None) -> None:
    """Run a pipeline on this machine, with all that it needs: Kafka, Redis, Spark, and its page. Ctrl-C stops it.

    State lies in .penstock beside the file, and the next run goes on where this one stopped.
    """
    supervised(file, file.parent, profile)


def supervised(file: Path, folder: Path, profile: str | None) -> None:
    """Run a file's pipeline with its state in a folder, and show how it goes."""
    # Until the run itself begins there is nothing to stop in order: a signal ends this at once.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with Screen() as screen:
        screen.say(f"reading {file.name}")
        description = load(file)
        wiring = Wiring.read(folder, profile)
        check(description, wiring)
        local = LocalRun(file, description, wiring, profile)
        machine = prepared(screen)
        with stop_on_signals() as stop:
            with local.started(machine, stop, screen) as (supervisor, running):
                if not stop.is_set():
                    screen.running(description.name, running, folder)
                    supervisor.run_until(stop)
                screen.say("stopping")
            screen.say("stopped; the next run goes on from here")

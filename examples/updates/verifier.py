"""Verifies that no update is missing: per sender, its numbers have no gap. Reports every few seconds.

It does not know what carries them. The address does: `CHANNELS=tcp://127.0.0.1:7700`, `CHANNELS=kafka://localhost:9092`.
Exits with 0 when all is whole, with 1 when a number is missing, with 2 when nothing can be said.
"""

import argparse
import json
import os
import sys

import typer

from penstock import Origin, Topic, bind
from penstock.audit.verify import EXIT_CODES, Integrity, IntegrityReport, Verifier
from penstock.cli.standard import console
from penstock.cli.verify import show
from penstock.core.clock import Clock, SystemClock, duration
from penstock.core.contracts import Channels, Entry
from penstock.core.errors import PenstockError, Refused
from penstock.supervise.signals import stop_on_signals


def verify(channels: Channels, channel: str, lapse: float, until: int | None, as_json: bool, clock: Clock) -> Integrity:
    channels.ensure([Topic(channel)])
    verifier, due, came = Verifier(clock), clock.elapsed() + lapse, 0
    with stop_on_signals() as stop, channels.reader({channel: {}}) as reader:
        while not stop.is_set() and (until is None or came < until):
            for entry in reader.read(10_000, 0.2):
                came += 1
                take(verifier, entry)
            if lapse and clock.elapsed() >= due:
                tell(verifier.report(), as_json)
                due = clock.elapsed() + lapse
        end = verifier.end()
        tell(end, as_json)
        return end.verdict


def take(verifier: Verifier, entry: Entry) -> None:
    try:
        origin = Origin.of(entry.headers)
        if origin is None:
            raise Refused("an update", "its headers tell no sender and no number")
        verifier.take(origin, entry.appended)
    except Refused as error:
        verifier.refuse(f"offset {entry.offset}", error.reason)


def tell(report: IntegrityReport, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report.to_json()))
    else:
        show(report, console())


def main() -> None:
    options = argparse.ArgumentParser(description="Verify the updates of a channel.")
    options.add_argument("--channels", default=os.environ.get("CHANNELS", "tcp://127.0.0.1:7700"), metavar="ADDRESS")
    options.add_argument("--channel", default="updates")
    options.add_argument(
        "--every", type=duration, default="5s", help="how often to report what came since; 0s: at the end"
    )
    options.add_argument("--until", type=int, metavar="RECORDS", help="stop after so many; otherwise by Ctrl-C")
    options.add_argument("--json", action="store_true", help="reports as JSON lines")
    given = options.parse_args()
    try:
        channels, lapse = bind(given.channels), given.every.total_seconds()
        sys.exit(EXIT_CODES[verify(channels, given.channel, lapse, given.until, given.json, SystemClock())])
    except PenstockError as error:
        options.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()

"""Checks that no update is missing: the numbers of each sender have no gap. Reports every few seconds.

The address selects the transport: `CHANNELS=tcp://127.0.0.1:7700` or `CHANNELS=kafka://localhost:9092`.
Exits with 0 if all numbers are there, with 1 if one is missing, with 2 if the result is unknown.
"""

import argparse
import os
import sys

from penstock import Origin, Topic, bind
from penstock.audit.verify import EXIT_CODES, Integrity, Verifier
from penstock.cli.standard import print_result
from penstock.cli.verify import report_parts
from penstock.core.clock import Clock, SystemClock, duration
from penstock.core.contracts import Channels, Entry
from penstock.core.errors import PenstockError, Refused
from penstock.supervise.process import stop_on_signals


def verify(
    channels: Channels, channel: str, seconds: float, until: int | None, as_json: bool, clock: Clock
) -> Integrity:
    channels.ensure([Topic(channel)])
    verifier, due, count = Verifier(clock), clock.elapsed() + seconds, 0
    with stop_on_signals() as stop, channels.reader({channel: {}}) as reader:
        while not stop.is_set() and (until is None or count < until):
            for entry in reader.read(10_000, 0.2):
                count += 1
                take(verifier, entry)
            if seconds and clock.elapsed() >= due:
                report = verifier.report()
                print_result(as_json, report.to_json(), report_parts(report))
                due = clock.elapsed() + seconds
        end = verifier.end()
        print_result(as_json, end.to_json(), report_parts(end))
        return end.verdict


def take(verifier: Verifier, entry: Entry) -> None:
    try:
        origin = Origin.of(entry.headers)
        if origin is None:
            raise Refused("an update", "its headers have no origin")
        verifier.take(origin, entry.appended)
    except Refused as error:
        verifier.refuse(f"offset {entry.offset}", error.reason)


def main() -> None:
    parser = argparse.ArgumentParser(description="Verify the updates of a channel.")
    parser.add_argument("--channels", default=os.environ.get("CHANNELS", "tcp://127.0.0.1:7700"), metavar="ADDRESS")
    parser.add_argument("--channel", default="updates")
    parser.add_argument("--every", type=duration, default="5s", help="interval of reports; 0s: only at the end")
    parser.add_argument("--until", type=int, metavar="RECORDS", help="records, then stop; default: until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="report as JSON lines")
    args = parser.parse_args()
    try:
        channels, seconds = bind(args.channels), args.every.total_seconds()
        sys.exit(EXIT_CODES[verify(channels, args.channel, seconds, args.until, args.json, SystemClock())])
    except PenstockError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()

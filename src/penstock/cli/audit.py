"""`penstock audit`: the balance of records, from the ledger, once it has read what the channels hold."""

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from penstock.audit.balance import balance
from penstock.audit.findings import Kind
from penstock.audit.ledger import SETTLES_AFTER, Ledger
from penstock.audit.report import show
from penstock.channels.kafka import Kafka
from penstock.cli.options import AsJson, Folder, Profile
from penstock.clock import SystemClock
from penstock.errors import Misconfigured, Unavailable
from penstock.pipeline.run import Running
from penstock.pipeline.wiring import Wiring

Bounds = Mapping[str, Mapping[int, tuple[int, int]]]


def audit(
    folder: Folder = Path(),
    profile: Profile = None,
    as_json: AsJson = False,
    senders: Annotated[bool, typer.Option("--senders", help="Show every sender, too.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Unknown intervals and records in flight count as missing, too.")
    ] = False,
    grace: Annotated[
        float, typer.Option(help="Seconds during which a record that is due counts as in flight, not as missing.")
    ] = SETTLES_AFTER / 1e6,
    wait: Annotated[
        float, typer.Option(help="Seconds to wait until the audit has read what the channels hold now.")
    ] = 10,
) -> None:
    """Account for every record: what is there, what is missing, what is unknown.

    Exits with 0 when nothing is missing, 1 when something is, 2 when there is no ledger to read.
    """
    wiring, clock = Wiring.read(folder, profile), SystemClock()
    with closing(Ledger(wiring.ledger, read_only=True)) as ledger:
        asked, certain = clock.now(), True
        try:
            bounds = _bounds(wiring, ledger)
        except Unavailable as error:
            typer.echo(f"penstock: {error}; this is what was read before", err=True)
            bounds, certain = {}, False
        unread = _awaited(ledger, bounds, wait)
        content = ledger.content()
    found = balance(content, clock.now(), int(grace * 1e6), unread)
    if bounds and not any(unread.values()):
        found = replace(found, as_of=asked)
    if as_json:
        typer.echo(found.dumps())
    else:
        show(found, senders=senders)
    doubtful = strict and (found.unknown_seconds > 0 or not found.settled or not certain)
    raise typer.Exit(0 if found.whole and not doubtful else 1)


def _bounds(wiring: Wiring, ledger: Ledger) -> Bounds:
    """What the source channels hold now; nothing when no run is up that could be asked."""
    try:
        running = Running.find(wiring)
    except Misconfigured:
        return {}
    kafka = Kafka(running.servers, wiring.kafka)
    return {channel: kafka.bounds(channel) for channel, kind in ledger.channels().items() if kind is Kind.SOURCE}


def _awaited(ledger: Ledger, bounds: Bounds, wait: float) -> dict[str, int]:
    """What the ledger has not read of that when it has read it all, or the time is over."""
    until = time.monotonic() + wait
    while any((unread := ledger.unread(bounds)).values()) and time.monotonic() < until:
        time.sleep(0.05)
    return unread

"""`penstock audit`: the balance of records, from the ledger, once it has read what the channels hold."""

import time
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live

from penstock.audit.balance import Balance, balance
from penstock.audit.content import Content
from penstock.audit.findings import Kind
from penstock.audit.ledger import Ledger
from penstock.audit.report import parts, show
from penstock.cli.options import AsJson, Folder, Profile
from penstock.clock import SystemClock
from penstock.errors import Misconfigured, PenstockError, Unavailable
from penstock.pipeline.running import Running
from penstock.pipeline.services import here
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
        float | None, typer.Option(help="Seconds during which a record that is due is in flight, not missing.")
    ] = None,
    wait: Annotated[
        float, typer.Option(help="Seconds to wait until the audit has read what the channels hold now.")
    ] = 10,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C.")] = False,
    query: Annotated[
        str | None,
        typer.Option("--recompute", help="Compute this query again from the log, and compare row by row."),
    ] = None,
    pipeline: Annotated[
        Path | None, typer.Option("--pipeline", help="With --recompute: the file of the pipeline.", exists=True)
    ] = None,
) -> None:
    """Account for every record: what is there, what is missing, what is unknown.

    Exits with 0 when nothing is missing, 1 when something is, 2 when there is no ledger to read.
    """
    if query is not None:
        from penstock.cli.recompute import recompute  # Spark is imported for those who want it.

        raise typer.Exit(
            recompute(folder, profile, pipeline or Running.file_in(Wiring.read(folder, profile)), query, as_json)
        )
    wiring = Wiring.read(folder, profile)
    patience = int((wiring.audit.grace.total_seconds() if grace is None else grace) * 1e6)
    if watch:
        _watch(wiring, patience, senders, as_json)
        return
    found, certain = _balance(wiring, patience, wait)
    if as_json:
        typer.echo(found.dumps())
    else:
        show(found, senders=senders)
    doubtful = strict and (found.unknown_seconds > 0 or not found.settled or not certain)
    raise typer.Exit(0 if found.whole and not doubtful else 1)


def _balance(wiring: Wiring, grace: int, wait: float) -> tuple[Balance, bool]:
    """The balance, once the ledger has read what the channels hold; and whether they could be asked."""
    clock = SystemClock()
    with closing(Ledger(wiring.ledger, read_only=True)) as ledger:
        asked, certain = clock.now(), True
        try:
            bounds = _bounds(wiring, ledger)
        except Unavailable as error:
            typer.echo(f"penstock: {error}; this is what was read before", err=True)
            bounds, certain = {}, False
        unread = _awaited(ledger, bounds, wait)
        content = ledger.content()
    found = balance(content, clock.now(), grace, unread)
    if bounds and not any(unread.values()):
        found = replace(found, as_of=asked)
    if any(hop.missing and hop.stage.startswith("store:delta/") for hop in found.hops):
        found = _with_names(found, content, wiring)
    return found, certain


def _with_names(found: Balance, content: Content, wiring: Wiring) -> Balance:
    """The balance with the numbers that lakes lack, as far as the pipeline and its lakes can be looked at."""
    # What a lake holds is looked up when something is missing, and not before.
    from penstock.pipeline.lacking import named
    from penstock.pipeline.load import load

    try:
        return named(found, content, load(Path(Running.find(wiring).file)), wiring)
    except PenstockError as error:
        typer.echo(f"penstock: what is missing in a lake is not named: {error}", err=True)
        return found


def _watch(wiring: Wiring, grace: int, senders: bool, as_json: bool) -> None:
    """Every second, until Ctrl-C: on a terminal in place, otherwise one below the other."""
    console = Console(highlight=False)
    # On a terminal one sheet replaces the other; in a pipe or a file they follow each other.
    with Live(console=console, auto_refresh=False, screen=True) if console.is_terminal else nullcontext() as live:
        while True:
            try:
                found, _ = _balance(wiring, grace, 0)
            except Unavailable as error:
                typer.echo(f"penstock: {error}", err=True)
            else:
                if as_json:
                    typer.echo(found.dumps())
                elif live:
                    live.update(Group(*parts(found, senders)), refresh=True)
                else:
                    show(found, senders=senders)
            time.sleep(1)


def _bounds(wiring: Wiring, ledger: Ledger) -> Bounds:
    """What the source channels hold now; nothing when no run is up that could be asked."""
    try:
        channels = here(wiring).bind()
    except Misconfigured:
        return {}
    return {channel: channels.bounds(channel) for channel, kind in ledger.channels().items() if kind is Kind.SOURCE}


def _awaited(ledger: Ledger, bounds: Bounds, wait: float) -> dict[str, int]:
    """What the ledger has not read of that when it has read it all, or the time is over."""
    until = time.monotonic() + wait
    while any((unread := ledger.unread(bounds)).values()) and time.monotonic() < until:
        time.sleep(0.05)
    return unread

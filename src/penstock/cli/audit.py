"""`penstock audit`: the balance of records, from the ledger, once it has read what the channels hold."""

import time
from collections.abc import Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live

from penstock.audit.balance import Balance, balance
from penstock.audit.content import Content
from penstock.audit.findings import Kind
from penstock.audit.judge import EXIT_CODES, Doubt, Report, unique
from penstock.audit.ledger import Ledger, Unreadable
from penstock.audit.report import parts, show, utc
from penstock.cli.options import AsJson, Folder, Profile
from penstock.core.clock import Micros, SystemClock
from penstock.core.errors import Misconfigured, PenstockError, Unavailable
from penstock.pipeline.config import Config
from penstock.run.run_file import Running
from penstock.run.services import here
from penstock.run.spools import waiting

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
    deep: Annotated[
        bool, typer.Option("--deep", help="Compare every row of all stores and results with the channels, once.")
    ] = False,
    pipeline: Annotated[
        Path | None,
        typer.Option("--pipeline", help="With --recompute or --deep: the file of the pipeline.", exists=True),
    ] = None,
) -> None:
    """Account for every record: what is there, what is missing, what is unknown.

    Exits with 0 when all is whole, 1 when something is missing, 2 when nothing has run here, 3 when it is not known.
    """
    if query is not None:
        from penstock.cli.recompute import recompute  # Spark is imported for those who want it.

        raise typer.Exit(
            recompute(folder, profile, pipeline or Running.file_in(Config.read(folder, profile)), query, as_json)
        )
    config = Config.read(folder, profile)
    patience = int((config.audit.grace.total_seconds() if grace is None else grace) * 1e6)
    if watch:
        _watch(config, patience, senders, as_json)
        return
    found = _balance(config, patience, wait)
    if deep:
        found = deepened(found, folder, profile, pipeline)
    if as_json:
        typer.echo(found.dumps())
    else:
        show(found, senders=senders)
    doubtful = strict and (found.unknown_seconds > 0 or not found.settled)
    raise typer.Exit(EXIT_CODES[found.verdict] or int(doubtful))


def _balance(config: Config, grace: int, wait: float) -> Balance:
    """The balance, with all that stands against knowing it: a ledger that cannot be read, too."""
    try:
        return _counted(config, grace, wait)
    except Unreadable as error:
        doubt = Doubt("ledger", error.place, f"{error.place}: {error.problem}; {error.fix}")
        return Balance(SystemClock().now(), None, (), doubts=(doubt,))


def _counted(config: Config, grace: int, wait: float) -> Balance:
    """The balance, once the ledger has read what the channels hold."""
    clock = SystemClock()
    with closing(Ledger(config.ledger, read_only=True)) as ledger:
        asked, doubts = clock.now(), list[Doubt]()
        try:
            bounds = _bounds(config, ledger)
        except Unavailable as error:
            typer.echo(f"penstock: {error}; this is what was read before", err=True)
            bounds, doubts = {}, [Doubt("channel", error.service, f"the channels cannot be read: {error}")]
        ledger.verify()
        unread = _awaited(ledger, bounds or {}, wait)
        content = ledger.content()
    if wait and any(unread.values()):
        doubts.append(Doubt("audit", "audit", f"the auditor has not read {sum(unread.values()):,} entries"))
    doubts += _unwatched(content.report, clock.now(), config)
    if bounds is None:
        doubts += _spooled(config)
    report = replace(content.report or Report(0), doubts=(*doubts, *(content.report.doubts if content.report else ())))
    found = balance(content, clock.now(), grace, unread, report)
    if bounds and not any(unread.values()):
        found = replace(found, as_of=asked)
    if any(hop.missing and hop.stage.startswith("store:delta/") for hop in found.hops):
        found = _with_names(found, content, config)
    return found


def _unwatched(report: Report | None, now: Micros, config: Config) -> Iterator[Doubt]:
    """Whether an auditor watches, or has stopped in order."""
    if report is None:
        yield Doubt("audit", "audit", "the auditor has reported nothing yet")
    elif report.silent(now, config.audit.away_after) or (not report.closed and Running.crashed(config.state)):
        yield Doubt(
            "audit", "audit", f"the auditor has reported nothing since {utc(report.at)} and did not stop in order"
        )


def _spooled(config: Config) -> Iterator[Doubt]:
    """What waits on disk for its channel while nothing runs here that would bring it there."""
    try:
        for spool in waiting(config):
            yield Doubt("spool", f"source:{spool.name}", f"records of {spool.name} wait on disk for their channel")
    except PenstockError as error:
        yield Doubt("spool", "spool", f"what waits on disk cannot be read: {error}")


def _with_names(found: Balance, content: Content, config: Config) -> Balance:
    """The balance with the numbers that lakes lack, as far as the pipeline and its lakes can be looked at."""
    # What a lake holds is looked up when something is missing, and not before.
    from penstock.operate.deep_audit import named
    from penstock.pipeline.load import load

    try:
        return named(found, content, load(Path(Running.find(config).file)), config)
    except PenstockError as error:
        typer.echo(f"penstock: what is missing in a lake is not named: {error}", err=True)
        return found


def deepened(found: Balance, folder: Path, profile: str | None, pipeline: Path | None) -> Balance:
    """The balance, with what a comparison of everything finds. What it cannot compare is a doubt."""
    # What reads stores is imported only here.
    from penstock.operate.deep_audit import Deep, merged
    from penstock.pipeline.load import load

    config = Config.read(folder, profile)
    try:
        description = load(pipeline or Running.file_in(config))
        deep = Deep(description, here(config), partial(typer.echo, err=True))
        deep.run()
    except PenstockError as error:
        doubt = Doubt("store", "--deep", f"stores and results were not compared with their channels: {error}")
        return replace(found, doubts=unique((*found.doubts, doubt)))
    doubts = [one for one in found.doubts if not (one.kind == "store" and one.subject in deep.checked)]
    return replace(found, discrepancies=merged(found.discrepancies, deep), doubts=unique((*doubts, *deep.doubts)))


def _watch(config: Config, grace: int, senders: bool, as_json: bool) -> None:
    """Every second, until Ctrl-C: on a terminal in place, otherwise one below the other."""
    console = Console(highlight=False)
    # On a terminal one sheet replaces the other; in a pipe or a file they follow each other.
    with Live(console=console, auto_refresh=False, screen=True) if console.is_terminal else nullcontext() as live:
        while True:
            try:
                found = _balance(config, grace, 0)
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


def _bounds(config: Config, ledger: Ledger) -> Bounds | None:
    """What the source channels hold now; None when no run is up that could be asked."""
    try:
        channels = here(config).bind()
    except Misconfigured:
        return None
    return {channel: channels.bounds(channel) for channel, kind in ledger.channels().items() if kind is Kind.SOURCE}


def _awaited(ledger: Ledger, bounds: Bounds, wait: float) -> dict[str, int]:
    """What the ledger has not read of that when it has read it all, or the time is over."""
    until = time.monotonic() + wait
    while any((unread := ledger.unread(bounds)).values()) and time.monotonic() < until:
        time.sleep(0.05)
    return unread

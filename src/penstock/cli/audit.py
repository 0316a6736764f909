"""`penstock audit`: the balance of records, from the ledger."""

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
from penstock.audit.lag import OpenTransactions
from penstock.audit.ledger import Ledger, Unreadable
from penstock.audit.report import parts, utc
from penstock.channels.kafka import Kafka
from penstock.cli.options import AsJson, Folder, Profile
from penstock.cli.standard import inform, print_result
from penstock.core.clock import Micros, SystemClock
from penstock.core.errors import Misconfigured, PenstockError, Unavailable
from penstock.pipeline.config import Config
from penstock.run.services import RunningPipeline, with_running_services
from penstock.run.spools import waiting

Bounds = Mapping[str, Mapping[int, tuple[int, int]]]


def audit(
    folder: Folder = Path(),
    profile: Profile = None,
    as_json: AsJson = False,
    senders: Annotated[bool, typer.Option("--senders", help="Also show each sender.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Count unknown intervals and records in flight as missing.")
    ] = False,
    grace: Annotated[
        float | None,
        typer.Option(
            help="The seconds for which an expected record is in flight, not missing.", show_default="the setting"
        ),
    ] = None,
    wait: Annotated[
        float, typer.Option(help="The seconds to wait until the auditor has read the current end of the channels.")
    ] = 10,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second until Ctrl-C.")] = False,
    query: Annotated[
        str | None,
        typer.Option("--recompute", help="Compute this query again from the log, and compare each row."),
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also compare each row of all stores and results with the channels.")
    ] = False,
    pipeline: Annotated[
        Path | None,
        typer.Option("--pipeline", help="The file of the pipeline, for --recompute and --deep.", exists=True),
    ] = None,
) -> None:
    """Account for every record: arrived, missing, or unknown.

    Exit code: 0 when nothing is missing, 1 when records are missing, 2 when no pipeline has run here, 3 when the result
    is unknown.
    """
    config = Config.read(folder, profile)
    if query is not None:
        from penstock.cli.recompute import recompute  # Imports Spark.

        file = pipeline or RunningPipeline.file_in(config)
        raise typer.Exit(recompute(folder, profile, file, query, as_json))
    grace_micros = int((config.audit.grace.total_seconds() if grace is None else grace) * 1e6)
    if watch:
        _watch(config, grace_micros, senders, as_json)
        return
    found = _balance(config, grace_micros, wait)
    if deep:
        found = deepened(found, folder, profile, pipeline)
    print_result(as_json, found.to_json(), parts(found, senders))
    doubtful = strict and (found.unknown_seconds > 0 or not found.settled)
    raise typer.Exit(EXIT_CODES[found.verdict] or int(doubtful))


def _balance(config: Config, grace: int, wait: float) -> Balance:
    """The balance. A ledger that cannot be read is a doubt."""
    try:
        return _counted(config, grace, wait)
    except Unreadable as error:
        doubt = Doubt("ledger", error.location, f"{error.location}: {error.problem}; {error.fix}")
        return Balance(SystemClock().now(), None, (), doubts=(doubt,))


def _counted(config: Config, grace: int, wait: float) -> Balance:
    """The balance, once the ledger has read the current end of the channels."""
    clock = SystemClock()
    with closing(Ledger(config.ledger, read_only=True)) as ledger:
        started, doubts = clock.now(), list[Doubt]()
        try:
            bounds, hidden = _bounds(config, ledger, wait)
            doubts += hidden
        except Unavailable as error:
            inform(f"penstock: {error}; the last known state follows")
            bounds, doubts = {}, [Doubt("channel", error.service, f"channels cannot be read: {error}")]
        ledger.verify()
        unread = _wait_until_read(ledger, bounds or {}, wait)
        content = ledger.content()
    if wait and any(unread.values()):
        doubts.append(Doubt("audit", "audit", f"the auditor has not read {sum(unread.values()):,} entries"))
    doubts += _unwatched(content.report, clock.now(), config)
    if bounds is None:
        doubts += _spooled(config)
    report = replace(content.report or Report(0), doubts=(*doubts, *(content.report.doubts if content.report else ())))
    found = balance(content, clock.now(), grace, unread, report)
    if bounds and not any(unread.values()):
        found = replace(found, as_of=started)
    if any(hop.missing and hop.stage.startswith("store:delta/") for hop in found.hops):
        found = _with_names(found, content, config)
    return found


def _unwatched(report: Report | None, now: Micros, config: Config) -> Iterator[Doubt]:
    """A doubt unless an auditor is running, or has stopped normally."""
    if report is None:
        yield Doubt("audit", "audit", "no report of the auditor yet")
    elif report.silent(now, config.audit.away_after) or (not report.closed and RunningPipeline.crashed(config.state)):
        yield Doubt("audit", "audit", f"no report of the auditor since {utc(report.at)}, and it did not stop normally")


def _spooled(config: Config) -> Iterator[Doubt]:
    """Records in spools, while no pipeline runs here to send them."""
    try:
        for spool in waiting(config):
            yield Doubt("spool", f"source:{spool.name}", f"records of {spool.name} wait in a spool on disk")
    except PenstockError as error:
        yield Doubt("spool", "spool", f"the spools on disk cannot be read: {error}")


def _with_names(found: Balance, content: Content, config: Config) -> Balance:
    """The balance with the numbers that are missing in lakes, if the lakes can be read."""
    from penstock.operate.deep_audit import named
    from penstock.pipeline.load import load

    try:
        return named(found, content, load(Path(RunningPipeline.find(config).file)), config)
    except PenstockError as error:
        inform(f"penstock: missing records of a lake cannot be listed: {error}")
        return found


def deepened(found: Balance, folder: Path, profile: str | None, pipeline: Path | None) -> Balance:
    """The balance, with the result of a full comparison. What cannot be compared is a doubt."""
    from penstock.operate.deep_audit import Deep, merged
    from penstock.pipeline.load import load

    config = Config.read(folder, profile)
    try:
        description = load(pipeline or RunningPipeline.file_in(config))
        deep = Deep(description, with_running_services(config), inform)
        deep.run()
    except PenstockError as error:
        doubt = Doubt("store", "--deep", f"stores and results cannot be compared with their channels: {error}")
        return replace(found, doubts=unique((*found.doubts, doubt)))
    doubts = [one for one in found.doubts if not (one.kind == "store" and one.subject in deep.checked)]
    return replace(found, discrepancies=merged(found.discrepancies, deep), doubts=unique((*doubts, *deep.doubts)))


def _watch(config: Config, grace: int, senders: bool, as_json: bool) -> None:
    """Print the balance every second until Ctrl-C: in place on a terminal, otherwise one below the other."""
    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False, screen=True) if console.is_terminal else nullcontext() as live:
        while True:
            try:
                found = _balance(config, grace, 0)
            except Unavailable as error:
                inform(f"penstock: {error}")
            else:
                if live and not as_json:
                    live.update(Group(*parts(found, senders)), refresh=True)
                else:
                    print_result(as_json, found.to_json(), parts(found, senders))
            time.sleep(1)


def _bounds(config: Config, ledger: Ledger, wait: float) -> tuple[Bounds | None, list[Doubt]]:
    """The bounds of the source channels, None when no pipeline runs here; and the transactions that hide entries.

    `wait`: for how many seconds transactions may end.
    """
    try:
        channels = with_running_services(config).bind()
    except Misconfigured:
        return None, []
    names = [channel for channel, kind in ledger.channels().items() if kind is Kind.SOURCE]
    doubts = []
    if wait and isinstance(channels, Kafka):
        # Before the bounds, which then contain what was hidden.
        doubts = OpenTransactions(partial(channels.open_transactions, names), min(wait, 1.0)).wait(wait)
    return {channel: channels.bounds(channel) for channel in names}, doubts


def _wait_until_read(ledger: Ledger, bounds: Bounds, wait: float) -> dict[str, int]:
    """Wait until the ledger has read all of that; what is unread after `wait` seconds."""
    until = time.monotonic() + wait
    while any((unread := ledger.unread(bounds)).values()) and time.monotonic() < until:
        time.sleep(0.05)
    return unread

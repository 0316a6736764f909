"""`penstock audit`: the balance of records, from the ledger alone."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.audit.balance import balance
from penstock.audit.ledger import SETTLES_AFTER, Ledger
from penstock.audit.report import show
from penstock.clock import SystemClock
from penstock.errors import Misconfigured, Unavailable

LEDGER = Path(".penstock", "audit", "ledger.db")
"""Under the folder of the pipeline."""


def audit(
    folder: Annotated[Path, typer.Option(help="Where the pipeline runs: the folder that holds .penstock.")] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print the balance as JSON.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Unknown intervals and records in flight count as missing, too.")
    ] = False,
    grace: Annotated[
        float, typer.Option(help="Seconds during which a record that is due counts as in flight, not as missing.")
    ] = SETTLES_AFTER / 1e6,
) -> None:
    """Account for every record: what is there, what is missing, what is unknown.

    Exits with 0 when nothing is missing, 1 when something is, 2 when there is no ledger to read.
    """
    try:
        ledger = Ledger(folder / LEDGER, read_only=True)
        try:
            content = ledger.content()
        finally:
            ledger.close()
    except (Misconfigured, Unavailable) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    found = balance(content, SystemClock().now(), int(grace * 1e6))
    if as_json:
        typer.echo(found.dumps())
    else:
        show(found)
    doubtful = strict and (found.unknown_seconds > 0 or not found.settled)
    raise typer.Exit(0 if found.whole and not doubtful else 1)

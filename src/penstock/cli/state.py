"""`penstock state`: what queries remember between two records."""

import typer

from penstock.cli.state_read import get, scan
from penstock.cli.state_rescale import rescale

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def state() -> None:
    """Ask for what a query remembers, and spread it over more or fewer partitions."""


app.command()(get)
app.command()(scan)
app.command()(rescale)

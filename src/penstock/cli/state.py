"""`penstock state`: what queries remember between two records, and over how many partitions."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from penstock.analysis.checkpoints.rescale import Rescaled, ready
from penstock.analysis.checkpoints.rescale import rescale as spread_anew
from penstock.analysis.session import session
from penstock.cli.options import AsJson, File, Profile
from penstock.cli.state_read import get, scan
from penstock.pipeline.config import Config
from penstock.pipeline.load import load
from penstock.run.warm import spark_archive
from penstock.supervise.folder import StateFolder
from penstock.supervise.jars import ensure_jars
from penstock.supervise.java import find_java

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def state() -> None:
    """Ask for what a query remembers, and spread it over more or fewer partitions."""


app.command()(get)
app.command()(scan)


@app.command()
def rescale(
    file: File,
    query: Annotated[str, typer.Argument(help="The query, by its name.", show_default=False)],
    partitions: Annotated[int, typer.Option(min=1, help="Over how many partitions.", show_default=False)],
    folder: Annotated[
        Path | None,
        typer.Option(help="Where the pipeline runs: the folder that holds .penstock.", show_default="beside the file"),
    ] = None,
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Spread the state of a query over another number of partitions; nothing of it is lost. Stop the pipeline before.

    The next run goes on from there. Until it has succeeded a copy is kept, and put back if it does not.
    """
    description = load(file)
    config = Config.read(folder or file.parent, profile)
    chosen = description.query(query)
    checkpoint = f"{config.checkpoints}/{chosen.name}"
    with StateFolder(config.state).held():
        ready(chosen.name, checkpoint, partitions, _say)
        _say("starting Spark")
        java = find_java()
        jars = ensure_jars(java)
        flags = spark_archive(java, jars).used()
        with session(description.name, config.spark, java.path, jars.spark, _SLOTS, None, flags) as spark:
            done = spread_anew(spark, chosen.name, checkpoint, partitions, _say)
    typer.echo(json.dumps(asdict(done)) if as_json else told(done))


_SLOTS = 4


def told(done: Rescaled) -> str:
    """What was done, as a sentence."""
    again = ", and does its last batch again, which was not finished" if done.unfinished else ""
    return (
        f"{done.query}: {done.rows:,} rows of state in {done.after} partitions instead of {done.before}, "
        f"in {done.seconds:.1f} s; the next run goes on from here{again}"
    )


def _say(text: str) -> None:
    typer.echo(f"{text} …", err=True)

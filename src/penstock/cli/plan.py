"""`penstock plan`: what a pipeline will do."""

import json
import time
from typing import TYPE_CHECKING

import typer
from rich.table import Table
from rich.text import Text

from penstock.cli.options import AsJson, File, Profile
from penstock.cli.standard import console
from penstock.pipeline.config import Config
from penstock.pipeline.load import load
from penstock.plan.checks import check, unconnected

if TYPE_CHECKING:
    from penstock.plan.plan import Plan


def plan(file: File, profile: Profile = None, as_json: AsJson = False) -> None:
    """Check a pipeline and explain what it will do: its hops, their guarantees, the mode of each query and why.

    What needs no Spark is checked first. Nothing is started but Spark's planner, which is asked about each query.
    Exits with 1 when the pipeline would not start so, or is not connected; with 2 when it cannot be planned at all.
    """
    say = _Progress()
    description = load(file)
    config = Config.read(file.parent, profile)
    with description.locating():
        check(description, config)
    say(f"{file.name}: names, addresses and settings fit")
    for finding in unconnected(description):
        say(f"{finding.level}: {finding}")
    say("starting Spark, to ask it about the queries")
    # These take longest to import: who has mistyped something does not wait for them.
    from penstock.plan.plan import plan as make
    from penstock.run.analyse import engine

    # What a run would start is not there yet, and nobody reads from it here.
    with description.locating(), engine(description, config.at("local", "redis://local"), log=None) as spark:
        made = make(description, config, spark, say)
    if as_json:
        typer.echo(json.dumps(made.to_json(), indent=2, ensure_ascii=False))
    else:
        show(made)
    raise typer.Exit(1 if made.wrong else 0)


class _Progress:
    """Says on standard error how far the command is, with the seconds since it began."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, text: str) -> None:
        typer.echo(f"{time.monotonic() - self._began:5.1f} s  {text}", err=True)


def show(made: "Plan") -> None:
    screen = console()
    screen.print(f"Its channels lie at {made.channels}.")
    columns = ("from", "by", "to", "asked for", "given", "because")
    hops = Table(*columns, title=f"The hops of {made.pipeline}", title_justify="left")
    for hop in made.hops:
        hops.add_row(hop.start, hop.by, hop.end, hop.wanted, hop.guarantee, hop.why)
    screen.print(hops)
    queries = Table("query", "mode", "because", "key", "identity", "cost", title="Its queries", title_justify="left")
    for query in made.queries:
        queries.add_row(query.name, query.mode, query.why, ", ".join(query.key), query.identity, query.cost)
    screen.print(queries)
    for query in made.queries:
        screen.print(f"checkpoint of {query.name}: {query.checkpoint}")
    for cost, price in dict.fromkeys((query.cost, query.price) for query in made.queries):
        screen.print(f"cost {cost}: {price}.")
    if made.slots.most:
        screen.print(f"The queries can use {made.slots.most} slots of Spark, and need {made.slots.least}.")
    for remark in made.remarks:
        screen.print(f"note: {remark}")
    for finding in made.findings:
        screen.print(Text(f"{finding.level}: ", "bold red" if finding.level == "error" else "yellow"), end="")
        screen.print(str(finding))

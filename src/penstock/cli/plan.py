"""`penstock plan`: what a pipeline will do."""

import json
import sys

import typer
from rich.table import Table

from penstock.cli.console import console
from penstock.cli.options import AsJson, File, Profile
from penstock.pipeline.checks import check
from penstock.pipeline.load import load
from penstock.pipeline.plan import Plan
from penstock.pipeline.plan import plan as make
from penstock.pipeline.tiers.analyse import engine
from penstock.pipeline.wiring import Wiring


def plan(file: File, profile: Profile = None, as_json: AsJson = False) -> None:
    """Check a pipeline and explain what it will do: its hops, their guarantees, the mode of each query and why.

    Nothing is started but Spark's planner, which is asked about each query.
    """
    description = load(file)
    wiring = Wiring.read(file.parent, profile)
    check(description, wiring)
    if not as_json and sys.stderr.isatty():
        typer.echo("asking Spark about the queries …", err=True)
    # What a run would start is not there yet, and nobody reads from it here.
    with engine(description, wiring.at("local", "redis://local"), log=None) as spark:
        made = make(description, wiring, spark)
    if as_json:
        typer.echo(json.dumps(made.to_json(), indent=2, ensure_ascii=False))
    else:
        show(made)


def show(made: Plan) -> None:
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

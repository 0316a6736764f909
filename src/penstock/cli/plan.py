"""`penstock plan`: check and explain a pipeline."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer
from rich.table import Table
from rich.text import Text

from penstock.cli.options import AsJson, File, Profile
from penstock.cli.standard import inform, print_result, table
from penstock.pipeline.config import Config
from penstock.pipeline.load import load
from penstock.plan.checks import check, unconnected

if TYPE_CHECKING:
    from penstock.plan.plan import Plan


def plan(file: File, profile: Profile = None, as_json: AsJson = False) -> None:
    """Check a pipeline and explain what it will do: its hops, their guarantees, and the mode of each query.

    Only Spark's planner is started; the checks that do not need it come first.

    Exit code: 0 on success, 1 when the pipeline would not start or is not connected, 2 when it cannot be planned.
    """
    start = time.monotonic()

    def progress(text: str) -> None:
        inform(f"{time.monotonic() - start:5.1f} s  {text}")

    description = load(file)
    config = Config.read(file.parent, profile)
    with description.locating():
        check(description, config)
    progress(f"{file.name}: names, addresses and settings are valid")
    for finding in unconnected(description):
        progress(f"{finding.level}: {finding}")
    progress("starting Spark to plan the queries")
    # Imported late: they are slow, and errors above come without them.
    from penstock.plan.plan import plan as make
    from penstock.run.analyse import engine

    # The services do not run yet, and nothing is read from them.
    with description.locating(), engine(description, config.with_services("local", "redis://local"), log=None) as spark:
        made = make(description, config, spark, progress)
    print_result(as_json, made.to_json(), _parts(made))
    raise typer.Exit(1 if made.wrong else 0)


def _parts(made: "Plan") -> Iterator[str | Text | Table]:
    yield f"Channels: {made.channels}"
    columns = ("from", "by", "to", "requested", "guarantee", "because")
    hops = table(*columns, title=f"Hops of {made.pipeline}")
    for hop in made.hops:
        hops.add_row(hop.start, hop.by, hop.end, hop.wanted, hop.guarantee, hop.why)
    yield hops
    queries = table("query", "mode", "because", "key", "identity", "cost", title="Queries")
    for query in made.queries:
        queries.add_row(query.name, query.mode, query.why, ", ".join(query.key), query.identity, query.cost)
    yield queries
    for query in made.queries:
        yield f"checkpoint of {query.name}: {query.checkpoint}"
    for cost, price in dict.fromkeys((query.cost, query.price) for query in made.queries):
        yield f"cost {cost}: {price}."
    if made.slots.most:
        yield f"Spark slots: the queries need {made.slots.least}, and can use up to {made.slots.most}."
    for remark in made.remarks:
        yield f"note: {remark}"
    for finding in made.findings:
        style = "bold red" if finding.level == "error" else "yellow"
        yield Text.assemble((f"{finding.level}: ", style), str(finding))

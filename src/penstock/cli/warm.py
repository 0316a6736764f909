"""`penstock warm`: prepare Java for fast starts."""

import typer

from penstock.run.warm import is_warmed_up
from penstock.run.warm import warm_up as make
from penstock.supervise.java import ensure_jars, find_java


def warm() -> None:
    """Fetch the jars and prepare Java for fast starts, once per machine. `penstock run` also does it when needed."""
    java = find_java()
    jars = ensure_jars(java)
    if not is_warmed_up(java, jars):
        make(java, jars)
    typer.echo("Kafka and Spark are ready for fast starts")

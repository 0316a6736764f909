"""The command line: a file per command."""

import importlib
import importlib.metadata
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from penstock.core.errors import PenstockError

COMMANDS = {
    "demo": "Run the RSVP analyzer: a whole pipeline, live, from nothing.",
    "run": "Run a pipeline on this machine, with all that it needs.",
    "up": "Start Kafka and Redis alone, in the background.",
    "down": "Stop what `penstock up` has started.",
    "topics": "Create, list, describe, alter and delete topics.",
    "produce": "Produce records: from standard input, or from a generator.",
    "consume": "Consume channels: print their records as they come.",
    "query": "Query channels and results with SQL: print rows as they come.",
    "groups": "List, describe and reset the groups that share channels.",
    "replay": "Send the history of a channel into another one.",
    "gateway": "Serve channels over HTTP: produce, fetch, groups.",
    "webhook": "Register webhooks at a provider; sign and send one by hand.",
    "proxy": "Keep a stream of events for a device that sleeps, and wake it.",
    "plan": "Check a pipeline and explain what it will do; start nothing.",
    "status": "Show how the pipeline that runs here is doing.",
    "audit": "Account for every record: what is there, missing, or unknown.",
    "verify": "Verify that no number is missing: in a channel, a file or a pipe.",
    "dlq": "List, show and redrive what channels have refused.",
    "state": "Ask for the state of a query; spread it over more partitions.",
    "repair": "Find damaged files of a stopped pipeline, and go on without them.",
    "doctor": "Check what this machine has and lacks.",
    "feed": "Serve a simulated public feed over WebSocket.",
    "warm": "Prepare Java for quick starts, once per machine.",
    "tier": "Run one tier of a pipeline, as a process of its own.",
}
"""Each is the function of its name in the module of its name; or the group `app` there, when it has sub-commands."""


class _Lazy(TyperGroup):
    """Imports a command when it is called: `penstock --help` need not wait for Spark."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"penstock.cli.{cmd_name}")
        if (group := getattr(module, "app", None)) is not None:
            return typer.main.get_command(group)
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(cmd_name)(getattr(module, cmd_name))
        return typer.main.get_command(single)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


app = typer.Typer(
    cls=_Lazy, add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
)
TRACE = "PENSTOCK_TRACE"
"""The environment variable with which a fault of our own is shown with its trace."""


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"penstock {importlib.metadata.version('penstock')}")
        raise typer.Exit


@app.callback()
def penstock(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """Streaming data pipelines in Python, on Spark, that account for every record."""


def main() -> None:
    """Run a command; what Penstock raises on purpose is shown as a sentence, not as a trace."""
    # Payloads, logs and accounts are nobody else's: whatever this process and its children make is its owner's alone.
    os.umask(0o077)
    try:
        app()
    except PenstockError as error:
        typer.secho(f"penstock: {error}", err=True, fg="red" if sys.stderr.isatty() else None)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        # Tiers write into logs, where the trace belongs.
        if TRACE in os.environ or sys.argv[1:2] == ["tier"]:
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        what = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        typer.echo(f"penstock: {what} ({where}); this is a fault of Penstock: {TRACE}=1 shows where it is", err=True)
        sys.exit(70)

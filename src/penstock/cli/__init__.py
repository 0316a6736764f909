"""The command line: a module for each command."""

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
    "demo": "Run the RSVP analyzer: a complete example, with a live page.",
    "run": "Run a pipeline on this machine, with its services and its page.",
    "up": "Start Kafka and Redis in the background.",
    "down": "Stop what `penstock up` has started.",
    "topics": "Create, list, describe, alter and delete topics.",
    "produce": "Write records to a channel, from standard input or a generator.",
    "consume": "Print the records of channels as they arrive.",
    "query": "Query channels and results with SQL, and print the rows.",
    "groups": "List, describe and reset consumer groups.",
    "replay": "Copy the records of a time range to another channel.",
    "gateway": "Serve channels over HTTP: produce, fetch, consumer groups.",
    "webhook": "Register webhooks at a provider; sign and send a message.",
    "proxy": "Store events for a device that sleeps, and wake it.",
    "plan": "Check a pipeline and explain what it will do, without a start.",
    "status": "Show the state of the running pipeline: rates, lag, latency.",
    "audit": "Account for every record: arrived, missing, or unknown.",
    "verify": "Verify that no record is missing in a channel, a file or a pipe.",
    "dlq": "List, show and redrive dead letters.",
    "state": "Read the state of a query; change its number of partitions.",
    "repair": "Find damaged files of a stopped pipeline, and repair them.",
    "doctor": "Check that this machine has what Penstock needs.",
    "feed": "Serve a simulated public feed over WebSocket.",
    "warm": "Prepare Java for fast starts, once per machine.",
    "tier": "Run one tier of a pipeline in a process of its own.",
}
"""Each is a function of this name, or a group `app` with sub-commands, in the module of this name."""
_MODULES = {
    "demo": "run",
    "tier": "run",
    "down": "up",
    "warm": "doctor",
    "feed": "serve",
    "gateway": "serve",
    "proxy": "serve",
}
"""Commands in the module of another one."""


def module_of(command: str) -> Any:
    return importlib.import_module(f"penstock.cli.{_MODULES.get(command, command)}")


class _LazyGroup(TyperGroup):
    """Imports a command when it is called, so that `penstock --help` does not import Spark."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module = module_of(cmd_name)
        if (group := getattr(module, "app", None)) is not None:
            return typer.main.get_command(group)
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(cmd_name)(getattr(module, cmd_name))
        return typer.main.get_command(single)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


app = typer.Typer(
    cls=_LazyGroup, add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
)
TRACE = "PENSTOCK_TRACE"
"""The environment variable that shows the traceback of an internal error."""


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"penstock {importlib.metadata.version('penstock')}")
        raise typer.Exit


@app.callback()
def penstock(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Streaming data pipelines in Python, on Spark, that account for every record."""


def main() -> None:
    """Run a command. An error of Penstock is printed as a sentence, without a traceback."""
    # Payloads, logs and accounts are private: files can be read only by their owner.
    os.umask(0o077)
    try:
        app()
    except PenstockError as error:
        typer.secho(f"penstock: {error}", err=True, fg="red" if sys.stderr.isatty() else None)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        # A tier writes to a log, which should have the traceback.
        if TRACE in os.environ or sys.argv[1:2] == ["tier"]:
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        what = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        typer.echo(f"penstock: {what} ({where}); this is a bug of Penstock; for a traceback, set {TRACE}=1", err=True)
        sys.exit(70)

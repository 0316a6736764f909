"""The command line: a file per command."""

import importlib
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from penstock.errors import PenstockError

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


app = typer.Typer(cls=_Lazy, add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def penstock() -> None:
    """Streaming data pipelines in Python, on Spark, that account for every record."""


def main() -> None:
    """Run a command; what Penstock raises on purpose is shown as a sentence, not as a trace."""
    try:
        app()
    except PenstockError as error:
        typer.secho(f"penstock: {error}", err=True, fg="red" if sys.stderr.isatty() else None)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)

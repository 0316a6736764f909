"""The command line: a file per command."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperGroup

from penstock.errors import PenstockError

COMMANDS = {
    "demo": "Run the RSVP analyzer: a whole pipeline, live, from nothing.",
    "run": "Run a pipeline on this machine, with all that it needs.",
    "plan": "Check a pipeline and explain what it will do; start nothing.",
    "status": "Show how the pipeline that runs here is doing.",
    "audit": "Account for every record: what is there, what is missing, what is unknown.",
    "doctor": "Check what this machine has and lacks.",
    "feed": "Serve a simulated public feed over WebSocket.",
    "warm": "Prepare Java for quick starts, once per machine.",
    "tier": "Run one tier of a pipeline, as a process of its own.",
}
"""Each is the function of its name in the module of its name."""


class _Lazy(TyperGroup):
    """Imports a command when it is called: `penstock --help` need not wait for Spark."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        if ctx.invoked_subcommand is None and ctx.resilient_parsing is False and _only_listing():
            return typer.main.get_command(_single(cmd_name, _placeholder, COMMANDS[cmd_name]))
        module = importlib.import_module(f"penstock.cli.{cmd_name}")
        return typer.main.get_command(_single(cmd_name, getattr(module, cmd_name)))


def _only_listing() -> bool:
    return not any(argument in COMMANDS for argument in sys.argv[1:])


def _placeholder() -> None: ...


def _single(name: str, function: Callable[..., None], help: str | None = None) -> typer.Typer:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name, help=help)(function)
    return app


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

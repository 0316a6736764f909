"""Options that several commands share, and the parsing of times and durations."""

from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from penstock.core.clock import Clock, Micros, SystemClock, duration
from penstock.core.errors import Misconfigured

File = Annotated[Path, typer.Argument(help="The Python file that defines the pipeline.", show_default=False)]
Profile = Annotated[str | None, typer.Option(help="The profile of penstock.toml to use.", show_default=False)]
Folder = Annotated[Path, typer.Option(help="The folder of the pipeline, which has .penstock in it.")]
OptionalFolder = Annotated[
    Path | None,
    typer.Option(
        help="The folder of the pipeline, which has .penstock in it.",
        show_default="the folder of the file, or the current folder",
    ),
]
Servers = Annotated[
    str | None,
    typer.Option(
        "--servers",
        "--bootstrap-server",
        metavar="ADDRESS",
        help="The address of the channels: host:port of Kafka, or kafka://…, redis://…, file://PATH, tcp://….",
        show_default="the pipeline that runs in the folder",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def parse_time(option: str, text: str, clock: Clock | None = None) -> Micros:
    """`10m` (ago), or a date and time such as 2026-11-15T10:00, in the local time zone unless it has its own."""
    try:
        return (clock or SystemClock()).now() - round(duration(text).total_seconds() * 1_000_000)
    except ValueError:
        pass
    try:
        return round(datetime.fromisoformat(text).timestamp() * 1_000_000)
    except (ValueError, OverflowError, OSError):
        fix = 'write how long ago, such as "10m" or "2 days", or a time such as 2026-11-15T10:00'
        raise Misconfigured(option, f'"{text}" is not a valid time', fix) from None


def parse_duration(option: str, text: str, fix: str = "") -> timedelta:
    """A duration such as `5s` or `10 minutes`."""
    try:
        return duration(text)
    except ValueError as error:
        problem, _, usual_fix = str(error).partition("; ")
        raise Misconfigured(option, problem, f"{usual_fix}; {fix}" if fix else usual_fix) from error

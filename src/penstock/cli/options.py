"""Options that several commands share, and the channels that they select."""

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.audit.writers import protected
from penstock.channels.binders import bind
from penstock.core.clock import Micros, SystemClock, duration, micros
from penstock.core.contracts import Channels, Topic
from penstock.core.errors import Misconfigured
from penstock.core.text import did_you_mean, printable
from penstock.pipeline.config import Config
from penstock.run.services import with_running_services


def parse_time(option: str, text: str) -> Micros:
    """`10m` (ago), or a date and time such as 2026-11-15T10:00, in the local time zone unless it has its own."""
    try:
        return SystemClock().now() - micros(duration(text))
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


def time_option(name: str, text: str, default: str | bool = False) -> Any:
    """An option whose value is a time, in microseconds."""

    def time(value: str) -> Micros:
        return parse_time(name, value)

    help_ = f"{text}: 10m (ago), or 2026-11-15T10:00."
    return typer.Option(name, metavar="TIME", parser=time, help=help_, show_default=default)


File = Annotated[Path, typer.Argument(help="The Python file that defines the pipeline.", show_default=False)]
PipelineFile = Annotated[
    Path | None,
    typer.Option(
        "--pipeline", metavar="FILE", help="The file of the pipeline.", show_default="the pipeline that runs here"
    ),
]
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
Host = Annotated[str, typer.Option(help="The address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0 takes a free one.")]
MaxLine = Annotated[int, typer.Option(min=1, max=1 << 30, help="The most bytes in a line.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def find_channels(folder: Path, profile: str | None, servers: str | None) -> Channels:
    """The channels at `servers` (an address, or host:port of Kafka), or those of the pipeline in the folder."""
    config = Config.read(folder, profile)
    if servers is None:
        return with_running_services(config).bind()
    return bind(servers if "://" in servers else f"kafka://{servers}", config.kafka)


def require_existing(kind: str, name: str, names: Collection[str], where: str = "") -> str:
    """The name; Misconfigured if it is none of these."""
    if name in names:
        return name
    others = f"existing {kind}s: {', '.join(sorted(names))}" if names else "there are none"
    raise Misconfigured(f"{kind} {printable(name)}", f"not found{where}", did_you_mean(name, names, others))


def require_channels(channels: Channels, names: Sequence[str], *, create: bool = False, hint: str = "") -> None:
    """Misconfigured unless all of them exist. `create` creates those that are missing."""
    existing = channels.names() if channels.promise.replay else []
    missing = [name for name in names if name not in existing]
    if missing and not create and channels.promise.replay:
        name = printable(missing[0])
        similar = f"{guess} Or " if (guess := did_you_mean(missing[0], existing, "")) else ""
        fix = f"{similar}create it: penstock topics --create --topic {name}{hint}"
        raise Misconfigured(f"channel {name}", f"not found at {channels.where}", fix)
    channels.ensure([Topic(name) for name in missing])


def require_writable(channels: Channels, name: str) -> None:
    """Misconfigured for results, dead letters and internal channels: only the pipeline writes to them."""
    if (refusal := protected(name, channels)) is not None:
        raise Misconfigured(f"channel {printable(name)}", *refusal)


def check_offset(option: str, name: str, offset: int, first: int, end: int) -> None:
    """Misconfigured unless the partition of this name has the offset, or ends there."""
    if not first <= offset <= end:
        fix = f"give {first} (the oldest record) to {end} (the next record)"
        raise Misconfigured(option, f"{name} has no offset {offset}", fix)


def given_options(context: typer.Context) -> set[str]:
    """The names of the options that are on the command line."""
    sources = {option.opts[0]: context.get_parameter_source(option.name or "") for option in context.command.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}

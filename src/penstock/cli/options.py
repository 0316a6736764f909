"""Options that several commands share, written once."""

from pathlib import Path
from typing import Annotated

import typer

File = Annotated[Path, typer.Argument(help="The Python file that makes the pipeline.", show_default=False)]
Profile = Annotated[str | None, typer.Option(help="The profile of penstock.toml to use.", show_default=False)]
Folder = Annotated[Path, typer.Option(help="Where the pipeline runs: the folder that holds .penstock.")]
Servers = Annotated[
    str | None,
    typer.Option(
        "--servers",
        "--bootstrap-server",
        metavar="ADDRESS",
        help="Where the channels lie: host:port of a Kafka, or kafka://…, redis://…, file://PATH, tcp://….",
        show_default="what runs in the folder",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")]

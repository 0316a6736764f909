"""`penstock repair`: find and repair damaged files of a stopped pipeline."""

import json
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import AsJson, Folder, Profile
from penstock.core.errors import Misconfigured
from penstock.operate.repair import damages
from penstock.pipeline.config import Config
from penstock.run.services import ROLE
from penstock.supervise.folder import StateFolder


def repair(
    folder: Folder = Path(),
    profile: Profile = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Repair them. Removed files are kept in .penstock/damaged.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Find damaged files of a stopped pipeline: Kafka's log, spools, Redis, the ledger, checkpoints.

    Shows each one with the consequence and the fix. With --apply, it repairs them.

    Exit code: 0 when nothing is damaged or all is repaired, 1 when something stays damaged, 2 on an error.
    """
    config = Config.read(folder, profile)
    if not config.state.is_dir():
        raise Misconfigured(str(config.state), "state folder not found", "give the folder of the pipeline: --folder")
    unrepaired, found = 0, []
    with StateFolder(config.state).locked(), StateFolder(config.state, ROLE).locked():
        for one in damages(config):
            done = one.repair() if apply and one.repair else None
            unrepaired += done is None
            facts = {"file": str(one.file), "problem": one.problem, "consequence": one.consequence}
            found.append({**facts, "fix": one.fix, "repaired": done})
            if not as_json:
                typer.echo(f"{one.file}: {one.problem}\n  consequence: {one.consequence}")
                typer.echo(
                    f"  repaired: {one.fix}; {done}" if done else f"  fix: {_fix(one.fix, one.repair is not None)}"
                )
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False))
    elif not found:
        typer.echo("no damaged files were found")
    raise typer.Exit(1 if unrepaired else 0)


def _fix(text: str, possible: bool) -> str:
    return f"penstock repair --apply: {text}" if possible else text

"""`penstock repair`: find and repair damaged files of a stopped pipeline."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import AsJson, Folder, Profile
from penstock.cli.standard import print_result
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
    found: list[dict[str, str | None]] = []
    with StateFolder(config.state).locked(), StateFolder(config.state, ROLE).locked():
        for one in damages(config):
            done = one.repair() if apply and one.repair else None
            facts = {"file": str(one.file), "problem": one.problem, "consequence": one.consequence}
            found.append({**facts, "fix": one.fix, "repaired": done})
            if not as_json:
                command = "penstock repair --apply: " if one.repair else ""
                typer.echo(f"{one.file}: {one.problem}\n  consequence: {one.consequence}")
                typer.echo(f"  repaired: {one.fix}; {done}" if done else f"  fix: {command}{one.fix}")
    if as_json or not found:
        print_result(as_json, found, ["no damaged files were found"])
    raise typer.Exit(1 if any(one["repaired"] is None for one in found) else 0)

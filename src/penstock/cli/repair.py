"""`penstock repair`: what lies damaged in a state folder, and the way to go on without it."""

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
        bool, typer.Option("--apply", help="Do it; what is taken out is kept in .penstock/damaged.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Look for damaged files of a pipeline that is stopped: Kafka's log, spools, Redis, the ledger, checkpoints.

    Names each with what follows from it and what can be done; --apply does it. Exits with 1 when something is damaged,
    and was not repaired.
    """
    config = Config.read(folder, profile)
    if not config.state.is_dir():
        raise Misconfigured(str(config.state), "there is no state folder", "name the folder of the pipeline: --folder")
    left, told = 0, []
    with StateFolder(config.state).held(), StateFolder(config.state, ROLE).held():
        for one in damages(config):
            done = one.repair() if apply and one.repair else None
            left += done is None
            facts = {"file": str(one.file), "problem": one.problem, "consequence": one.consequence}
            told.append({**facts, "fix": one.fix, "repaired": done})
            if not as_json:
                typer.echo(f"{one.file}: {one.problem}\n  what follows: {one.consequence}")
                typer.echo(
                    f"  repaired: {one.fix}; {done}"
                    if done
                    else f"  what to do: {_fix(one.fix, one.repair is not None)}"
                )
    if as_json:
        typer.echo(json.dumps(told, ensure_ascii=False))
    elif not told:
        typer.echo("nothing is damaged, as far as files tell")
    raise typer.Exit(1 if left else 0)


def _fix(text: str, possible: bool) -> str:
    return f"penstock repair --apply: {text}" if possible else text

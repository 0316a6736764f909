"""`penstock audit --deep`: every row of all stores and results, compared once with the channels."""

from dataclasses import replace
from pathlib import Path

import typer

from penstock.audit.balance import Balance
from penstock.audit.judge import Doubt, unique
from penstock.core.errors import PenstockError
from penstock.pipeline.deep import Deep, merged
from penstock.pipeline.load import load
from penstock.pipeline.running import Running
from penstock.pipeline.services import here
from penstock.pipeline.wiring import Wiring


def deepened(found: Balance, folder: Path, profile: str | None, pipeline: Path | None) -> Balance:
    """The balance, with what a comparison of everything finds. What it cannot compare is a doubt."""
    wiring = Wiring.read(folder, profile)
    try:
        description = load(pipeline or Running.file_in(wiring))
        deep = Deep(description, here(wiring), _say)
        deep.run()
    except PenstockError as error:
        doubt = Doubt("store", "--deep", f"stores and results were not compared with their channels: {error}")
        return replace(found, doubts=unique((*found.doubts, doubt)))
    doubts = [one for one in found.doubts if not (one.kind == "store" and one.subject in deep.checked)]
    return replace(found, discrepancies=merged(found.discrepancies, deep), doubts=unique((*doubts, *deep.doubts)))


def _say(text: str) -> None:
    typer.echo(text, err=True)

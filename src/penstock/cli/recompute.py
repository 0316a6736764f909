"""`penstock audit --recompute`: a query again, as a batch over the log, beside its live result."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from penstock.analysis.replay import Difference, Verdict
from penstock.operate.comparison import Report
from penstock.operate.recompute import recompute as compared
from penstock.pipeline.config import Config
from penstock.pipeline.load import load
from penstock.plan.checks import check
from penstock.run.analyse import engine
from penstock.run.queries import result_writers
from penstock.run.services import here

_SHOWN = 50

_WORDS = {
    Verdict.EXACT: "exactly equal",
    Verdict.BOUNDED: "within bounds",
    Verdict.PERISHED: "perished",
    Verdict.WAITING: "on their way",
    Verdict.EARLIER: "of an earlier life",
    Verdict.UNTOLD: "not to be told",
    Verdict.DIFFERENT: "different",
}


def recompute(folder: Path, profile: str | None, pipeline: Path, query: str, as_json: bool, wait: float = 70.0) -> int:
    """Recompute a query of the pipeline in this file and compare it with its result; the exit code.

    0: equal, 1: rows differ, 2: it cannot be told; an error is raised when it cannot be done at all.
    """
    description = load(pipeline)
    config = here(Config.read(folder, profile))
    check(description, config)
    chosen = description.query(query)
    _say("starting Spark")
    with engine(description, config, log=None) as spark:
        channels = config.bind()
        spark = replace(spark, writers=result_writers(channels, description, spark))
        report = compared(spark, channels, description, config, chosen, _say, wait)
    if as_json:
        typer.echo(json.dumps(report.to_json(), ensure_ascii=False))
    else:
        show(report)
    return report.code


def _say(text: str) -> None:
    typer.echo(f"{text} …", err=True)


def show(report: Report) -> None:
    """The comparison as text: who holds what, the rows that differ, and the verdict."""
    for channel, until in report.covered.items():
        beyond = sum(report.ends[channel].values()) - sum(until.values())
        rest = f"; {beyond:,} after it are not committed yet" if beyond else ", which is all that it holds"
        typer.echo(f"{report.query} has covered {channel} up to {_offsets(until)}{rest}")
    for one in report.gone:
        typer.echo(
            f"{one.channel}: partition {one.partition} has lost its offsets {one.first:,}–{one.last:,}: retention"
        )
    for holder in report.judged:
        counts = [f"{holder.counts[verdict]:,} {label}" for verdict, label in _WORDS.items() if holder.counts[verdict]]
        typer.echo(f"{holder.holder}: {', '.join(counts) or 'no rows'}")
    differing = _grouped(report)
    for names, difference in list(differing)[:_SHOWN]:
        _show_difference(report, names, difference)
    if len(differing) > _SHOWN:
        typer.echo(f"and {len(differing) - _SHOWN:,} more rows; --json prints all")
    typer.echo(_verdict(report))


def _offsets(until: Any) -> str:
    return ", ".join(f"{partition}:{offset}" for partition, offset in sorted(until.items()))


def _grouped(report: Report) -> list[tuple[str, Difference]]:
    """The rows that differ, each once with all who hold it so."""
    holders: dict[tuple[bytes, str], list[str]] = {}
    first: dict[tuple[bytes, str], Difference] = {}
    for one in report.judged:
        for difference in one.differences:
            same = (difference.key, json.dumps([difference.how, difference.columns], sort_keys=True))
            holders.setdefault(same, []).append(one.holder)
            first.setdefault(same, difference)
    return [(", ".join(names), first[same]) for same, names in holders.items()]


def _show_difference(report: Report, names: str, one: Difference) -> None:
    record = report.record_of(one)
    typer.echo(f"\n{one.key.decode(errors='replace')} {one.how} in {names}" + (f": it {record}" if record else ""))
    for there, row in () if one.columns else (("held", one.held), ("recomputed", one.recomputed)):
        if row is not None and row.value is not None:
            typer.echo(f"    {there} {row.value.decode(errors='replace')}")
    for name, (held, due) in one.columns.items():
        typer.echo(f"    {name}: held {_json(held)}, recomputed {_json(due)}")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _verdict(report: Report) -> str:
    differing = {one.key for holder in report.judged for one in holder.differences}
    rows = "1 row differs" if len(differing) == 1 else f"{len(differing):,} rows differ"
    if report.maybe_late:
        late = f"{report.late:,} records came" if report.late else "some records may have come"
        return f"\nIt cannot be told: {rows}, {late} too late for the stream, and it is not known which."
    if not report.told:
        return "It cannot be told: every row may hold records from the part of the log that is gone."
    if not report.equal:
        return f"\n{rows} from what the log gives."
    left_out = f", without the {report.late:,} that came too late" if report.late and report.late_left_out else ""
    return f"Equal: every row that was compared is what the log gives{left_out}."

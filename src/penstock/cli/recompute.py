"""`penstock audit --recompute`: compute a query again from the log, and compare the result."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.analysis.replay import Difference, Verdict
from penstock.cli.standard import inform_start, print_result
from penstock.operate.recompute import Report
from penstock.operate.recompute import recompute as compared
from penstock.pipeline.config import Config
from penstock.pipeline.load import load
from penstock.plan.checks import check
from penstock.run.analyse import engine
from penstock.run.queries import result_writers
from penstock.run.services import with_running_services

_MAX_ROWS = 50

_LABELS = {
    Verdict.EXACT: "exactly equal",
    Verdict.BOUNDED: "within bounds",
    Verdict.PERISHED: "expired",
    Verdict.WAITING: "in flight",
    Verdict.EARLIER: "of an earlier generation",
    Verdict.UNKNOWN: "unknown",
    Verdict.DIFFERENT: "different",
}


def recompute(folder: Path, profile: str | None, pipeline: Path, query: str, as_json: bool, wait: float = 70.0) -> int:
    """Recompute a query of the pipeline in this file and compare it with its result; the exit code.

    0: equal, 1: rows differ, 2: unknown. Raises when the query cannot be recomputed.
    """
    description = load(pipeline)
    config = with_running_services(Config.read(folder, profile))
    check(description, config)
    found = description.query(query)
    inform_start("starting Spark")
    with engine(description, config, log=None) as spark:
        channels = config.bind()
        spark = replace(spark, writers=result_writers(channels, description, spark))
        report = compared(spark, channels, description, config, found, inform_start, wait)
    print_result(as_json, report.to_json(), report_lines(report))
    return report.code


def report_lines(report: Report) -> Iterator[str]:
    """The comparison: the counts of each copy, the rows that differ, and the verdict."""
    for channel, until in report.covered.items():
        beyond = sum(report.ends[channel].values()) - sum(until.values())
        rest = f"; {beyond:,} later offsets are not committed yet" if beyond else ", its end"
        yield f"{report.query} has read {channel} up to {_offsets(until)}{rest}"
    for one in report.gone:
        yield f"{one.channel}: retention removed offsets {one.first:,}–{one.last:,} of partition {one.partition}"
    for copy in report.judged:
        counts = [f"{copy.counts[verdict]:,} {label}" for verdict, label in _LABELS.items() if copy.counts[verdict]]
        yield f"{copy.holder}: {', '.join(counts) or 'no rows'}"
    differing = _grouped(report)
    for names, difference in differing[:_MAX_ROWS]:
        yield from _difference(report, names, difference)
    if len(differing) > _MAX_ROWS:
        yield f"and {len(differing) - _MAX_ROWS:,} more rows; --json lists all"
    yield _verdict(report)


def _offsets(until: Any) -> str:
    return ", ".join(f"{partition}:{offset}" for partition, offset in sorted(until.items()))


def _grouped(report: Report) -> list[tuple[str, Difference]]:
    """The rows that differ, each once with the copies that have it."""
    found: dict[tuple[bytes, str], tuple[list[str], Difference]] = {}
    for copy in report.judged:
        for difference in copy.differences:
            same = (difference.key, json.dumps([difference.how, difference.columns], sort_keys=True))
            found.setdefault(same, ([], difference))[0].append(copy.holder)
    return [(", ".join(names), difference) for names, difference in found.values()]


def _difference(report: Report, names: str, one: Difference) -> Iterator[str]:
    record = report.record_of(one)
    yield f"\n{one.key.decode(errors='replace')} {one.how} in {names}" + (f": {record}" if record else "")
    for label, row in () if one.columns else (("held", one.held), ("recomputed", one.recomputed)):
        if row is not None and row.value is not None:
            yield f"    {label} {row.value.decode(errors='replace')}"
    for name, (held, due) in one.columns.items():
        yield f"    {name}: held {_json(held)}, recomputed {_json(due)}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _verdict(report: Report) -> str:
    differing = {one.key for copy in report.judged for one in copy.differences}
    rows = "1 row differs" if len(differing) == 1 else f"{len(differing):,} rows differ"
    if report.maybe_late:
        late = f"{report.late:,} records came" if report.late else "records may have come"
        return f"\nUnknown: {rows}, and {late} too late for the stream; which ones is not recorded."
    if not report.conclusive:
        return "Unknown: every row may include records that retention has removed from the log."
    if not report.equal:
        return f"\n{rows} from the recomputed result."
    left_out = f", without {report.late:,} late records" if report.late and report.late_left_out else ""
    return f"Equal: every compared row is the same as the recomputed one{left_out}."

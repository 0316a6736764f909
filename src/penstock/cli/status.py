"""`penstock status`: the state of the running pipeline."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from penstock.audit.judge import EXIT_CODES, Verdict
from penstock.cli.options import AsJson, Folder, Profile
from penstock.cli.standard import console, print_table
from penstock.core.clock import SystemClock
from penstock.core.errors import Unavailable
from penstock.core.text import printable
from penstock.pipeline.config import Config
from penstock.run.services import RunningPipeline, Services, with_running_services
from penstock.run.status import Status
from penstock.supervise.folder import DiskSpace, StateFolder
from penstock.supervise.process import tail
from penstock.supervise.supervisor import last_line, repair_hint

_WITH_REASON = {"waiting", "ended", "missing", "reading"}


def status(folder: Folder = Path(), profile: Profile = None, as_json: AsJson = False) -> None:
    """Show the state of the running pipeline: rates, lag, latency and memory of each part, and alarms.

    Exit code: 0 when nothing is missing, 1 when records are missing, 2 on an error, 3 when the result is unknown.
    """
    config = Config.read(folder, profile)
    if StateFolder(config.state).owner() is None and (services := Services.find(config)) is not None:
        show_services(services, as_json)
        return
    running = RunningPipeline.find(config)
    try:
        found = Status.read(with_running_services(config).bind(), running.status)
    except Unavailable as error:
        _show_unavailable(config, error)
        raise typer.Exit(EXIT_CODES[Verdict.NOT_KNOWN]) from error
    verdict = found.verdict(SystemClock().now())
    if as_json:
        typer.echo(json.dumps({"run": running.to_json(), "verdict": verdict, **found.to_json()}, ensure_ascii=False))
    else:
        show(running, found, verdict)
    raise typer.Exit(EXIT_CODES[verdict])


def _show_unavailable(config: Config, error: Unavailable) -> None:
    """Without the channels: print what the disk and the logs of Kafka show."""
    typer.echo(f"penstock: {error}", err=True)
    if full := DiskSpace(config.state, config.local.reserve).shortage():
        typer.echo(f"penstock: {full}", err=True)
    for log in sorted((config.state / "logs").glob("kafka-*.log")):
        if line := last_line(lines := tail(log, 20)):
            typer.echo(f"penstock: {log} ends with: {printable(line)}{repair_hint(lines)}", err=True)


def show_services(services: Services, as_json: bool) -> None:
    """The services of `penstock up`, without a pipeline."""
    if as_json:
        typer.echo(json.dumps({"run": None, "services": asdict(services)}))
        return
    state = "up" if services.up else "starting"
    typer.echo(
        f"no pipeline runs here; the services are {state}: {services.where}; start a pipeline: penstock run FILE"
    )


def show(running: RunningPipeline, found: Status, verdict: Verdict) -> None:
    screen = console()
    page = f"the page is at {running.page}, " if running.page else ""
    screen.print(f"{running.pipeline}: {page}its channels are at {running.channels}")
    parts = Table("part", "state", "records", "records/s", "lag", "p50 ms", "p95 ms", "p99 ms", "max ms")
    for name, figures in sorted(found.nodes.items()):
        latency = figures.get("latency") or {}
        parts.add_row(
            name,
            str(figures.get("state") or ""),
            _number(figures.get("count")),
            _number(figures.get("rate")),
            _number(figures.get("lag")),
            *(_number(latency.get(name)) for name in ("p50", "p95", "p99", "max")),
        )
    print_table(parts, range(2, 9), screen)
    if (queries := _queries(found.nodes, SystemClock().now())).rows:
        screen.print(queries)
    for name, figures in sorted(found.nodes.items()):
        if figures.get("state") in _WITH_REASON and (why := figures.get("note") or figures.get("why")):
            screen.print(f"{name} is {figures['state']}: {why}")
    for name, used in sorted(found.usage.items()):
        if used.get("deaths"):
            times = "once" if used["deaths"] == 1 else f"{used['deaths']:,} times"
            down = "" if used.get("pid") else ", and is not running"
            screen.print(
                f"{name} crashed {times}{down}: {printable(str(used.get('error')))}", markup=False, style="yellow"
            )
    for alarm in found.alarms:
        screen.print(f"alarm: {printable(alarm['text'])}", markup=False, style="red")
    screen.print(_memory(found.usage))
    more = "" if verdict is Verdict.WHOLE else "; for details: penstock audit"
    screen.print(f"verdict: {verdict}{more}")


def _queries(nodes: Mapping[str, Mapping[str, Any]], now: int) -> Table:
    """The last batch of each query, as Spark reports it, and its age."""
    columns = ("query", "mode", "in/s", "batch ms", "planning · work · commit", "state rows", "state MiB", "cache")
    table = Table(
        *columns, "restored ms", "watermark behind s", "event time skew s", "late", "as of",
        title="Last batches", title_justify="left",
    )  # fmt: skip
    table.columns[0].no_wrap = table.columns[4].no_wrap = True
    for column in table.columns[2:]:
        column.justify = "right"
    for name, figures in sorted(nodes.items()):
        if name.startswith("query:") and (at := figures.get("at")) is not None:
            took, store = figures.get("times") or {}, figures.get("store") or {}
            table.add_row(
                name.removeprefix("query:"),
                str(figures.get("mode") or ""),
                _number(figures.get("rate_in")),
                _number(took.get("all")),
                " · ".join(_number(took.get(part)) for part in ("planning", "work", "commit")),
                _number(store.get("rows")),
                _number((store["memory"] + store["disk"]) / 2**20) if store else "",
                _share(store.get("hits", 0), store.get("misses", 0)),
                _number(store.get("restored")),
                *(_number(_seconds(figures.get(name))) for name in ("behind", "skew")),
                _number(figures.get("late")),
                f"{max(0, now - at) / 1e6:,.0f} s ago",
            )
    return table


def _share(hits: int, misses: int) -> str:
    return f"{hits / (hits + misses):.0%}" if hits + misses else ""


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1_000


def _number(value: object) -> str:
    if not isinstance(value, int | float):
        return ""
    return f"{value:,.1f}" if isinstance(value, float) and value < 1000 else f"{value:,.0f}"


def _memory(usage: Mapping[str, Mapping[str, Any]]) -> str:
    each = ", ".join(f"{name} {used['memory'] / 2**20:,.0f}" for name, used in usage.items())
    return f"memory: {sum(used['memory'] for used in usage.values()) / 2**20:,.0f} MiB ({each})"

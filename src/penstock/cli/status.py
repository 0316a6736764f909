"""`penstock status`: the state of the running pipeline."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from penstock.audit.judge import EXIT_CODES, Verdict
from penstock.cli.options import AsJson, Folder, Profile
from penstock.cli.standard import inform, print_result, table
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
    if StateFolder(config.state).owner() is None and (services := Services.at(config.state)) is not None:
        state = f"the services are {'up' if services.up else 'starting'}: {services.where}"
        line = f"no pipeline runs here; {state}; start a pipeline: penstock run FILE"
        print_result(as_json, {"run": None, "services": asdict(services)}, [line])
        return
    running = RunningPipeline.find(config)
    try:
        found = Status.read(with_running_services(config).bind(), running.status)
    except Unavailable as error:
        _show_unavailable(config, error)
        raise typer.Exit(EXIT_CODES[Verdict.NOT_KNOWN]) from error
    verdict = found.verdict(SystemClock().now())
    document = {"run": running.to_json(), "verdict": verdict, **found.to_json()}
    print_result(as_json, document, _parts(running, found, verdict))
    raise typer.Exit(EXIT_CODES[verdict])


def _show_unavailable(config: Config, error: Unavailable) -> None:
    """Without the channels: print what the disk and the logs of Kafka show."""
    inform(f"penstock: {error}")
    if full := DiskSpace(config.state, config.local.reserve).shortage():
        inform(f"penstock: {full}")
    for log in sorted((config.state / "logs").glob("kafka-*.log")):
        if line := last_line(lines := tail(log, 20)):
            inform(f"penstock: {log} ends with: {printable(line)}{repair_hint(lines)}")


def _parts(running: RunningPipeline, found: Status, verdict: Verdict) -> Iterator[str | Text | Table]:
    page = f"the page is at {running.page}, " if running.page else ""
    yield f"{running.pipeline}: {page}its channels are at {running.channels}"
    columns = ("part", "state", "records", "records/s", "lag", "p50 ms", "p95 ms", "p99 ms", "max ms")
    parts = table(*columns, right=range(2, 9))
    for name, figures in sorted(found.nodes.items()):
        latency = figures.get("latency") or {}
        numbers = [*map(figures.get, ("count", "rate", "lag")), *map(latency.get, ("p50", "p95", "p99", "max"))]
        parts.add_row(name, str(figures.get("state") or ""), *map(_number, numbers))
    yield parts
    if (queries := _queries(found.nodes, SystemClock().now())).rows:
        yield queries
    for name, figures in sorted(found.nodes.items()):
        if figures.get("state") in _WITH_REASON and (why := figures.get("note") or figures.get("why")):
            yield f"{name} is {figures['state']}: {why}"
    for name, used in sorted(found.usage.items()):
        if used.get("deaths"):
            times = "once" if used["deaths"] == 1 else f"{used['deaths']:,} times"
            down = "" if used.get("pid") else ", and is not running"
            yield Text(f"{name} crashed {times}{down}: {printable(str(used.get('error')))}", "yellow")
    for alarm in found.alarms:
        yield Text(f"alarm: {printable(alarm['text'])}", "red")
    memory = {name: used["memory"] / 2**20 for name, used in found.usage.items()}
    each = ", ".join(f"{name} {used:,.0f}" for name, used in memory.items())
    yield f"memory: {sum(memory.values()):,.0f} MiB ({each})"
    yield f"verdict: {verdict}" + ("" if verdict is Verdict.WHOLE else "; for details: penstock audit")


def _queries(nodes: Mapping[str, Mapping[str, Any]], now: int) -> Table:
    """The last batch of each query, as Spark reports it, and its age."""
    columns = (
        "query", "mode", "in/s", "batch ms", "planning · work · commit", "state rows", "state MiB", "cache",
        "restored ms", "watermark behind s", "event time skew s", "late", "as of",
    )  # fmt: skip
    shown = table(*columns, right=range(2, 13), title="Last batches")
    shown.columns[0].no_wrap = shown.columns[4].no_wrap = True
    for name, figures in sorted(nodes.items()):
        if name.startswith("query:") and (at := figures.get("at")) is not None:
            took, store = figures.get("times") or {}, figures.get("store") or {}
            shown.add_row(
                name.removeprefix("query:"),
                str(figures.get("mode") or ""),
                _number(figures.get("rate_in")),
                _number(took.get("all")),
                " · ".join(_number(took.get(part)) for part in ("planning", "work", "commit")),
                _number(store.get("rows")),
                _number((store["memory"] + store["disk"]) / 2**20) if store else "",
                _share(store.get("hits", 0), store.get("misses", 0)),
                _number(store.get("restored")),
                *(_number(None if ms is None else ms / 1_000) for ms in map(figures.get, ("behind", "skew"))),
                _number(figures.get("late")),
                f"{max(0, now - at) / 1e6:,.0f} s ago",
            )
    return shown


def _share(hits: int, misses: int) -> str:
    return f"{hits / (hits + misses):.0%}" if hits + misses else ""


def _number(value: object) -> str:
    if not isinstance(value, int | float):
        return ""
    return f"{value:,.1f}" if isinstance(value, float) and value < 1000 else f"{value:,.0f}"

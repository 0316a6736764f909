"""`penstock query`: SQL over channels and results; the rows go to standard output."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Annotated

import orjson
import typer
from rich.cells import cell_len, set_cell_size

from penstock.analysis.interactive import InteractiveQuery, Result, exactly
from penstock.cli.options import (
    AsJson,
    OptionalFolder,
    Profile,
    Servers,
    find_channels,
    parse_duration,
    parse_time,
    require_channels,
)
from penstock.cli.standard import Output, inform
from penstock.core.clock import Clock, Micros, SystemClock
from penstock.core.contracts import Channels, Offsets
from penstock.core.errors import Misconfigured
from penstock.core.text import counted, printable
from penstock.operate.adhoc_query import AdhocQuery, followed, spark
from penstock.pipeline.config import Config
from penstock.pipeline.load import load
from penstock.pipeline.pipeline import OPTIONS
from penstock.pipeline.sql import is_file, read_file
from penstock.run.services import RunningPipeline
from penstock.supervise.process import stop_on_signals

_POLL = 0.2
_BEGINNING, _LATEST = "beginning", "latest"


def query(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[FILE] SQL",
            help="The SQL, or a .sql file; before it, the file of the pipeline, if it does not run in this folder.",
            show_default=False,
        ),
    ],
    since: Annotated[
        str,
        typer.Option(
            "--from", metavar="beginning|latest|TIME", help="The first records to read. A time is 10m (ago), or a date."
        ),
    ] = _LATEST,
    length: Annotated[
        str | None, typer.Option("--for", metavar="DURATION", help="Stop after this time.", show_default="no limit")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Stop after this number of rows.", show_default="no limit")
    ] = None,
    watermark: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="How late a record may be. Rows are then printed once, when final."),
    ] = None,
    schema: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[CHANNEL=]DDL",
            help="The columns of a channel, as DDL. May be repeated.",
            show_default="as declared, or found in the records",
        ),
    ] = None,
    as_json: AsJson = False,
    servers: Servers = None,
    folder: OptionalFolder = None,
    profile: Profile = None,
) -> None:
    """Query channels and results with SQL, and print rows until Ctrl-C.

    A row of an aggregation is printed each time it changes, with its grouping columns first. The query writes to no
    channel and leaves no files.

    Exit code: 0 on success, also when the output is closed; 2 when the query cannot run.
    """
    file, sql = _file_and_sql(arguments)
    out, clock = Output(), SystemClock()
    start = since if since in (_BEGINNING, _LATEST) else parse_time("--from", since)
    seconds = None if length is None else parse_duration("--for", length).total_seconds()
    with stop_on_signals() as stop:
        request = _request(sql, file, folder, profile, servers, schema or (), watermark)
        require_channels(request.channels, request.names)
        inform("starting Spark …")
        with spark(request, inform, stop) as (engine, scratch):
            offsets = {name: _offsets(request.channels, name, start) for name in request.names}
            printer = RowPrinter(out, as_json, limit, stop)
            with followed(engine, request, offsets, scratch, printer.take) as running:
                inform(f"reading {', '.join(request.names)} {_start_text(start)}; Ctrl-C stops")
                _wait(running, stop, seconds, clock)
                running.look()
    inform(_summary(printer.count, running))


def _file_and_sql(arguments: Sequence[str]) -> tuple[Path | None, str]:
    """The file of the pipeline, if given; and the SQL, or the name of its file."""
    if len(arguments) > 2 or (len(arguments) == 2 and not arguments[0].endswith(".py")):
        problem = f"{counted(len(arguments), 'argument')} given"
        raise Misconfigured("penstock query", problem, 'write [FILE.py] "SELECT …"')
    return (Path(arguments[0]) if len(arguments) == 2 else None), arguments[-1]


def _request(
    sql: str,
    file: Path | None,
    folder: Path | None,
    profile: str | None,
    servers: str | None,
    schema: Sequence[str],
    watermark: str | None,
) -> AdhocQuery:
    base = folder or (Path() if file is None else file.parent)
    config = Config.read(base, profile)
    channels = find_channels(base, profile, servers)
    if file is None and servers is None and (running := RunningPipeline.at(config.state)) is not None and running.file:
        file = Path(running.file)
    request = AdhocQuery(sql, channels, config, None if file is None else load(file))
    if is_file(sql):
        # Other options in the file are for a query with a result channel.
        sql_file = read_file(Path(sql), sql, OPTIONS)
        request = replace(request, sql=sql_file.text, file=sql, where=sql_file.options.get("where"))
        watermark = watermark or sql_file.options.get("watermark")
    late = None if watermark is None else parse_duration("--watermark", watermark)
    return replace(request, schemas=_schemas(schema, request.names), watermark=late).checked()


def _schemas(options: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    found = {}
    for one in options:
        name, equals, ddl = one.partition("=")
        if equals:
            found[name.strip()] = ddl
        elif len(names) == 1:
            found[names[0]] = one
        else:
            raise Misconfigured("--schema", f"the query reads {' and '.join(names)}", "name one: --schema CHANNEL=…")
    return found


def _offsets(channels: Channels, name: str, start: str | Micros) -> Offsets:
    if isinstance(start, int):
        return channels.since(name, start)
    bounds = channels.bounds(name)
    return {partition: low if start == _BEGINNING else end for partition, (low, end) in bounds.items()}


def _start_text(start: str | Micros) -> str:
    return {_BEGINNING: "from the beginning", _LATEST: "from now on"}.get(str(start), "from that time on")


def _wait(running: InteractiveQuery, stop: Event, seconds: float | None, clock: Clock) -> None:
    started, warned = clock.elapsed(), False
    while not stop.wait(_POLL):
        if error := running.look():
            raise error
        if not running.reads:
            started = clock.elapsed()
        if running.late and not warned:
            inform("some rows arrived after the watermark, and are dropped")
            warned = True
        if seconds is not None and clock.elapsed() - started >= seconds:
            return


def _summary(rows: int, running: InteractiveQuery) -> str:
    dropped = []
    if running.refused:
        dropped.append(f"{counted(running.refused, 'record')} that did not fit the schema")
    if running.late:
        dropped.append(f"{counted(running.late, 'late row')}")
    return counted(rows, "row") + (f"; dropped: {', '.join(dropped)}" if dropped else "")


# --- rows as text -----------------------------------------------------------------------------------------------------


def row_line(row: str, keys: Sequence[str] = (), as_json: bool = False, terminal: bool = False) -> bytes:
    """A row, which is a JSON object, as a line: JSON, or text within the width of the terminal."""
    text = row if as_json else _row_text(exactly(row), keys)
    if terminal and not as_json and cell_len(text) > (width := shutil.get_terminal_size().columns):
        text = set_cell_size(text, max(1, width - 1)) + "…"
    return text.encode() + b"\n"


def _row_text(row: Mapping[str, object], keys: Sequence[str]) -> str:
    """`city=Oslo, n=3`; of an aggregation, the grouping values first: `Oslo → n=3`."""
    rest = ", ".join(f"{printable(name)}={_value(value)}" for name, value in row.items() if name not in keys)
    if not keys:
        return rest
    return f"{', '.join(_value(row[name]) for name in keys)} → {rest}"


def _value(value: object) -> str:
    match value:
        case str():
            return printable(_timestamp(value))
        case {"start": str(start), "end": str(end), **more} if not more:
            return f"{printable(_timestamp(start))} – {printable(_timestamp(end))}"
        case None | bool() | dict() | list():
            return printable(orjson.dumps(value).decode())
    return str(value)


def _timestamp(text: str) -> str:
    return text.replace(".000Z", "Z")


class RowPrinter:
    """Prints rows and counts them. Sets `stop` at the limit, or when the output is closed."""

    def __init__(self, out: Output, as_json: bool, limit: int | None, stop: Event) -> None:
        self._out, self._as_json, self._limit, self._stop = out, as_json, limit, stop
        self.count = 0

    def take(self, result: Result, rows: Iterator[str]) -> None:
        if result.whole and self.count and not self._as_json:
            self._print(b"\n")
        for row in rows:
            if self._stop.is_set() or not self._print(row_line(row, result.keys, self._as_json, self._out.terminal)):
                return
            self.count += 1
            if self.count == self._limit:
                self._stop.set()

    def _print(self, line: bytes) -> bool:
        try:
            if not self._out.closed():
                self._out.write([line])
                return True
        except BrokenPipeError:
            pass
        self._stop.set()
        return False

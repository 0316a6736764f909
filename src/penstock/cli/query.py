"""`penstock query`: SQL over channels and results, its rows on standard output as they come."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Annotated

import orjson
import typer
from rich.cells import cell_len, set_cell_size

from penstock.analysis.interactive import InteractiveQuery, Result, exactly
from penstock.cli.channels import found, there
from penstock.cli.options import AsJson, Profile, parse_duration, parse_time
from penstock.cli.standard import Output
from penstock.core.clock import Clock, Micros, SystemClock
from penstock.core.contracts import Channels, Offsets
from penstock.core.errors import Misconfigured
from penstock.core.text import counted, printable
from penstock.operate.adhoc_query import Asked, followed, spark
from penstock.pipeline.config import Config
from penstock.pipeline.description import Description
from penstock.pipeline.load import load
from penstock.pipeline.pipeline import OPTIONS
from penstock.pipeline.sql_file import is_file, read_file
from penstock.run.run_file import Running
from penstock.supervise.signals import stop_on_signals

_PAUSE = 0.2
_BEGINNING, _LATEST = "beginning", "latest"


def query(
    asked: Annotated[
        list[str],
        typer.Argument(
            metavar="[FILE] SQL",
            help="The pipeline whose channels it reads, if not the one that runs here; and the query, or a .sql file.",
            show_default=False,
        ),
    ],
    since: Annotated[
        str, typer.Option("--from", metavar="beginning|latest|MOMENT", help="Where to begin: 10m ago, or a time.")
    ] = _LATEST,
    length: Annotated[
        str | None, typer.Option("--for", metavar="DURATION", help="End after so long.", show_default="at Ctrl-C")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="End after so many rows.", show_default="never")] = None,
    watermark: Annotated[
        str | None, typer.Option(metavar="DURATION", help="How late a record may be, for rows that come when final.")
    ] = None,
    schema: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[CHANNEL=]DDL", help="The columns of a channel, as DDL.", show_default="as declared or seen"
        ),
    ] = None,
    as_json: AsJson = False,
    servers: Annotated[
        str | None,
        typer.Option(
            "--channels",
            "--servers",
            "--bootstrap-server",
            metavar="ADDRESS",
            help="Where the channels lie: host:port of a Kafka, or kafka://…, redis://…, file://PATH.",
            show_default="what runs in the folder",
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Where the pipeline runs: the folder that holds .penstock.", show_default="beside FILE, or here"
        ),
    ] = None,
    profile: Profile = None,
) -> None:
    """Query channels and results with SQL: print rows as they come, until Ctrl-C.

    A row of an aggregation is printed whenever it changes, with the columns by which it groups in front. Nothing is
    written into a channel, and nothing is left behind. Exits with 0, also when nobody reads the output any more; 2 when
    the query cannot be run.
    """
    file, sql = _parted(asked)
    out, clock = Output(), SystemClock()
    begin = since if since in (_BEGINNING, _LATEST) else parse_time("--from", since)
    seconds = None if length is None else parse_duration("--for", length).total_seconds()
    with stop_on_signals() as stop:
        question = _asked(sql, file, folder, profile, servers, schema or (), watermark)
        there(question.channels, question.names)
        _say("starting Spark …")
        with spark(question, _say, stop) as (engine, place):
            start = {name: _positions(question.channels, name, begin) for name in question.names}
            printed = Printed(out, Shown(as_json, out.terminal), limit, stop)
            with followed(engine, question, start, place, printed.take) as following:
                _say(f"reading {', '.join(question.names)} {_told(begin)}; Ctrl-C ends it")
                _wait(following, stop, seconds, clock)
                following.look()
    _say(_summary(printed.count, following))


def _parted(asked: Sequence[str]) -> tuple[Path | None, str]:
    """The pipeline's file, if one is told, and the SQL, or the name of its file."""
    if len(asked) > 2 or (len(asked) == 2 and not asked[0].endswith(".py")):
        raise Misconfigured("penstock query", f"{len(asked)} arguments are given", 'write [FILE.py] "SELECT …"')
    return (Path(asked[0]) if len(asked) == 2 else None), asked[-1]


def _asked(
    sql: str,
    file: Path | None,
    folder: Path | None,
    profile: str | None,
    servers: str | None,
    schema: Sequence[str],
    watermark: str | None,
) -> Asked:
    home = folder or (Path() if file is None else file.parent)
    config = Config.read(home, profile)
    channels = found(home, profile, servers)
    plain = Asked(sql, channels, config, _described(file, config, servers))
    if is_file(sql):
        # What such a file declares beyond these is for a query that goes on and keeps its rows.
        own = read_file(Path(sql), sql, OPTIONS)
        plain = replace(plain, sql=own.text, file=sql, where=own.options.get("where"))
        watermark = watermark or own.options.get("watermark")
    late = None if watermark is None else parse_duration("--watermark", watermark)
    return replace(plain, schemas=_schemas(schema, plain.names), watermark=late).checked()


def _described(file: Path | None, config: Config, servers: str | None) -> Description | None:
    """What is declared: by the file, or by that of the pipeline that runs here."""
    if file is None and servers is None and (running := Running.at(config.state)) is not None and running.file:
        file = Path(running.file)
    return None if file is None else load(file)


def _schemas(told: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    found = {}
    for one in told:
        name, equals, ddl = one.partition("=")
        if equals:
            found[name.strip()] = ddl
        elif len(names) == 1:
            found[names[0]] = one
        else:
            raise Misconfigured("--schema", f"it reads {' and '.join(names)}", "say of which: --schema CHANNEL=…")
    return found


def _positions(channels: Channels, name: str, begin: str | Micros) -> Offsets:
    if isinstance(begin, int):
        return channels.since(name, begin)
    bounds = channels.bounds(name)
    return {partition: low if begin == _BEGINNING else end for partition, (low, end) in bounds.items()}


def _told(begin: str | Micros) -> str:
    return {_BEGINNING: "from the beginning", _LATEST: "from now on"}.get(str(begin), "from then on")


def _wait(following: InteractiveQuery, stop: Event, seconds: float | None, clock: Clock) -> None:
    began, said = clock.elapsed(), False
    while not stop.wait(_PAUSE):
        if error := following.look():
            raise error
        if not following.reads:
            began = clock.elapsed()
        if following.late and not said:
            _say("some rows came after the watermark had passed them, and are left out")
            said = True
        if seconds is not None and clock.elapsed() - began >= seconds:
            return


def _summary(rows: int, following: InteractiveQuery) -> str:
    left_out = []
    if following.refused:
        left_out.append(f"{counted(following.refused, 'record')} that did not fit")
    if following.late:
        left_out.append(f"{counted(following.late, 'row')} that came late")
    return counted(rows, "row") + (f"; left out: {', '.join(left_out)}" if left_out else "")


def _say(text: str) -> None:
    typer.echo(text, err=True)


# --- rows as text -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shown:
    """How rows are shown: as they come, in JSON; or for people, within the width of their terminal."""

    as_json: bool = False
    terminal: bool = False

    def line(self, row: str, keys: Sequence[str] = ()) -> bytes:
        """A row, which comes as a JSON object, with its end of line."""
        if self.as_json:
            return row.encode() + b"\n"
        text = row_text(exactly(row), keys)
        if self.terminal and cell_len(text) > (width := shutil.get_terminal_size().columns):
            text = set_cell_size(text, max(1, width - 1)) + "…"
        return text.encode() + b"\n"


def row_text(row: Mapping[str, object], keys: Sequence[str]) -> str:
    """`city=Oslo, n=3`; of an aggregation the values by which it groups in front: `Oslo → n=3`."""
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
    """Times end in whole seconds more often than not."""
    return text.replace(".000Z", "Z")


class Printed:
    """What was printed so far. It stops all when that is enough, or when nobody reads it any more."""

    def __init__(self, out: Output, shown: Shown, most: int | None, stop: Event) -> None:
        self._out, self._shown, self._most, self._stop = out, shown, most, stop
        self.count = 0

    def take(self, result: Result, rows: Iterator[str]) -> None:
        if result.whole and self.count and not self._shown.as_json:
            self._print(b"\n")
        for row in rows:
            if self._stop.is_set() or not self._print(self._shown.line(row, result.keys)):
                return
            self.count += 1
            if self.count == self._most:
                self._stop.set()

    def _print(self, line: bytes) -> bool:
        try:
            if not self._out.gone():
                self._out.write([line])
                return True
        except BrokenPipeError:
            pass
        self._stop.set()
        return False

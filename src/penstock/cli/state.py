"""`penstock state`: read the state of queries, and repartition it.

A running pipeline is asked over HTTP, by its page or its analysis. For a stopped one, Spark reads the checkpoint.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import httpx
import orjson
import typer

from penstock.analysis.checkpoints.rescale import Rescaled, ready
from penstock.analysis.checkpoints.rescale import rescale as rescale_state
from penstock.analysis.query import Query
from penstock.cli.options import AsJson, File, OptionalFolder, PipelineFile, Profile
from penstock.cli.standard import inform, inform_start, print_result
from penstock.core.clock import SystemClock, is_running
from penstock.core.contracts import Channels, Entry
from penstock.core.errors import Misconfigured, PenstockError, Refused, Unavailable
from penstock.core.scan import scan as scan_channel
from penstock.core.text import printable
from penstock.deliver.feed import Feed
from penstock.deliver.states import ADDRESS, PROCESS, combine, newest_row, readings
from penstock.pipeline.config import Config
from penstock.pipeline.load import load
from penstock.run.analyse import spark_session
from penstock.run.services import RunningPipeline, with_running_services
from penstock.run.status import Status
from penstock.supervise.folder import StateFolder

_TIMEOUT = 50.0
_UNUSED = ("127.0.0.1:1", "redis://127.0.0.1:1")
"""Addresses of services that are not used to read a checkpoint."""
_SLOTS = 4

QueryName = Annotated[str, typer.Argument(metavar="QUERY", help="The name of the query, or of its result.")]

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def state() -> None:
    """Read the state of a query, and change its number of partitions."""


@app.command()
def get(
    query: QueryName,
    key: Annotated[str, typer.Argument(help="The key: a JSON array of its values, or the value of a single column.")],
    pipeline: PipelineFile = None,
    folder: OptionalFolder = None,
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Show the newest row of a key and its state.

    Also shows the offsets up to which the query has read. If the pipeline does not run, Spark reads its checkpoint.

    Exit code: 0 when a row or a state exists, 1 when neither does.
    """
    _require_utf8(key)
    found, document = StateReader(pipeline, folder, profile, query).get(key)
    if as_json:
        typer.echo(orjson.dumps(document))
    elif found:
        for line in _lines(document, SystemClock().now()):
            typer.echo(line)
    else:
        inform(f"penstock: {printable(document['error'])}; {printable(document['fix'])}")
    raise typer.Exit(0 if found else 1)


@app.command()
def scan(
    query: QueryName,
    prefix: Annotated[str, typer.Option(help="Only keys whose first column starts with this text.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="The most entries to show.")] = 100,
    pipeline: PipelineFile = None,
    folder: OptionalFolder = None,
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Show the state entries of a query, in any order."""
    _require_utf8(prefix)
    document = StateReader(pipeline, folder, profile, query).scan(prefix, limit)
    if as_json:
        typer.echo(orjson.dumps(document))
        return
    for entry in document["entries"]:
        # Entries of MapState and the like name their variable, and their key within it.
        variable = [entry["variable"]] if "variable" in entry else []
        inner_key = [_json(entry["of"])] if "of" in entry else []
        typer.echo("\t".join([_json(entry["key"]), *variable, *inner_key, _json(entry["value"])]))
    inform(_summary(document, SystemClock().now()))


@app.command()
def rescale(
    file: File,
    query: Annotated[str, typer.Argument(help="The name of the query.", show_default=False)],
    partitions: Annotated[int, typer.Option(min=1, help="The new number of partitions.", show_default=False)],
    folder: OptionalFolder = None,
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Change the number of partitions of a query's state.

    Stop the pipeline first. No state is lost: the next run continues from it. The old checkpoint is kept until then,
    and restored if that run fails.
    """
    description = load(file)
    config = Config.read(folder or file.parent, profile)
    name = description.query(query).name
    checkpoint = f"{config.checkpoints}/{name}"
    with StateFolder(config.state).locked():
        ready(name, checkpoint, partitions, inform_start)
        inform_start("starting Spark")
        with spark_session(description.name, config.spark, _SLOTS, None) as spark:
            rescaled = rescale_state(spark, name, checkpoint, partitions, inform_start)
    print_result(as_json, asdict(rescaled), [rescaled_line(rescaled)])


def rescaled_line(rescaled: Rescaled) -> str:
    again = "; it starts with the last batch, which was not finished" if rescaled.unfinished else ""
    return (
        f"{rescaled.query}: {rescaled.rows:,} rows of state, {rescaled.after} partitions instead of {rescaled.before}, "
        f"in {rescaled.seconds:.1f} s; the next run continues from here{again}"
    )


# --- reading ----------------------------------------------------------------------------------------------------------


class StateReader:
    """Reads the state of one query."""

    def __init__(self, pipeline: Path | None, folder: Path | None, profile: str | None, query: str) -> None:
        self._config = Config.read(folder or (pipeline.parent if pipeline else Path()), profile)
        self._description = load(pipeline or RunningPipeline.file_in(self._config))
        self._query = self._description.query(query)
        self._path = f"/state/{quote(self._query.name, safe='')}"

    def get(self, key: str) -> tuple[bool, dict[str, Any]]:
        """Whether a row or a state exists, and the document."""
        path = f"{self._path}/{quote(key, safe='')}"
        if page := self._page():
            status, document = _fetch(page, path)
            return status == 200, document
        channels = self._channels()
        if analysis := self._analysis(channels):
            _, document = _fetch(analysis, path)
        else:
            document = self._read_checkpoint(lambda spark, lookup: lookup.get(spark, self._query, key))
        row = None
        if channels is not None:
            row = _newest_row(channels, self._query, document["key"])
        elif document["note"] is None:
            document["note"] = "the channels are not running: the newest row is unknown"
        status, document = combine(document, row)
        return status == 200, document

    def scan(self, prefix: str, limit: int) -> dict[str, Any]:
        path = f"{self._path}?{urlencode({'prefix': prefix, 'limit': limit})}"
        if address := self._page() or self._analysis(self._channels()):
            return _fetch(address, path)[1]
        return self._read_checkpoint(lambda spark, lookup: lookup.scan(spark, self._query, prefix, limit))

    def _page(self) -> str | None:
        running = RunningPipeline.at(self._config.state)
        return running.page if running is not None and running.pipeline == self._description.name else None

    def _channels(self) -> Channels | None:
        """The channels, if they are running."""
        try:
            channels = with_running_services(self._config).bind()
            channels.names()
        except (Misconfigured, Unavailable):
            return None
        return channels

    def _analysis(self, channels: Channels | None) -> str | None:
        """The address of the analysis, if it has reported its status recently."""
        if channels is None or self._description.status not in channels.names():
            return None
        status = Status.read(channels, self._description.status).processes.get(PROCESS, {})
        return status.get(ADDRESS) if is_running(status.get("at"), SystemClock().now()) else None

    def _read_checkpoint(self, read: Callable[[Any, Any], dict[str, Any]]) -> dict[str, Any]:
        from penstock.analysis import state_lookup as lookup
        from penstock.run.analyse import engine

        inform("the pipeline is not running; starting Spark to read its checkpoint …")
        try:
            config = with_running_services(self._config)
        except Misconfigured:
            config = self._config.with_services(*_UNUSED)
        with engine(self._description, config, log=None) as spark:
            return read(spark, lookup)


def _fetch(address: str, path: str) -> tuple[int, dict[str, Any]]:
    """The document, with status 200 or 404; raises for other statuses."""
    try:
        # A local address is not fetched through the proxy of the environment.
        response = httpx.get(address + path, timeout=_TIMEOUT, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unavailable(address, str(error) or type(error).__name__) from None
    status = response.status_code
    try:
        document = orjson.loads(response.content)
    except orjson.JSONDecodeError:
        if status == 200:
            raise Unavailable(address, "another program answers there: the response is not JSON") from None
        document = {"error": response.text[:200]}
    if status == 200 or (status == 404 and "keys" in document):
        return status, document
    raise _error(status, document)


def _error(status: int, document: Mapping[str, Any]) -> PenstockError:
    where, error = str(document.get("place", "the request")), str(document.get("error", f"status {status}"))
    if status == 503:
        return Unavailable(where, error.removeprefix(f"{where} is "))
    if status == 400:
        return Refused(where, error)
    return Misconfigured(where, error, str(document.get("fix", "")))


def _newest_row(channels: Channels, query: Query, key: object) -> dict[str, Any] | None:
    """The newest row of a key: reads the whole result channel."""
    keys = {orjson.dumps(one) for one in readings(key)}

    def entries() -> Iterator[Entry]:
        for entry in scan_channel(channels, query.into):
            try:
                if orjson.dumps(orjson.loads(entry.key or b"")) in keys:
                    yield entry
            except orjson.JSONDecodeError:
                continue

    if query.into not in channels.names():
        return None
    feed = Feed(query.into, "")
    feed.push(entries())
    return newest_row(feed, key)


def _require_utf8(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Refused("the key", "it is not UTF-8") from None


# --- text -------------------------------------------------------------------------------------------------------------


def _lines(document: Mapping[str, Any], now: int) -> Iterator[str]:
    yield f"{document['query']} {_json(document['key'])}"
    if (row := document["row"]) is not None:
        at = row["position"]
        version = f"version {row['version']}, " if row["version"] is not None else ""
        yield f"row    {_json(row['row'])}"
        yield f"       {version}partition {at['partition']}, offset {at['offset']}, {_ago(at['at'], now)}"
    if document["state"] is not None:
        yield f"state  {_json(document['state'])}"
        yield f"       {_position(document['position'], now)}"
    if document["note"]:
        yield f"note   {printable(document['note'])}"


def _summary(document: Mapping[str, Any], now: int) -> str:
    if document["note"]:
        return f"{document['query']}: {document['note']}; its rows are in the channel {document['into']}"
    more = "; there are more, raise --limit" if document["more"] else ""
    count = len(document["entries"])
    return f"{count:,} {'entry' if count == 1 else 'entries'}{more}; {_position(document['position'], now)}"


def _position(position: Mapping[str, Any], now: int) -> str:
    """The batch, when it ended, and the offsets up to which it has read."""
    reads = (
        f"{channel} up to {', '.join(f'{part}:{offset}' for part, offset in sorted(offsets.items()))}"
        for channel, offsets in (position["reads"] or {}).items()
    )
    ended = f", {_ago(position['at'], now)}" if position["at"] else ""
    return "; ".join([f"as of batch {position['batch']}{ended}", *reads])


def _ago(at: int, now: int) -> str:
    seconds = max(0, now - at) / 1e6
    if seconds < 600:
        return f"{seconds:.1f} s ago"
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at / 1e6))


def _json(value: object) -> str:
    return printable(orjson.dumps(value).decode())

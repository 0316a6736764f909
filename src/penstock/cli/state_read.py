"""`penstock state get` and `scan`: what a query remembers now.

A pipeline that runs is asked, by its page or by its analysis; of one that does not, Spark reads the checkpoint.
"""

import time
import urllib.request
from collections.abc import Iterator, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode

import orjson
import typer

from penstock.analysis.query import Query
from penstock.cli.options import AsJson, Profile
from penstock.core.clock import SystemClock, is_running
from penstock.core.contracts import Channels, Entry
from penstock.core.errors import Misconfigured, PenstockError, Refused, Unavailable
from penstock.core.scan import scan as scan_channel
from penstock.core.text import printable
from penstock.deliver.feed import Feed
from penstock.deliver.states import ADDRESS, PROCESS, combine, newest_row, readings
from penstock.pipeline.config import Config
from penstock.pipeline.description import Description
from penstock.pipeline.load import load
from penstock.run.services import RunningPipeline, with_running_services
from penstock.run.status import Status

_PATIENCE = 50.0
_NOWHERE = ("127.0.0.1:1", "redis://127.0.0.1:1")
"""Where channels are that nobody will read."""

QueryName = Annotated[str, typer.Argument(metavar="QUERY", help="The query, or the result that it makes.")]
Pipeline = Annotated[
    Path | None, typer.Option("--pipeline", metavar="FILE", help="The file of the pipeline.", show_default="what runs")
]
Where = Annotated[
    Path | None,
    typer.Option(
        help="Where the pipeline runs: the folder that holds .penstock.", show_default="beside the file, or here"
    ),
]


def get(
    query: QueryName,
    key: Annotated[str, typer.Argument(help="A JSON array of the key's values, or the bare value of a single one.")],
    pipeline: Pipeline = None,
    folder: Where = None,
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Show what a query remembers of a key: its newest row, and its state as of the last batch, with its position.

    Exits with 1 when there is neither.
    """
    _require_text(key)
    asked = _Asked.of(pipeline, folder, profile, query)
    found, answer = asked.get(key)
    if as_json:
        typer.echo(orjson.dumps(answer).decode())
    elif found:
        for line in _told(answer, SystemClock().now()):
            typer.echo(line)
    else:
        typer.echo(f"penstock: {printable(answer['error'])}; {printable(answer['fix'])}", err=True)
    raise typer.Exit(0 if found else 1)


def scan(
    query: QueryName,
    prefix: Annotated[str, typer.Option(help="Only keys whose first column begins with this.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="So many entries at most.")] = 100,
    pipeline: Pipeline = None,
    folder: Where = None,
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Show the state of a query, entry by entry, as of its last batch; in no order."""
    _require_text(prefix)
    asked = _Asked.of(pipeline, folder, profile, query)
    answer = asked.scan(prefix, limit)
    if as_json:
        typer.echo(orjson.dumps(answer).decode())
        return
    for entry in answer["entries"]:
        # Of the user's own state, what entry of which variable it is.
        names = [entry[name] for name in ("variable",) if name in entry]
        within = [_json(entry["of"])] if "of" in entry else []
        typer.echo("\t".join([_json(entry["key"]), *names, *within, _json(entry["value"])]))
    typer.echo(_summed_up(answer, SystemClock().now()), err=True)


# --- who is asked -----------------------------------------------------------------------------------------------------


class _Asked:
    """Whoever can answer for a pipeline."""

    @classmethod
    def of(cls, pipeline: Path | None, folder: Path | None, profile: str | None, query: str) -> Self:
        config = Config.read(folder or (pipeline.parent if pipeline else Path()), profile)
        return cls(load(pipeline or RunningPipeline.file_in(config)), config, query)

    def __init__(self, description: Description, config: Config, query: str) -> None:
        self._description, self._wiring = description, config
        self._query = description.query(query)

    def get(self, key: str) -> tuple[bool, dict[str, Any]]:
        """Whether there is something, and what."""
        path = f"/state/{quote(self._query.name, safe='')}/{quote(key, safe='')}"
        if page := self._page():
            status, answer = _fetched(page, path)
            return status == 200, answer
        channels = self._channels()
        if analysis := self._analysis(channels):
            _, answer = _fetched(analysis, path)
        else:
            answer = self._read(lambda spark, lookup: lookup.get(spark, self._query, key))
        row = None
        if channels is not None:
            row = _newest_row(channels, self._query, answer["key"])
        elif answer["note"] is None:
            answer["note"] = "its channels are not up: the newest row is not known"
        status, document = combine(answer, row)
        return status == 200, document

    def scan(self, prefix: str, limit: int) -> dict[str, Any]:
        path = f"/state/{quote(self._query.name, safe='')}?{urlencode({'prefix': prefix, 'limit': limit})}"
        if address := self._page() or self._analysis(self._channels()):
            return _fetched(address, path)[1]
        return self._read(lambda spark, lookup: lookup.scan(spark, self._query, prefix, limit))

    def _page(self) -> str | None:
        running = RunningPipeline.at(self._wiring.state)
        return running.page if running is not None and running.pipeline == self._description.name else None

    def _channels(self) -> Channels | None:
        """The channels, if they are up."""
        try:
            channels = with_running_services(self._wiring).bind()
            channels.names()
        except (Misconfigured, Unavailable):
            return None
        return channels

    def _analysis(self, channels: Channels | None) -> str | None:
        """Where the analysis can be asked, if it has spoken lately."""
        if channels is None or self._description.status not in channels.names():
            return None
        said = Status.read(channels, self._description.status).processes.get(PROCESS, {})
        return said.get(ADDRESS) if is_running(said.get("at"), SystemClock().now()) else None

    def _read(self, ask: Any) -> dict[str, Any]:
        # Spark is imported for those who need it.
        from penstock.analysis.state import lookup
        from penstock.run.analyse import engine

        typer.echo("the pipeline does not run; starting Spark to read its checkpoint …", err=True)
        try:
            config = with_running_services(self._wiring)
        except Misconfigured:
            config = self._wiring.with_services(*_NOWHERE)
        with engine(self._description, config, log=None) as spark:
            answer: dict[str, Any] = ask(spark, lookup)
        return answer


# What runs here is not asked through a proxy, whatever the environment says of the world outside.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _fetched(address: str, path: str) -> tuple[int, dict[str, Any]]:
    """The answer, with 200 or 404; otherwise raises what was wrong."""
    try:
        with _DIRECT.open(address + path, timeout=_PATIENCE) as answer:
            return answer.status, orjson.loads(answer.read())
    except HTTPError as error:
        status, body = error.code, error.read()
    except orjson.JSONDecodeError:
        raise Unavailable(address, "something else answers there: it is no JSON") from None
    except (URLError, OSError, HTTPException) as error:
        raise Unavailable(address, str(getattr(error, "reason", error)) or type(error).__name__) from None
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = {"error": body.decode(errors="replace")[:200]}
    if status == 404 and "keys" in document:
        return status, document
    raise _raised(status, document)


def _raised(status: int, document: Mapping[str, Any]) -> PenstockError:
    place, error = str(document.get("place", "the question")), str(document.get("error", f"it answered {status}"))
    if status == 503:
        return Unavailable(place, error.removeprefix(f"{place} is "))
    if status == 400:
        return Refused(place, error)
    return Misconfigured(place, error, str(document.get("fix", "")))


def _newest_row(channels: Channels, query: Query, key: object) -> dict[str, Any] | None:
    """The newest row of a key, by a look at all that the result channel holds."""
    wanted = {orjson.dumps(one) for one in readings(key)}

    def its() -> Iterator[Entry]:
        for entry in scan_channel(channels, query.into):
            try:
                if orjson.dumps(orjson.loads(entry.key or b"")) in wanted:
                    yield entry
            except orjson.JSONDecodeError:
                continue

    if query.into not in channels.names():
        return None
    feed = Feed(query.into, "")
    feed.push(its())
    return newest_row(feed, key)


def _require_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Refused("the key", "it is not UTF-8") from None


# --- what people are shown --------------------------------------------------------------------------------------------


def _told(answer: Mapping[str, Any], now: int) -> Iterator[str]:
    yield f"{answer['query']} {_json(answer['key'])}"
    if (row := answer["row"]) is not None:
        at = row["position"]
        version = f"version {row['version']}, " if row["version"] is not None else ""
        yield f"row    {_json(row['row'])}"
        yield f"       {version}partition {at['partition']}, offset {at['offset']}, {_ago(at['at'], now)}"
    if answer["state"] is not None:
        yield f"state  {_json(answer['state'])}"
        yield f"       {_position(answer['position'], now)}"
    if answer["note"]:
        yield f"note   {printable(answer['note'])}"


def _summed_up(answer: Mapping[str, Any], now: int) -> str:
    if answer["note"]:
        return f"{answer['query']}: {answer['note']}; its rows are in the channel {answer['into']}"
    more = ", and there are more: --limit" if answer["more"] else ""
    entries = len(answer["entries"])
    return f"{entries:,} {'entry' if entries == 1 else 'entries'}{more}; {_position(answer['position'], now)}"


def _position(position: Mapping[str, Any], now: int) -> str:
    """Which batch, when it ended, and up to which offsets it has read."""
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

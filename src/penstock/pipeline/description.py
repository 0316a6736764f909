"""What a user writes: sources, channels, queries, stores and pages, by name. Nothing here starts anything."""

import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, get_args

from penstock.analysis.query import NUMBER, PAYLOAD, TABLES, Emit, Json, Late, Mode, Query, Shape, Static
from penstock.collect.shedding import Shed
from penstock.collect.ways import kind_of, source_at
from penstock.core.addresses import redacted
from penstock.core.clock import duration
from penstock.core.contracts import Source
from penstock.core.errors import Misconfigured, located
from penstock.core.text import did_you_mean
from penstock.pipeline.schema import ddl
from penstock.pipeline.sql_file import SqlFile, folder, named, read

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,199}")
Function = TypeVar("Function", bound=Callable[..., Any])
Choice = TypeVar("Choice", bound=StrEnum)


class Delivery(StrEnum):
    """How often a record may take effect, if something fails on its way."""

    EXACTLY_ONCE = "exactly once"
    AT_LEAST_ONCE = "at least once"
    AT_MOST_ONCE = "at most once"


@dataclass(frozen=True)
class Channel:
    name: str
    schema: str | None = None
    event_time: str | None = None
    partitions: int = 2
    replicas: int | None = None
    keep: timedelta | None = None
    ahead: timedelta = timedelta(hours=1)
    unique: str | None = None
    result_of: str | None = None
    compacted: bool = False
    config: Mapping[str, str] = field(default_factory=dict)
    table: bool = False
    json: Json = "strict"

    @property
    def dead(self) -> str:
        """The channel of what did not fit into this one."""
        return f"{self.name}.dead"

    @property
    def shape(self) -> Shape:
        return Shape(self.name, self.schema, self.event_time, self.ahead, self.unique, self.table, self.json)


@dataclass(frozen=True)
class SourceSpec:
    name: str
    url: str
    into: str
    key: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    made: Source | None = None
    """A source of the user's own."""
    shed: Shed | None = None
    overlap: int = 1
    overlap_by: str | tuple[str, ...] | None = None


@dataclass(frozen=True)
class StoreSpec:
    channel: str
    url: str
    ttl: timedelta | None


ROWS = "rows"
"""The name of the data that a chart is drawn from."""


@dataclass(frozen=True)
class PageSpec:
    channel: str
    title: str
    doc: str
    chart: "Mapping[str, Any] | Callable[[], Any] | Any | None"

    def spec(self) -> Mapping[str, Any] | None:
        """The chart as a Vega-Lite specification; None for a table. Misconfigured when it is neither."""
        made: Any = self.chart
        if callable(made) and not hasattr(made, "to_dict"):
            made = made()
        if hasattr(made, "to_dict"):
            made = made.to_dict()
        if not (made is None or isinstance(made, Mapping)):
            way_out = "give a Vega-Lite dict or an Altair chart"
            raise Misconfigured(f"page {self.channel}", f"its chart is {type(made).__name__}", way_out)
        return made


@dataclass(frozen=True)
class Description:
    """A whole pipeline, checked and frozen."""

    name: str
    channels: Mapping[str, Channel]
    sources: tuple[SourceSpec, ...]
    queries: tuple[Query, ...]
    stores: tuple[StoreSpec, ...]
    pages: tuple[PageSpec, ...]
    statics: tuple[Static, ...] = ()
    delivery: Delivery = Delivery.EXACTLY_ONCE
    lines: Mapping[str, str] = field(default_factory=dict, compare=False)
    """By what errors call it, such as `channel rsvps`: the file and line at which it is declared."""

    @contextmanager
    def locating(self) -> Iterator[None]:
        """Raise what goes wrong within with the line at which it was declared."""
        with _locating(self.lines):
            yield

    @property
    def sifted(self) -> tuple[Channel, ...]:
        """The channels of which some records may be refused: those with a schema, and those that queries read."""
        read = {name for query in self.queries for name in query.inputs}
        candidates = (channel for channel in self.channels.values() if not channel.result_of)
        return tuple(channel for channel in candidates if channel.schema or channel.name in read)

    @property
    def lakes(self) -> tuple[StoreSpec, ...]:
        """The stores that Spark fills; loaders fill the others."""
        return tuple(store for store in self.stores if store.url.startswith("delta:"))

    @property
    def validated(self) -> tuple[Channel, ...]:
        """The channels whose dead letters need a query of their own: those of the others come from their lake."""
        kept = {store.channel for store in self.lakes}
        return tuple(channel for channel in self.sifted if channel.name not in kept)

    @property
    def heartbeats(self) -> str:
        return f"penstock.{self.name}.heartbeats"

    @property
    def bookmarks(self) -> str:
        return f"penstock.{self.name}.bookmarks"

    @property
    def status(self) -> str:
        return f"penstock.{self.name}.status"


class Pipeline:
    """The front door: a list of parts under names. `describe()` checks how they fit."""

    def __init__(self, name: str, *, delivery: str = "exactly once") -> None:
        """`delivery`: how often a record may take effect if something fails on its way: "exactly once", "at least
        once" or "at most once". What each hop gives is told by `penstock plan`.
        """
        self.name = _named("pipeline", name)
        self._delivery = _one_of(f"pipeline {name}", "delivery", Delivery, delivery)
        self._statics: dict[str, Static] = {}
        self._channels: dict[str, Channel] = {}
        self._sources: list[SourceSpec] = []
        self._queries: list[Query] = []
        self._stores: list[StoreSpec] = []
        self._pages: list[PageSpec] = []
        self._lines: dict[str, str] = {}
        self._unmade: dict[str, str] = {}
        """By line: queries that no function was given to yet."""

    def channel(
        self,
        name: str,
        *,
        schema: str | type | None = None,
        event_time: str | None = None,
        partitions: int = 2,
        replicas: int | None = None,
        keep: str | None = None,
        ahead: str = "1 hour",
        unique: str | None = None,
        compacted: bool = False,
        table: bool = False,
        json: Json = "strict",
        config: Mapping[str, str] | None = None,
    ) -> None:
        """Say what a channel holds. A channel that a source fills or a query reads need not be said otherwise.

        `schema`: DDL, or a class with annotated fields. `event_time`: a column or a SQL expression over them, such as
        `"timestamp_millis(mtime)"`. `keep`: how long records stay; forever if it is not said. `unique`: by what queries
        know a record that the channel holds twice: its "number", the whole "payload", or a column such as `"rsvp_id"`.
        `compacted`: only the last record of each key has to stay. `table`: so it is, and the last record of a key is
        the row of that key; one without a value deletes it. `json`: "strict" takes what RFC 8259 allows, "lenient" what
        Spark reads by default, see docs/dlq.md. `config`: further settings, in the words of the middleware, such as
        `{"max.message.bytes": "5000000"}` for Kafka.
        """
        place = f"channel {name}"
        if name in self._channels:
            raise Misconfigured(place, "it is declared twice", "keep one, or give one of them another name")
        columns = None if schema is None else ddl(schema)
        _text(place, "event_time", event_time)
        self._lines[place] = _line()
        self._channels[_named("channel", name)] = Channel(
            name,
            columns,
            event_time,
            _some(place, partitions),
            replicas,
            _span(place, keep),
            _duration(place, ahead),
            _unique_by(place, unique, columns),
            compacted=compacted or table,
            table=table,
            json=_json(place, json),
            config={name: str(value) for name, value in (config or {}).items()},
        )

    def source(
        self,
        url: str | Source,
        *,
        into: str,
        key: str | Sequence[str] = (),
        name: str | None = None,
        shed: Shed | None = None,
        overlap: int = 1,
        overlap_by: str | Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        """Bring what arrives at `url` into a channel; or what a source of your own gives.

        `key`: the field, or fields, of the payload that decide the partition. `shed`: what is dropped, and counted,
        when there is too much; nothing is if it is not said. `overlap`: how many connections hear a feed that cannot be
        asked again; `overlap_by` names the field, or fields, by which a record is known that comes by several of them;
        its whole payload if it is not said. Which further options there are depends
        on the way in, and stands in docs/collect.md; for one, of a WebSocket `numbered=`, the field in which the
        outside tells sender, epoch and number, and `resume=`, whether it can go on after a number.
        """
        into = _named("channel", into)
        keys = _names(f"source {name or into}", "key", key)
        if isinstance(url, str):
            spec = SourceSpec(_named("source", name or into), url, into, keys, options)
        else:
            if options:
                raise Misconfigured(f"source {url.name}", f"{', '.join(options)} is said beside it", "say it to it")
            spec = SourceSpec(_named("source", url.name), kind_of(url), into, keys, made=url)
        alike = overlap_by if overlap_by is None or isinstance(overlap_by, str) else tuple(overlap_by)
        self._lines.setdefault(f"source {spec.name}", _line())
        self._sources.append(replace(spec, shed=shed, overlap=overlap, overlap_by=alike))

    def query(
        self,
        name: str | None = None,
        *,
        into: str | None = None,
        key: str | Sequence[str] = (),
        sql: str | SqlFile | None = None,
        mode: str | None = None,
        where: str | Callable[..., Any] | None = None,
        watermark: str | None = None,
        late: str | None = None,
        lateness: str | None = None,
        emit: str | None = None,
        every: str | None = None,
        keep: str | None = None,
        partitions: int = 1,
    ) -> Callable[[Function], Function]:
        """A continuous query: a decorator for a function of DataFrames; with `sql`, complete as it is.

        `sql` is a text, or the name of a file beside the pipeline that ends in ".sql" and may say the rest by itself.
        The function's parameters name the channels that it reads; `into` names the one that it writes (the function's
        own name if not said); `key` names the columns that tell its rows apart. `where` says which records it wants, as
        SQL or as a function of a frame: what it does not want is counted as filtered. `watermark` says how late a
        record may be: what comes later is counted as late, and what comes twice as duplicate. `late` says what becomes
        of the late ones: "drop", "dead letters", or "update", which lets them change their row for as long as
        `lateness` says. Rows are written when they change, at most `every` so often if that is said; with
        emit="final" once, when no record can change them any more.
        """

        if callable(name):
            problem = "it is declared without parentheses"
            raise Misconfigured(f"query {name.__name__}", problem, 'write @app.query(key="…")')
        if name is not None:
            _named("query", name)
        if isinstance(sql, str) and named(sql):
            given = {word: value for word, value in locals().items() if word in WORDS}
            return self._of_file(_beside() / sql, sql, given, name)

        line = _line()

        def declare(
            declared: str,
            inputs: tuple[str, ...],
            build: Callable[..., Any] | str,
            doc: str,
            file: str | None = None,
            at: str | None = None,
        ) -> None:
            place = f"query {declared}"
            if file is None:
                self._lines.setdefault(place, at or line)
            target = into or declared
            wanted = _one_of(place, "mode", Mode, Mode.AUTO if mode is None else mode)
            when = _one_of(place, "emit", Emit, Emit.CHANGE if emit is None else emit)
            belated = _one_of(place, "late", Late, Late.DROP if late is None else late)
            _timely(place, watermark, when, belated, lateness)
            if target in self._channels:
                raise Misconfigured(place, f"it writes into {target}, which is there already", "name another channel")
            keys = _names(place, "key", key)
            if not keys:
                raise Misconfigured(place, "it has no key", "name the columns that tell its rows apart: key=…")
            self._channels[_named("channel", target)] = Channel(
                target, partitions=_some(place, partitions), keep=_span(place, keep), result_of=declared
            )
            self._queries.append(
                Query(
                    _named("query", declared), inputs, target, keys, build, wanted,
                    _span(place, watermark), _span(place, every), where, doc, when, belated, _span(place, lateness),
                    file=file,
                )
            )  # fmt: skip

        def decorate(function: Function) -> Function:
            declared = name or function.__name__
            inputs = tuple(inspect.signature(function).parameters)
            if not inputs:
                raise Misconfigured(f"query {declared}", "it has no parameter", "name the channels that it reads")
            self._unmade.pop(line, None)
            declare(declared, inputs, function, inspect.getdoc(function) or "", at=_line_of(function))
            return function

        if sql is not None:
            if name is None:
                raise Misconfigured("query", "a query in SQL has no name", 'say it: app.query("name", sql=…, key=…)')
            text, doc, file = (sql, "", None) if isinstance(sql, str) else (sql.text, sql.doc, sql.shown)
            # Imported here: a parser that pipelines without SQL need not wait for.
            from penstock.pipeline.sql import tables

            if not (inputs := tables(f"query {name}", text)):
                raise Misconfigured(f"query {name}", "it reads no channel", "name one after FROM")
            declare(name, inputs, text, doc, file)
        else:
            self._unmade[line] = f"query {name}" if name else "query"
        return decorate

    def queries(self, path: str) -> None:
        """A query of each file in a folder beside the pipeline that ends in ".sql", in alphabetical order.

        Its name is that of the file; the comments at its top say the rest in the words of `query`: `-- key: city`.
        """
        for one in folder(_beside() / path, path):
            self._of_file(one, f"{path.rstrip('/')}/{one.name}", {}, None)

    def _of_file(
        self, path: Path, shown: str, given: Mapping[str, Any], name: str | None
    ) -> Callable[[Function], Function]:
        """A query of a file; what is wrong with it is told with its line."""
        file, known = read(path, shown, WORDS), WORDS
        told = {word: value for word, value in given.items() if value != known[word].default}
        for word, line in file.lines.items():
            if word in told:
                raise Misconfigured(f"{shown}:{line}", f"the pipeline says {word}= as well", "say it once")
        if not (told.get("key") or file.words.get("key")):
            raise Misconfigured(
                shown, "it has no key", 'name the columns that tell its rows apart, in a line at its top: "-- key: …"'
            )
        try:
            told |= {word: _read_as(known[word].default, value) for word, value in file.words.items()}
            return self.query(name or path.stem, sql=file, **told)
        except Misconfigured as error:
            raise Misconfigured(file.place(error.problem), error.problem, error.way_out) from error

    def static(
        self,
        name: str,
        rows: str | Sequence[Mapping[str, Any]] | Callable[[], Iterable[Mapping[str, Any]]],
        *,
        schema: str | type,
        refresh: str | None = None,
    ) -> None:
        """A small table that does not flow, for queries to join with: they name it like a channel.

        `rows`: a CSV, JSON lines or Parquet file beside the pipeline, a list of dicts, or a function that gives them.
        `schema`: DDL, or a class with annotated fields. `refresh`: how often it is read again; when it has changed, the
        queries that name it go on with the new rows.
        """
        place = f"table {name}"
        if name in self._statics:
            raise Misconfigured(place, "it is declared twice", "keep one, or give one of them another name")
        if isinstance(rows, str) and not rows.endswith(TABLES):
            raise Misconfigured(place, f"nobody can read {rows} here", f"its name has to end in {', '.join(TABLES)}")
        if refresh is not None and not (isinstance(rows, str) or callable(rows)):
            raise Misconfigured(place, "its rows stand in the pipeline, and never change", "leave refresh= out")
        self._lines[place] = _line()
        self._statics[_named("table", name)] = Static(name, rows, ddl(schema), _span(place, refresh), _beside())

    def store(self, channel: str, url: str, *, ttl: str | None = None) -> None:
        """Keep a channel in a store: `redis://…` for live tables, `delta://PATH` for all its records."""
        if not isinstance(url, str):
            raise Misconfigured(f"store of {channel}", f"its address is {url!r}", 'write one such as "redis://"')
        self._lines.setdefault(redacted(f"store {url}"), _line())
        self._stores.append(StoreSpec(channel, url, _span(f"store {url}", ttl)))

    def page(self, channel: str, *, chart: Any = None, title: str | None = None, doc: str = "") -> None:
        """Show a result on the live page: a Vega-Lite specification, an Altair chart, or a function that makes one.

        Without `chart`, its rows are shown as a table.
        """
        if not (chart is None or callable(chart) or hasattr(chart, "to_dict") or isinstance(chart, Mapping)):
            way_out = "give a Vega-Lite dict or an Altair chart, or leave it out for a table"
            raise Misconfigured(f"page {channel}", f"its chart is {type(chart).__name__}", way_out)
        title = title or channel.replace("_", " ")
        for name in (title, channel):
            self._lines.setdefault(f"page {name}", _line())
        self._pages.append(PageSpec(channel, title, doc, chart))

    def describe(self) -> Description:
        """The whole, checked."""
        with _locating(self._lines):
            return self._described()

    def _described(self) -> Description:
        for line, place in self._unmade.items():
            way_out = "write it as a decorator above a function, or give sql=…"
            raise Misconfigured(f"{line}, {place}", "it has neither a function nor sql=", way_out)
        channels = dict(self._channels)
        for source in self._sources:
            channels.setdefault(source.into, Channel(source.into))
            if channels[source.into].result_of:
                raise Misconfigured(
                    f"source {source.name}", f"{source.into} is the result of a query", "name another channel"
                )
        _unique("source", [source.name for source in self._sources])
        numbered = [source.into for source in self._sources if getattr(described(source), "numbered", None) is not None]
        for name in numbered:
            if numbered.count(name) > 1:
                raise Misconfigured(
                    f"channel {name}",
                    "two sources that number their records fill it, and two senders may have one name",
                    "give each source a channel of its own, or let the collector number the records: numbered=None",
                )
        _unique("query", [query.name for query in self._queries])
        for name in self._statics.keys() & channels.keys():
            raise Misconfigured(f"table {name}", "a channel has this name, too", "give one of them another")
        queries = tuple(_whole(query, self._statics, self._delivery) for query in self._queries)
        for query in queries:
            for name in query.inputs:
                _known(_place(query, name), name, [*channels, *self._statics])
        for store in self._stores:
            _known(f"store {store.url}", store.channel, channels)
        kinds = [(store.url.partition(":")[0], store.channel) for store in self._stores]
        for kind, name in kinds:
            if kinds.count((kind, name)) > 1:
                raise Misconfigured(
                    f"channel {name}", f"two stores of the kind {kind} keep it", "keep one of them, or use another kind"
                )
        for source in self._sources:
            if (answers := getattr(described(source), "answers", None)) is not None:
                _known(f"source {source.name}, answers", answers, channels)
                if not channels[answers].result_of:
                    raise Misconfigured(
                        f"source {source.name}, answers",
                        f"{answers} is not the result of a query",
                        "name one that is, of a query that keeps the column origin",
                    )
        for page in self._pages:
            _known(f"page {page.title}", page.channel, channels)
            if not channels[page.channel].result_of:
                raise Misconfigured(
                    f"page {page.title}", f"{page.channel} is not the result of a query", "show one that is"
                )
        _acyclic(self._queries)
        return Description(
            self.name, channels, tuple(self._sources), queries, tuple(self._stores), tuple(self._pages),
            tuple(self._statics.values()), self._delivery, dict(self._lines),
        )  # fmt: skip


def described(source: SourceSpec) -> Source:
    """A source as the pipeline says it; it costs nothing, and nothing is opened."""
    return source.made or source_at(source.url, source.name, source.options)


def _whole(query: Query, statics: Collection[str], delivery: Delivery) -> Query:
    """A query, with what its pipeline knows: which of its names are channels and which tables, and what is wanted."""
    channels = tuple(name for name in query.inputs if name not in statics)
    if not channels:
        raise Misconfigured(f"query {query.name}", "it reads no channel, only static tables", "name a channel, too")
    named = tuple(name for name in query.inputs if name in statics)
    return replace(query, inputs=channels, statics=named, once=delivery is Delivery.AT_MOST_ONCE)


WORDS: Mapping[str, inspect.Parameter] = {
    word: parameter
    for word, parameter in inspect.signature(Pipeline.query).parameters.items()
    if word not in ("self", "name", "sql")
}
"""By what a query is declared, in Python and in the comments of a file with SQL."""


def _read_as(default: object, text: str) -> object:
    """A value that is written in a file, as the pipeline would give it."""
    if isinstance(default, tuple):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if isinstance(default, int):
        if not text.isdecimal():
            raise Misconfigured("", f'"{text}" is no number', "write one such as 2")
        return int(text)
    return text


@contextmanager
def _locating(lines: Mapping[str, str]) -> Iterator[None]:
    try:
        yield
    except Misconfigured as error:
        raise located(error, lines) from error


def _caller() -> FrameType:
    """Whoever calls us, from outside of this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    return frame


def _beside() -> Path:
    """Where the file lies that calls us: what it names is found from there."""
    file = _caller().f_globals.get("__file__")
    return Path(file).absolute().parent if file else Path.cwd()


def _line() -> str:
    """The file and line that calls us."""
    frame = _caller()
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _line_of(function: Callable[..., Any]) -> str | None:
    """The file and line at which a function begins; None of what has none."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code and f"{Path(code.co_filename).name}:{code.co_firstlineno}"


def _place(query: Query, channel: str) -> str:
    """Where a query names a channel."""
    if query.file is None:
        return f"query {query.name}"
    from penstock.pipeline.sql import line_of

    line = line_of(str(query.build), channel)
    return f"{query.file}{f':{line}' if line else ''}, query {query.name}"


def _named(kind: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise Misconfigured(
            f"{kind} {name!r}", "this is not a name", "begin with a letter and use letters, digits, _ and -"
        )
    return name


def _names(place: str, option: str, given: str | Sequence[str]) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(name, str) for name in names):
        raise Misconfigured(place, f"{option}= is {given!r}", f'name columns: {option}="…" or {option}=["…", "…"]')
    return names


def _text(place: str, option: str, given: str | None) -> None:
    if given is not None and not isinstance(given, str):
        raise Misconfigured(place, f"{option}= is {given!r}", f'write it as a text: {option}="…"')


def _json(place: str, given: Json) -> Json:
    if given not in (choices := get_args(Json)):
        raise Misconfigured(place, f'json is "{given}"', f"the choices are {', '.join(choices)}")
    return given


def _one_of(place: str, what: str, choices: type[Choice], given: str) -> Choice:
    try:
        return choices(given)
    except ValueError:
        raise Misconfigured(place, f'{what} is "{given}"', f"the choices are {', '.join(choices)}") from None


def _timely(place: str, watermark: str | None, emit: Emit, late: Late, lateness: str | None) -> None:
    """Refuse what contradicts itself about time."""
    if watermark is None and (emit is Emit.FINAL or late is not Late.DROP or lateness is not None):
        what = (
            "its rows are to come when they are final" if emit is Emit.FINAL else "it says what becomes of late records"
        )
        raise Misconfigured(place, f"{what}, but nothing makes one late", 'say how late a record may be: watermark="…"')
    if (late is Late.UPDATE) != (lateness is not None):
        way_out = 'say both: late="update", lateness="…"'
        raise Misconfigured(place, "late records update their rows only together with lateness=", way_out)
    if late is Late.UPDATE and emit is Emit.FINAL:
        way_out = 'leave emit="final" out, or give the records more time by watermark='
        raise Misconfigured(place, "rows that are final cannot be updated by late records", way_out)


def _some(place: str, partitions: int) -> int:
    if not isinstance(partitions, int) or isinstance(partitions, bool) or partitions < 1:
        raise Misconfigured(place, f"{partitions} partitions are asked for", "ask for one or more")
    return partitions


def _span(place: str, text: str | None) -> timedelta | None:
    return None if text is None else _duration(place, text)


def _duration(place: str, text: str) -> timedelta:
    try:
        return duration(text)
    except ValueError as error:
        raise Misconfigured(place, str(error)) from error
    except (AttributeError, TypeError):
        raise Misconfigured(place, f"{text!r} is not a duration", 'write it as a text, such as "10 seconds"') from None


def _unique_by(place: str, unique: str | None, columns: str | None) -> str | None:
    if unique in (None, NUMBER, PAYLOAD) or unique in (columns or "").replace("`", " ").split():
        return unique
    raise Misconfigured(
        place, f'records cannot be told apart by "{unique}"', f'name a column, or "{NUMBER}", or "{PAYLOAD}"'
    )


def _unique(kind: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise Misconfigured(f"{kind} {name}", "two have this name", "give one of them another: name=…")


def _known(place: str, name: str, channels: Collection[str]) -> None:
    if name not in channels:
        others = f"there are {', '.join(sorted(channels))}" if channels else "declare it: app.channel(…)"
        raise Misconfigured(place, f'there is no channel "{name}"', did_you_mean(name, channels, others))


def _acyclic(queries: Sequence[Query]) -> None:
    reads = {query.into: set(query.inputs) for query in queries}
    for start in reads:
        waiting, passed = list(reads[start]), set[str]()
        while waiting:
            name = waiting.pop()
            if name == start:
                raise Misconfigured(f"channel {start}", "it is made from itself", "write into another channel")
            if name not in passed:
                passed.add(name)
                waiting += reads.get(name, ())


def find_query(description: Description, name: str) -> Query:
    """The query of this name, or the one that makes the result of this name."""
    for query in description.queries:
        if name in (query.name, query.into):
            return query
    names = [query.name for query in description.queries]
    way_out = did_you_mean(name, names, f"its queries are {', '.join(names) or 'none'}")
    raise Misconfigured(f"pipeline {description.name}", f'it has no query "{name}"', way_out)

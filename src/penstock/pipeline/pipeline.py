"""The API to declare a pipeline: channels, sources, queries, stores and pages."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypedDict, TypeVar, Unpack, get_args

from penstock.analysis.query import TABLES, Emit, Json, Late, Mode, Query, Static
from penstock.collect.registry import kind_of
from penstock.collect.shedding import Shed
from penstock.core.contracts import Guarantee, Source
from penstock.core.errors import Misconfigured
from penstock.core.text import did_you_mean, redact
from penstock.pipeline import arguments
from penstock.pipeline.arguments import ddl
from penstock.pipeline.description import (
    Channel,
    Description,
    PageSpec,
    SourceSpec,
    StoreSpec,
)
from penstock.pipeline.sql import SqlFile, is_file, list_files, read_file

Function = TypeVar("Function", bound=Callable[..., Any])
JSON: tuple[Json, ...] = get_args(Json)
DELIVERIES = (Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE)


class QueryOptions(TypedDict, total=False):
    """The options of a query, in Python and in the comments at the top of a SQL file."""

    into: str | None
    """The channel that it writes; the name of the query by default."""
    key: str | Sequence[str]
    """The columns that identify a row of the result."""
    mode: Literal["auto", "real-time", "micro-batch"] | None
    """"auto" by default: real time if Spark supports it for this query and the settings allow it, else micro-batch."""
    where: str | Callable[..., Any] | None
    """The records that it reads, as a SQL condition or a function of a DataFrame. Others are counted as filtered."""
    watermark: str | None
    """How late a record may be. Later records are counted as late, repeated ones as duplicates."""
    late: Literal["drop", "dead letters", "update"] | None
    """What happens to late records; "drop" by default. "update": they update their row during `lateness`."""
    lateness: str | None
    """How long after the watermark a late record can update its row."""
    emit: Literal["change", "final"] | None
    """When rows are written: "change", on each change (default), or "final", once, when they can no longer change."""
    every: str | None
    """The shortest time between two versions of a result, such as "10 seconds"."""
    retention: str | None
    """How long a row of the result is kept after its last change; forever by default."""
    partitions: int
    """The partitions of the result's channel; 1 by default."""


class Pipeline:
    """A streaming pipeline: declare its parts, then run the file with `penstock run`."""

    def __init__(
        self, name: str, *, delivery: Literal["exactly once", "at least once", "at most once"] = "exactly once"
    ) -> None:
        """Create a pipeline.

        `delivery`: how often a record may take effect if something fails on its way. `penstock plan` shows what each
        hop guarantees.
        """
        self.name = arguments.check_name("pipeline", name)
        self._delivery = arguments.check_choice(f"pipeline {name}", "delivery", DELIVERIES, delivery)
        self._statics: dict[str, Static] = {}
        self._channels: dict[str, Channel] = {}
        self._sources: list[SourceSpec] = []
        self._queries: list[Query] = []
        self._stores: list[StoreSpec] = []
        self._pages: list[PageSpec] = []
        self._lines: dict[str, str] = {}
        self._undecorated: dict[str, str] = {}
        """By line: calls of `query` that have not decorated a function yet."""

    def channel(
        self,
        name: str,
        *,
        schema: str | type | None = None,
        event_time: str | None = None,
        partitions: int = 2,
        replicas: int | None = None,
        retention: str | None = None,
        ahead: str = "1 hour",
        unique: str | None = None,
        compacted: bool = False,
        table: bool = False,
        json: Json = "strict",
        config: Mapping[str, str] | None = None,
    ) -> None:
        """Declare a channel. A channel that a source fills needs no declaration if the defaults are right.

        `schema`: DDL, or a class with annotated fields. `event_time`: a column or a SQL expression over them, such as
        `"timestamp_millis(mtime)"`. `partitions`, `replicas`: as in Kafka; the default of `replicas` is that of the
        broker. `retention`: how long records are kept, such as "7 days"; forever by default. `ahead`: how far in the
        future the event time of a record may be; other records become dead letters. `unique`: how queries recognize a
        duplicate: by its "number", by the whole "payload", or by a column such as `"rsvp_id"`. `compacted`: only the
        last record of each key is kept. `table`: compacted, and the last record of a key is the row of that key; a
        record without a value deletes the row. `json`: "strict" accepts what RFC 8259 allows, "lenient" what Spark
        accepts by default, see docs/dlq.md. `config`: further settings of the middleware, such as
        `{"max.message.bytes": "5000000"}` for Kafka.
        """
        location = f"channel {name}"
        if name in self._channels:
            raise Misconfigured(location, "it is declared twice", "remove or rename one of them")
        columns = None if schema is None else ddl(schema)
        arguments.check_text(location, "event_time", event_time)
        self._lines[location] = _line()
        self._channels[arguments.check_name("channel", name)] = Channel(
            name,
            columns,
            event_time,
            arguments.check_partitions(location, partitions),
            replicas,
            arguments.optional_duration(location, retention),
            arguments.check_duration(location, ahead),
            arguments.check_unique_by(location, unique, columns),
            compacted=compacted or table,
            table=table,
            json=arguments.check_choice(location, "json", JSON, json),
            config={name: str(value) for name, value in (config or {}).items()},
        )

    def source(
        self,
        url: str | Source,
        *,
        into: str,
        partition_by: str | Sequence[str] = (),
        name: str | None = None,
        shed: Shed | None = None,
        overlap: int = 1,
        overlap_by: str | Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        """Read a source into a channel.

        `url`: an address such as `ws://…`, or a source object, such as one of `penstock.sources`. `into`: the channel.
        `partition_by`: the fields of the payload that decide the partition. `name`: its name in settings and reports;
        the name of the channel by default. `shed`: which records are dropped, and counted, under overload; none by
        default. `overlap`: the number of parallel connections to a feed that cannot resume. `overlap_by`: the fields
        that identify a record that arrives on several connections; the whole payload by default. `options`: the
        keyword arguments of the class of the source, see docs/sources/.
        """
        into = arguments.check_name("channel", into)
        keys = arguments.check_columns(f"source {name or into}", "partition_by", partition_by)
        if isinstance(url, str):
            spec = SourceSpec(arguments.check_name("source", name or into), url, into, keys, options)
        else:
            if options:
                problem = f"{', '.join(options)} cannot be combined with a source object"
                raise Misconfigured(f"source {url.name}", problem, "set it on the object")
            spec = SourceSpec(arguments.check_name("source", url.name), kind_of(url), into, keys, custom=url)
        by = overlap_by if overlap_by is None or isinstance(overlap_by, str) else tuple(overlap_by)
        self._lines.setdefault(f"source {spec.name}", _line())
        self._sources.append(replace(spec, shed=shed, overlap=overlap, overlap_by=by))

    def query(self, name: str | None = None, **options: Unpack[QueryOptions]) -> Callable[[Function], Function]:
        """Declare a continuous query: a decorator for a function of DataFrames.

        The parameters of the function name the channels and static tables that it reads. `name`: the name of the
        function by default. `options`: see `QueryOptions`; `key` is required.
        """
        if callable(name):
            problem = "it is declared without parentheses"
            raise Misconfigured(f"query {name.__name__}", problem, 'write @app.query(key="…")')
        if name is not None:
            arguments.check_name("query", name)
        _check_options("query", options)
        line = _line()
        self._undecorated[line] = f"query {name}" if name else "query"

        def decorate(function: Function) -> Function:
            declared = name or function.__name__
            inputs = tuple(inspect.signature(function).parameters)
            if not inputs:
                raise Misconfigured(f"query {declared}", "it has no parameter", "name the channels that it reads")
            self._undecorated.pop(line, None)
            self._lines.setdefault(f"query {declared}", _line_of(function) or line)
            self._add_query(declared, inputs, function, inspect.getdoc(function) or "", options)
            return function

        return decorate

    def sql_query(self, name: str, sql: str, **options: Unpack[QueryOptions]) -> None:
        """Declare a continuous query in SQL.

        `sql`: the text, or the name of a file beside the pipeline that ends in ".sql". The comments at the top of a
        file may set options, too: `-- key: city`. `options`: see `QueryOptions`; `key` is required.
        """
        arguments.check_name("query", name)
        _check_options("sql_query", options)
        if is_file(sql):
            self._add_file(_folder() / sql, sql, options, name)
        else:
            self._lines.setdefault(f"query {name}", _line())
            self._add_sql(name, sql, options)

    def sql_queries(self, folder: str) -> None:
        """Declare a query for each SQL file of a folder beside the pipeline, under the name of the file.

        The comments at the top of each file set its options: `-- key: city`.
        """
        for path in list_files(_folder() / folder, folder):
            self._add_file(path, f"{folder.rstrip('/')}/{path.name}", {}, path.stem)

    def static(
        self,
        name: str,
        rows: str | Sequence[Mapping[str, Any]] | Callable[[], Iterable[Mapping[str, Any]]],
        *,
        schema: str | type,
        refresh: str | None = None,
    ) -> None:
        """Declare a small static table for queries to join with. They name it like a channel.

        `rows`: a CSV, JSON lines or Parquet file beside the pipeline, a list of dicts, or a function that returns
        them. `schema`: DDL, or a class with annotated fields. `refresh`: how often it is read again; after a
        change, the queries that read it continue with the new rows.
        """
        location = f"table {name}"
        if name in self._statics:
            raise Misconfigured(location, "it is declared twice", "remove or rename one of them")
        if isinstance(rows, str) and not rows.endswith(TABLES):
            problem = f"the format of {rows} is not supported"
            raise Misconfigured(location, problem, f"the name has to end in {', '.join(TABLES)}")
        if refresh is not None and not (isinstance(rows, str) or callable(rows)):
            raise Misconfigured(location, "its rows are in the pipeline and cannot change", "remove refresh=")
        self._lines[location] = _line()
        static = Static(name, rows, ddl(schema), arguments.optional_duration(location, refresh), _folder())
        self._statics[arguments.check_name("table", name)] = static

    def store(self, channel: str, url: str, *, ttl: str | None = None) -> None:
        """Keep a channel in a store.

        `url`: `redis://…` for tables, `delta://PATH` for all records. `ttl`: how long a row of a table is kept after
        its last change.
        """
        if not isinstance(url, str):
            raise Misconfigured(f"store of {channel}", f"its address is {url!r}", 'write one such as "redis://"')
        self._lines.setdefault(redact(f"store {url}"), _line())
        self._stores.append(StoreSpec(channel, url, arguments.optional_duration(f"store {url}", ttl)))

    def page(self, channel: str, *, chart: Any = None, title: str | None = None, doc: str = "") -> None:
        """Show a result on the live page.

        `chart`: a Vega-Lite specification, an Altair chart, or a function that returns one; without it the page
        shows a table. `title`: the name of the channel by default. `doc`: a text beside the chart.
        """
        if not (chart is None or callable(chart) or hasattr(chart, "to_dict") or isinstance(chart, Mapping)):
            fix = "give a Vega-Lite dict or an Altair chart, or leave it out for a table"
            raise Misconfigured(f"page {channel}", f"its chart is {type(chart).__name__}", fix)
        title = title or channel.replace("_", " ")
        for name in (title, channel):
            self._lines.setdefault(f"page {name}", _line())
        self._pages.append(PageSpec(channel, title, doc, chart))

    def describe(self) -> Description:
        """Check that the parts fit together; return them as immutable data."""
        for line, location in self._undecorated.items():
            fix = "write it as a decorator above a function, or use sql_query"
            raise Misconfigured(f"{line}, {location}", "it has no function", fix)
        channels = dict(self._channels)
        for source in self._sources:
            channels.setdefault(source.into, Channel(source.into))
        queries = tuple(
            replace(
                query,
                inputs=tuple(name for name in query.inputs if name not in self._statics),
                statics=tuple(name for name in query.inputs if name in self._statics),
                once=self._delivery is Guarantee.AT_MOST_ONCE,
            )
            for query in self._queries
        )
        description = Description(
            self.name, channels, tuple(self._sources), queries, tuple(self._stores), tuple(self._pages),
            tuple(self._statics.values()), self._delivery, dict(self._lines),
        )  # fmt: skip
        with description.locating():
            description.check()
        return description

    def _add_query(
        self,
        name: str,
        inputs: tuple[str, ...],
        build: Callable[..., Any] | str,
        doc: str,
        options: QueryOptions,
        file: str | None = None,
    ) -> None:
        location, into = f"query {name}", options.get("into") or name
        emit = arguments.check_choice(location, "emit", Emit, options.get("emit") or Emit.CHANGE)
        late = arguments.check_choice(location, "late", Late, options.get("late") or Late.DROP)
        watermark = arguments.optional_duration(location, options.get("watermark"))
        arguments.check_event_time(location, watermark, emit, late, options.get("lateness"))
        if into in self._channels:
            raise Misconfigured(location, f"it writes into {into}, which is declared already", "name another channel")
        keys = arguments.check_columns(location, "key", options.get("key", ()))
        if not keys:
            raise Misconfigured(location, "it has no key", "name the columns that identify its rows: key=…")
        query = Query(
            arguments.check_name("query", name),
            inputs,
            into,
            keys,
            build,
            arguments.check_choice(location, "mode", Mode, options.get("mode") or Mode.AUTO),
            watermark,
            arguments.optional_duration(location, options.get("every")),
            options.get("where"),
            doc,
            emit,
            late,
            arguments.optional_duration(location, options.get("lateness")),
            file,
        )
        self._channels[arguments.check_name("channel", into)] = Channel(
            into,
            partitions=arguments.check_partitions(location, options.get("partitions", 1)),
            retention=arguments.optional_duration(location, options.get("retention")),
            result_of=name,
        )
        self._queries.append(query)

    def _add_sql(self, name: str, sql: str, options: QueryOptions, doc: str = "", file: str | None = None) -> None:
        # Imported here: the SQL parser is slow to load.
        from penstock.pipeline.sql import tables

        if not (inputs := tables(f"query {name}", sql)):
            raise Misconfigured(f"query {name}", "it reads no channel", "name one after FROM")
        self._add_query(name, inputs, sql, doc, options, file)

    def _add_file(self, path: Path, label: str, options: QueryOptions, name: str) -> None:
        file = read_file(path, label, OPTIONS)
        for option, line in file.lines.items():
            if options.get(option):
                raise Misconfigured(f"{label}:{line}", f"the pipeline sets {option}=, too", "set it once")
        if not (options.get("key") or file.options.get("key")):
            fix = 'name the columns that identify its rows, in a line at its top: "-- key: …"'
            raise Misconfigured(label, "it has no key", fix)
        try:
            self._add_sql(name, file.text, {**options, **_parsed(file)}, file.doc, label)
        except Misconfigured as error:
            raise Misconfigured(file.location(error.problem), error.problem, error.fix) from error


OPTIONS = tuple(QueryOptions.__annotations__)


def _check_options(method: str, options: Mapping[str, Any]) -> None:
    for option in options:
        if option not in OPTIONS:
            fix = did_you_mean(option, OPTIONS, f"its options are {', '.join(OPTIONS)}")
            raise Misconfigured(_line(), f'app.{method}() has no option "{option}"', fix)


def _parsed(file: SqlFile) -> Any:
    """The options of a file as Python would give them."""
    options: dict[str, Any] = dict(file.options)
    if "key" in options:
        options["key"] = tuple(part.strip() for part in options["key"].split(",") if part.strip())
    if not (count := options.get("partitions", "1")).isdecimal():
        raise Misconfigured("", f'"{count}" is not an integer', "write one such as 2")
    if "partitions" in options:
        options["partitions"] = int(count)
    return options


def _caller() -> FrameType:
    """The innermost frame outside this file."""
    frame = inspect.currentframe()
    assert frame is not None
    while frame.f_back is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    return frame


def _folder() -> Path:
    """The folder of the calling file. Relative paths of a pipeline start there."""
    file = _caller().f_globals.get("__file__")
    return Path(file).absolute().parent if file else Path.cwd()


def _line() -> str:
    """The file and line of the caller."""
    frame = _caller()
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _line_of(function: Callable[..., Any]) -> str | None:
    """The file and line at which a function begins; None for a callable without code."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code and f"{Path(code.co_filename).name}:{code.co_firstlineno}"

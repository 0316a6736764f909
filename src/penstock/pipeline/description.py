"""A pipeline as immutable data: channels, sources, queries, stores and pages."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from graphlib import CycleError, TopologicalSorter
from typing import Any

from penstock.analysis.query import Json, Query, Shape, Static
from penstock.collect.registry import source_at
from penstock.collect.shedding import Shed
from penstock.core.contracts import Guarantee, Source
from penstock.core.errors import Misconfigured, located
from penstock.core.text import did_you_mean


@dataclass(frozen=True)
class Channel:
    """A durable log of records. `Pipeline.channel` documents the fields."""

    name: str
    schema: str | None = None
    event_time: str | None = None
    partitions: int = 2
    replicas: int | None = None
    retention: timedelta | None = None
    ahead: timedelta = timedelta(hours=1)
    unique: str | None = None
    result_of: str | None = None
    """The query that writes it; None: a source or another program writes it."""
    compacted: bool = False
    config: Mapping[str, str] = field(default_factory=dict)
    table: bool = False
    json: Json = "strict"

    @property
    def dead(self) -> str:
        """The name of its dead-letter channel."""
        return f"{self.name}.dead"

    @property
    def shape(self) -> Shape:
        return Shape(self.name, self.schema, self.event_time, self.ahead, self.unique, self.table, self.json)


@dataclass(frozen=True)
class SourceSpec:
    """A source. `Pipeline.source` documents the fields."""

    name: str
    url: str
    into: str
    partition_by: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    custom: Source | None = None
    """A source object of the user; then `url` is only its kind."""
    shed: Shed | None = None
    overlap: int = 1
    overlap_by: str | tuple[str, ...] | None = None

    def build(self) -> Source:
        """The source with its declared address, without settings. Opens nothing."""
        return self.custom or source_at(self.url, self.name, self.options)


@dataclass(frozen=True)
class StoreSpec:
    channel: str
    url: str
    ttl: timedelta | None


ROWS = "rows"
"""The name of the data set in a chart specification."""


@dataclass(frozen=True)
class PageSpec:
    channel: str
    title: str
    doc: str
    chart: "Mapping[str, Any] | Callable[[], Any] | Any | None"

    def spec(self) -> Mapping[str, Any] | None:
        """The chart as a Vega-Lite specification; None for a table. Misconfigured for anything else."""
        chart: Any = self.chart
        if callable(chart) and not hasattr(chart, "to_dict"):
            chart = chart()
        if hasattr(chart, "to_dict"):
            chart = chart.to_dict()
        if not (chart is None or isinstance(chart, Mapping)):
            fix = "give a Vega-Lite dict or an Altair chart"
            raise Misconfigured(f"page {self.channel}", f"its chart is {type(chart).__name__}", fix)
        return chart


@dataclass(frozen=True)
class Description:
    """A pipeline."""

    name: str
    channels: Mapping[str, Channel]
    sources: tuple[SourceSpec, ...]
    queries: tuple[Query, ...]
    stores: tuple[StoreSpec, ...]
    pages: tuple[PageSpec, ...]
    statics: tuple[Static, ...] = ()
    delivery: Guarantee = Guarantee.EXACTLY_ONCE
    lines: Mapping[str, str] = field(default_factory=dict, compare=False)
    """The file and line of each declaration, by the name that errors use for it, such as `channel rsvps`."""

    @contextmanager
    def locating(self) -> Iterator[None]:
        """Add the line of the declaration to each Misconfigured that the body raises."""
        try:
            yield
        except Misconfigured as error:
            raise located(error, self.lines) from error

    def query(self, name: str) -> Query:
        """The query of this name, or the one whose result has this name; Misconfigured if there is none."""
        for query in self.queries:
            if name in (query.name, query.into):
                return query
        names = [query.name for query in self.queries]
        fix = did_you_mean(name, names, f"its queries are {', '.join(names) or 'none'}")
        raise Misconfigured(f"pipeline {self.name}", f'it has no query "{name}"', fix)

    @property
    def with_dead_letters(self) -> tuple[Channel, ...]:
        """The channels with a dead-letter channel: those with a schema, and those that queries read."""
        read = {name for query in self.queries for name in query.inputs}
        candidates = (channel for channel in self.channels.values() if not channel.result_of)
        return tuple(channel for channel in candidates if channel.schema or channel.name in read)

    @property
    def lakes(self) -> tuple[StoreSpec, ...]:
        """The stores that Spark fills. The loader fills the others."""
        return tuple(store for store in self.stores if store.url.startswith("delta:"))

    @property
    def validated(self) -> tuple[Channel, ...]:
        """The channels with a validation query. A channel with a lake is validated when the lake is filled."""
        in_lake = {store.channel for store in self.lakes}
        return tuple(channel for channel in self.with_dead_letters if channel.name not in in_lake)

    @property
    def heartbeats(self) -> str:
        return f"penstock.{self.name}.heartbeats"

    @property
    def bookmarks(self) -> str:
        return f"penstock.{self.name}.bookmarks"

    @property
    def status(self) -> str:
        return f"penstock.{self.name}.status"

    def check(self) -> None:
        """Check that the parts fit together; Misconfigured if they do not."""
        self._check_sources()
        self._check_queries()
        self._check_stores()
        for page in self.pages:
            self._check_result(f"page {page.title}", page.channel, "show one that is")

    def _check_sources(self) -> None:
        _check_unique("source", [source.name for source in self.sources])
        numbered = []
        for source in self.sources:
            if self.channels[source.into].result_of:
                problem = f"{source.into} is the result of a query"
                raise Misconfigured(f"source {source.name}", problem, "name another channel")
            opened = source.build()
            if getattr(opened, "numbered", None) is not None:
                numbered.append(source.into)
            if (answers := getattr(opened, "answers", None)) is not None:
                fix = "name one that is, of a query that keeps the column origin"
                self._check_result(f"source {source.name}, answers", answers, fix)
        for name in numbered:
            if numbered.count(name) > 1:
                raise Misconfigured(
                    f"channel {name}",
                    "two sources that number their records fill it, and their senders may have the same names",
                    "give each source its own channel, or let the collector number the records: numbered=None, or"
                    " named=False where senders have names",
                )

    def _check_queries(self) -> None:
        statics = {static.name for static in self.statics}
        for name in statics & self.channels.keys():
            raise Misconfigured(f"table {name}", "a channel has the same name", "rename one of them")
        _check_unique("query", [query.name for query in self.queries])
        for query in self.queries:
            for name in query.inputs:
                _check_exists(_reading_location(query, name), name, [*self.channels, *statics])
            if not query.inputs:
                problem = "it reads only static tables"
                raise Misconfigured(f"query {query.name}", problem, "read a channel, too")
        _check_acyclic(self.queries)

    def _check_stores(self) -> None:
        kinds = [(store.url.partition(":")[0], store.channel) for store in self.stores]
        for store, (kind, name) in zip(self.stores, kinds, strict=True):
            _check_exists(f"store {store.url}", name, self.channels)
            if kinds.count((kind, name)) > 1:
                problem = f"two {kind} stores keep it"
                raise Misconfigured(f"channel {name}", problem, "keep one of them, or use another kind")

    def _check_result(self, location: str, channel: str, fix: str) -> None:
        _check_exists(location, channel, self.channels)
        if not self.channels[channel].result_of:
            raise Misconfigured(location, f"{channel} is not the result of a query", fix)


def _reading_location(query: Query, channel: str) -> str:
    """The place where a query names a channel that it reads."""
    if query.file is None:
        return f"query {query.name}"
    # Imported here: the SQL parser is slow to load.
    from penstock.pipeline.sql import line_of

    line = line_of(str(query.build), channel)
    return f"{query.file}{f':{line}' if line else ''}, query {query.name}"


def _check_unique(kind: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise Misconfigured(f"{kind} {name}", "two have this name", "rename one of them: name=…")


def _check_exists(location: str, name: str, channels: Collection[str]) -> None:
    if name not in channels:
        others = f"there are {', '.join(sorted(channels))}" if channels else "declare it: app.channel(…)"
        raise Misconfigured(location, f'there is no channel "{name}"', did_you_mean(name, channels, others))


def _check_acyclic(queries: Sequence[Query]) -> None:
    try:
        TopologicalSorter({query.into: query.inputs for query in queries}).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        raise Misconfigured(f"channel {cycle[0]}", "its query depends on it", "write into another channel") from error

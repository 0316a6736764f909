"""What Spark makes of the queries of a pipeline: their frames, their columns, what speaks against them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from graphlib import TopologicalSorter
from secrets import token_hex
from typing import Self

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock.analysis.checkpoints.batches import excluded, on_disk
from penstock.analysis.checkpoints.note import Note, note_of
from penstock.analysis.connectors import SparkConnector
from penstock.analysis.frames import (
    ADDED,
    RAW,
    ResultWriters,
    boundaries,
    built,
    encoded,
    genuine,
    sorted_out,
    told_of_seen,
    typed,
)
from penstock.analysis.modes import Verdict, accepts_update, decide, empty_stream, objection, refused
from penstock.analysis.operators.statics import Table
from penstock.analysis.plans import Cost, against, cost, of_sessions, shuffles, stateless, untold
from penstock.analysis.query import Emit, Late, Mode, Query, Shape
from penstock.analysis.settings import SparkSettings
from penstock.analysis.state.keyed import keeps_state
from penstock.core.contracts import Offsets
from penstock.core.errors import Misconfigured

OffsetRanges = Mapping[str, list[tuple[int, int]]]
"""Per partition (as text), runs of offsets."""
_REHEARSALS = 2
"""So many queries are tried at a time."""


@dataclass(frozen=True)
class Engine:
    """What all queries of a pipeline share."""

    spark: SparkSession
    settings: SparkSettings
    connector: SparkConnector
    checkpoints: str
    shapes: Mapping[str, Shape]
    tables: Mapping[str, Table] = field(default_factory=dict)
    """The static tables, as they were read last."""
    announce: Callable[[Query, Note], None] = lambda *_: None
    """Called before a query starts: announces the token of its rows, see `audit.writers`."""
    writers: Mapping[str, ResultWriters] = field(default_factory=dict)
    """Of the results that queries read: rows of other writers are refused."""
    token_prefix: str = field(default_factory=lambda: token_hex(4), compare=False)
    """How the tokens of queries begin that this process starts."""
    excluding: bool = True
    """Queries leave out the records that make them fail."""
    _gates: dict[str, bool] = field(default_factory=dict, compare=False)
    _made: dict[tuple[str, Query], DataFrame] = field(default_factory=dict, init=False, compare=False)
    """Results over no records, which many questions are about: each takes Spark a good part of a second to make."""

    def stream(self, channel: str, since: Offsets | None = None) -> DataFrame:
        """The raw records of a channel, from these offsets and on; from the beginning if they are not said."""
        return self.connector.stream(self.spark, channel, since)

    def batch(
        self, channel: str, until: Mapping[int, int] | None = None, since: Mapping[int, int] | None = None
    ) -> DataFrame:
        """The raw records that a channel holds, from these offsets up to those."""
        return self.connector.batch(self.spark, channel, since, until)

    def typed(self, channel: str) -> DataFrame:
        """What queries see of a channel, without a record; Misconfigured when its schema or event time is wrong."""
        return typed(self.nothing(channel), self.shapes[channel])

    def frame(self, query: Query, raw: Callable[[str], DataFrame]) -> DataFrame:
        """The result of a query over raw frames of its inputs."""
        gated = self.gated(query)
        admitted = {name: self.admitted(query.name, name, raw(name)) for name in query.inputs}
        return self.built(query, [sorted_out(admitted[name], self.shapes[name], query, gated) for name in query.inputs])

    def left_out(self, query: str, channel: str) -> Column | None:
        """Whether a query leaves out a raw record of a channel, because it fails with it; None when it takes all."""
        offsets: dict[int, list[int]] = {}
        for one in excluded(self.checkpoint(query)) if self.excluding else ():
            if one.channel == channel:
                offsets.setdefault(one.partition, []).append(one.offset)
        found = None
        for partition, some in offsets.items():
            here = (F.col("partition") == partition) & F.col("offset").isin(*some)
            found = here if found is None else found | here
        return found

    def admitted(self, query: str, channel: str, raw: DataFrame) -> DataFrame:
        """Raw records of a channel, without the content of those that the query must not see: they do not fit then.

        These are the records that make the query fail, and rows of a result that none of its writers has written.
        """
        out = self.left_out(query, channel)
        if (writers := self.writers.get(channel)) is not None:
            out = ~genuine(writers) if out is None else out | ~genuine(writers)
        if out is None:
            return raw
        return raw.withColumns({name: F.when(~out, F.col(name)) for name in ("key", "value")})

    def built(self, query: Query, frames: Sequence[DataFrame]) -> DataFrame:
        """A query applied to frames of its inputs, and to the static tables that it names."""
        return built(query, frames, {name: self.tables[name].frame for name in query.statics})

    def gated(self, query: Query) -> bool:
        """Whether what is late or doubled is taken out before the query: its channel says what a duplicate is.

        Spark then remembers each record until the watermark passes it, which costs. A query that keeps each record as a
        row needs no gate: stores and clients know the numbers that they have.
        """
        if query.watermark is None or len(query.inputs) != 1 or self.shapes[query.inputs[0]].unique is None:
            return False
        if query.name not in self._gates:
            (channel,) = query.inputs
            result = self.built(query, [typed(self.nothing(channel), self.shapes[channel])])
            self._gates[query.name] = "origin" not in result.columns or keeps_state(result)
        return self._gates[query.name]

    def updates(self, query: Query) -> bool:
        """Whether rows are written whenever they change; otherwise once, when they are final."""
        return query.emit is Emit.CHANGE and accepts_update(self._over_empty(query))

    def gives_up(self, query: Query) -> bool:
        """Whether a batch that a crash left unfinished is given up: its rows would be there twice, unknown to anyone.

        State would lack the batch for ever; then it is done again.
        """
        if not query.once or self.gated(query) or on_disk(self.checkpoint(query.name)) is None:
            return False
        result = self.over_nothing(query)
        return not {"seen", "origin"} & set(result.columns) and stateless(result)

    def uncounted(self, query: Query) -> str | None:
        """Why it cannot be checked that each record is counted in one row of the result; None when it can."""
        if not self.updates(query):
            return "its rows come when they are final"
        return against(self.over_nothing(query), boundaries(query, self.gated(query)))

    def nothing(self, channel: str) -> DataFrame:
        """No records, of the shape that Kafka's have."""
        return self.spark.createDataFrame([], RAW)

    def recompute(
        self,
        query: Query,
        until: Mapping[str, Offsets] | None = None,
        since: Mapping[str, Offsets] | None = None,
        without: Mapping[str, OffsetRanges] | None = None,
    ) -> DataFrame:
        """The query as a batch over the log, from where it began: what its live result has to be equal to.

        `since` tells that for a log that may not hold it any more, or has more partitions by now. `without`: what is
        left out, because the live query has dropped it as late.
        """
        since = since or note_of(self.checkpoint(query.name)).since or {}

        def raw(name: str) -> DataFrame:
            out = F.lit(False)
            for partition, runs in ((without or {}).get(name) or {}).items():
                for first, last in runs:
                    out = out | ((F.col("partition") == int(partition)) & F.col("offset").between(first, last))
            return self.batch(name, (until or {}).get(name), since.get(name)).where(~out)

        return self.frame(query, raw)

    def columns(self, query: Query) -> list[str]:
        """The columns of a query's result; Misconfigured when it cannot work."""
        result = self.over_nothing(query)
        encoded(result, query)
        self.require_told(query)
        return result.columns

    def result(self, query: Query) -> Shape:
        """What a query's result looks like to another query."""
        rows = self.over_nothing(query).drop(*ADDED)
        table = False
        if "seen" in rows.columns:
            table = "deleted" in getattr(rows.schema["seen"].dataType, "names", ())
            rows = rows.withColumn("seen", told_of_seen())
        # Spark wrote the rows itself: what it writes for NaN, it reads.
        return Shape(query.into, rows.schema.toDDL(), table=table, json="lenient")

    def over_nothing(self, query: Query) -> DataFrame:
        """The result over tables without a row."""
        return self._once("nothing", query, self.nothing)

    def _over_empty(self, query: Query) -> DataFrame:
        """The result over streams that need no broker."""
        return self._once("empty", query, lambda _: empty_stream(self.spark))

    def _once(self, what: str, query: Query, raw: Callable[[str], DataFrame]) -> DataFrame:
        if (made := self._made.get((what, query))) is None:
            made = self._made[what, query] = self.frame(query, raw)
        return made

    def cost(self, query: Query) -> Cost:
        """The class of what a query costs."""
        return cost(self._over_empty(query))

    def shuffles(self, query: Query) -> int:
        """How often a query shuffles its records."""
        return shuffles(self._over_empty(query))

    def require_streamable(self, query: Query, result: DataFrame) -> None:
        """Refuse a query that Spark can run over tables only."""
        if query.emit is Emit.CHANGE and accepts_update(result):
            return
        if why := refused(result, "Append"):
            fix = 'say how late a record may be: watermark="…"' if "without watermark" in why else ""
            raise Misconfigured(f"query {query.name}", f"Spark cannot run it over streams: {why}", fix)

    def require_told(self, query: Query) -> None:
        """Refuse a query whose late records are to be kept, when nobody can tell which these are."""
        if query.late is not Late.DEAD or self.gated(query):
            return
        result = self.over_nothing(query)
        if why := untold(query, result, against(result, boundaries(query, False))):
            raise Misconfigured(
                f"query {query.name}",
                f"it cannot be told which of its records are late and belong to the dead letters: {why}",
                'say what makes the records of its channel unique, app.channel(…, unique="number"); or group them by '
                "F.window() and keep `window` and seen() in its rows",
            )

    def knowing(self, queries: Sequence[Query]) -> Self:
        """The same engine, for queries that read the results of others: it knows what those look like."""
        read = {name for query in queries for name in query.inputs}
        engine = self
        for query in in_order(queries):
            if query.into in read:
                engine = replace(engine, shapes={**engine.shapes, query.into: engine.result(query)})
        return engine

    def verdicts(self, queries: Iterable[Query]) -> dict[str, Verdict]:
        """The mode that each query would get, in the order of their declaration, by a rehearsal of each."""
        queries, places = tuple(queries), self.settings.real_time_queries
        for query in queries:
            self.require_streamable(query, self._over_empty(query))
        open_ones = [query for query in queries if query.mode is not Mode.MICRO_BATCH and query.every is None]
        # A rehearsal waits for Spark most of the time.
        with ThreadPoolExecutor(_REHEARSALS) as pool:
            objections = dict(
                zip((query.name for query in open_ones), pool.map(self.objection, open_ones), strict=True)
            )
        found: dict[str, Verdict] = {}
        for query in queries:
            found[query.name] = decide(query, objections.get(query.name), places)
            places -= found[query.name].mode is Mode.REAL_TIME
        return found

    def objection(self, query: Query) -> str | None:
        return self.foreseen(query, self.over_nothing(query)) or objection(
            lambda: encoded(self._over_empty(query), query)
        )

    def foreseen(self, query: Query, result: DataFrame) -> str | None:
        """What speaks against real time before Spark is asked."""
        if query.emit is Emit.FINAL:
            return "its rows come when they are final"
        # Spark would object to these as well, after a start in vain.
        if of_sessions(result):
            return "sessions are written when they are final"
        if keeps_state(result):
            return "it keeps state in Python"
        if self.gives_up(query):
            return "a batch in real time leaves no note by which it could be given up"
        return self.connector.objection

    def checkpoint(self, name: str) -> str:
        return f"{self.checkpoints}/{name}"


def in_order(queries: Sequence[Query]) -> list[Query]:
    """Each query after those whose results it reads."""
    made_by = {query.into: query for query in queries}
    needs = {query.into: [name for name in query.inputs if name in made_by] for query in queries}
    return [made_by[name] for name in TopologicalSorter(needs).static_order()]

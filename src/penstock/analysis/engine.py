"""The queries of a pipeline in Spark: their frames, their columns, and why they cannot run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from graphlib import TopologicalSorter
from secrets import token_hex
from typing import Self

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock.analysis import plans
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
    query_input,
    seen_payload,
    typed,
)
from penstock.analysis.operators.keyed import keeps_state
from penstock.analysis.operators.statics import Table
from penstock.analysis.query import Emit, Late, Mode, Query, Shape
from penstock.analysis.settings import SparkSettings
from penstock.core.contracts import Offsets
from penstock.core.errors import Misconfigured

OffsetRanges = Mapping[str, list[tuple[int, int]]]
"""Per partition (as text), runs of offsets."""
_REHEARSALS = 2
"""How many queries are tried at a time."""


@dataclass(frozen=True)
class Engine:
    """What all queries of a pipeline share."""

    spark: SparkSession
    settings: SparkSettings
    connector: SparkConnector
    checkpoints: str
    shapes: Mapping[str, Shape]
    tables: Mapping[str, Table] = field(default_factory=dict)
    """The static tables, as last read."""
    announce: Callable[[Query, Note], None] = lambda *_: None
    """Called before a query starts: announces its writer token, see `audit.writers`."""
    writers: Mapping[str, ResultWriters] = field(default_factory=dict)
    """Of the results that queries read: rows of other writers are refused."""
    token_prefix: str = field(default_factory=lambda: token_hex(4), compare=False)
    """How the tokens of queries begin that this process starts."""
    excluding: bool = True
    """Queries skip the records that make them fail."""
    _gates: dict[str, bool] = field(default_factory=dict, compare=False)
    _made: dict[tuple[str, Query], DataFrame] = field(default_factory=dict, init=False, compare=False)
    """Cached results over no records: each takes Spark up to a second to plan."""

    def stream(self, channel: str, since: Offsets | None = None) -> DataFrame:
        """The raw records of a channel as a stream, from these offsets; by default from the beginning."""
        return self.connector.stream(self.spark, channel, since)

    def batch(
        self, channel: str, until: Mapping[int, int] | None = None, since: Mapping[int, int] | None = None
    ) -> DataFrame:
        """The raw records of a channel, from the offsets `since` up to `until`."""
        return self.connector.batch(self.spark, channel, since, until)

    def typed(self, channel: str) -> DataFrame:
        """The empty typed frame of a channel; Misconfigured when its schema or event time is wrong."""
        return typed(self.nothing(channel), self.shapes[channel])

    def frame(self, query: Query, raw: Callable[[str], DataFrame]) -> DataFrame:
        """The result of a query over raw frames of its inputs."""
        gated = self.gated(query)
        admitted = {name: self.admitted(query.name, name, raw(name)) for name in query.inputs}
        return self.built(
            query, [query_input(admitted[name], self.shapes[name], query, gated) for name in query.inputs]
        )

    def left_out(self, query: str, channel: str) -> Column | None:
        """Whether a raw record is excluded because the query fails with it; None when none is."""
        found = excluded(self.checkpoint(query)) if self.excluding else []
        some = [f"{one.partition}:{one.offset}" for one in found if one.channel == channel]
        return F.concat_ws(":", "partition", "offset").isin(*some) if some else None

    def admitted(self, query: str, channel: str, raw: DataFrame) -> DataFrame:
        """Remove the content of raw records that the query must not read: then they do not fit.

        These are the records that make the query fail, and rows of a result that none of its writers has written.
        """
        out = self.left_out(query, channel)
        if (writers := self.writers.get(channel)) is not None:
            out = ~genuine(writers) if out is None else out | ~genuine(writers)
        if out is None:
            return raw
        return raw.withColumns({name: F.when(~out, F.col(name)) for name in ("key", "value")})

    def built(self, query: Query, frames: Sequence[DataFrame]) -> DataFrame:
        """Apply a query to frames of its inputs, and to its static tables."""
        return built(query, frames, {name: self.tables[name].frame for name in query.statics})

    def gated(self, query: Query) -> bool:
        """Whether late records and duplicates are removed before the query, because its channel has unique=.

        Spark then keeps each record in the state until the watermark passes it. A query that writes a row for each
        record does not need this: stores and clients remove duplicates by number.
        """
        if query.watermark is None or len(query.inputs) != 1 or self.shapes[query.inputs[0]].unique is None:
            return False
        if query.name not in self._gates:
            (channel,) = query.inputs
            result = self.built(query, [typed(self.nothing(channel), self.shapes[channel])])
            self._gates[query.name] = "origin" not in result.columns or keeps_state(result)
        return self._gates[query.name]

    def updates(self, query: Query) -> bool:
        """Whether rows are written on each change; otherwise once, when they are final."""
        return query.emit is Emit.CHANGE and plans.accepts_update(self.over_empty(query))

    def abandons(self, query: Query) -> bool:
        """Whether an unfinished batch is abandoned after a crash, because its rows could be written twice, unnoticed.

        A query with state repeats the batch: its state needs it.
        """
        if not query.once or self.gated(query) or on_disk(self.checkpoint(query.name)) is None:
            return False
        result = self.over_nothing(query)
        return not {"seen", "origin"} & set(result.columns) and plans.stateless(result)

    def uncounted(self, query: Query) -> str | None:
        """Why the audit cannot check that each record is counted in one row of the result; None when it can."""
        if not self.updates(query):
            return "its rows come when they are final"
        return plans.against(self.over_nothing(query), boundaries(query, self.gated(query)))

    def nothing(self, channel: str) -> DataFrame:
        """An empty frame with the columns of raw records."""
        return self.spark.createDataFrame([], RAW)

    def recompute(
        self,
        query: Query,
        until: Mapping[str, Offsets] | None = None,
        since: Mapping[str, Offsets] | None = None,
        without: Mapping[str, OffsetRanges] | None = None,
    ) -> DataFrame:
        """The query as a batch over the log, from its first offsets: its live result must be equal.

        `since` replaces the first offsets. `without`: offsets to skip, which the live query has dropped as late.
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
        self.require_identifiable_late(query)
        return result.columns

    def result(self, query: Query) -> Shape:
        """The shape of a query's result, for queries that read it."""
        rows = self.over_nothing(query).drop(*ADDED)
        table = False
        if "seen" in rows.columns:
            table = "deleted" in getattr(rows.schema["seen"].dataType, "names", ())
            rows = rows.withColumn("seen", seen_payload())
        # Spark wrote the rows: it can read its own NaN.
        return Shape(query.into, rows.schema.toDDL(), table=table, json="lenient")

    def over_nothing(self, query: Query) -> DataFrame:
        """The result over empty tables."""
        return self._once("nothing", query, self.nothing)

    def over_empty(self, query: Query) -> DataFrame:
        """The result over empty streams, without a broker."""
        return self._once("empty", query, lambda _: plans.empty_stream(self.spark))

    def _once(self, what: str, query: Query, raw: Callable[[str], DataFrame]) -> DataFrame:
        if (made := self._made.get((what, query))) is None:
            made = self._made[what, query] = self.frame(query, raw)
        return made

    def cost(self, query: Query) -> plans.Cost:
        return plans.cost(self.over_empty(query))

    def shuffles(self, query: Query) -> int:
        return plans.shuffles(self.over_empty(query))

    def require_streamable(self, query: Query, result: DataFrame) -> None:
        """Raise Misconfigured for a query that Spark cannot run over streams."""
        if query.emit is Emit.CHANGE and plans.accepts_update(result):
            return
        if why := plans.refused(result, "Append"):
            fix = 'say how late a record may be: watermark="…"' if "without watermark" in why else ""
            raise Misconfigured(f"query {query.name}", f"Spark cannot run it over streams: {why}", fix)

    def require_identifiable_late(self, query: Query) -> None:
        """Raise Misconfigured for a query with late="dead letters" whose late records cannot be identified."""
        if query.late is not Late.DEAD or self.gated(query):
            return
        result = self.over_nothing(query)
        if why := plans.why_late_unknown(query, result, plans.against(result, boundaries(query, False))):
            raise Misconfigured(
                f"query {query.name}",
                f"its late records cannot be identified for the dead letters: {why}",
                'declare unique= for its channel, such as app.channel(…, unique="number"); or group by F.window() '
                "and keep `window` and seen() in its rows",
            )

    def knowing(self, queries: Sequence[Query]) -> Self:
        """This engine with the shapes of results that queries read."""
        read = {name for query in queries for name in query.inputs}
        engine = self
        for query in in_order(queries):
            if query.into in read:
                engine = replace(engine, shapes={**engine.shapes, query.into: engine.result(query)})
        return engine

    def verdicts(self, queries: Iterable[Query]) -> dict[str, plans.Verdict]:
        """The mode of each query, in order of declaration. Each is tried on empty streams."""
        queries, locations = tuple(queries), self.settings.real_time_queries
        for query in queries:
            self.require_streamable(query, self.over_empty(query))
        open_ones = [query for query in queries if query.mode is not Mode.MICRO_BATCH and query.every is None]
        # A trial mostly waits for Spark.
        with ThreadPoolExecutor(_REHEARSALS) as pool:
            objections = dict(
                zip((query.name for query in open_ones), pool.map(self.objection, open_ones), strict=True)
            )
        found: dict[str, plans.Verdict] = {}
        for query in queries:
            found[query.name] = plans.decide(query, objections.get(query.name), locations)
            locations -= found[query.name].mode is Mode.REAL_TIME
        return found

    def objection(self, query: Query) -> str | None:
        return self.foreseen(query, self.over_nothing(query)) or plans.objection(
            lambda: encoded(self.over_empty(query), query)
        )

    def foreseen(self, query: Query, result: DataFrame) -> str | None:
        """Known reasons against real time, before Spark is asked."""
        if query.emit is Emit.FINAL:
            return "its rows come when they are final"
        # Spark would refuse these, too, but only after a start.
        if plans.of_sessions(result):
            return "sessions are written when they are final"
        if keeps_state(result):
            return "it keeps state in Python"
        if self.abandons(query):
            return "a batch in real time leaves no note by which it could be given up"
        return self.connector.objection

    def checkpoint(self, name: str) -> str:
        return f"{self.checkpoints}/{name}"


def in_order(queries: Sequence[Query]) -> list[Query]:
    """Each query after those whose results it reads."""
    made_by = {query.into: query for query in queries}
    needs = {query.into: [name for name in query.inputs if name in made_by] for query in queries}
    return [made_by[name] for name in TopologicalSorter(needs).static_order()]

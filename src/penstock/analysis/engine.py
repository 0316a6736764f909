"""The running of queries: each reads channels and writes one, in its mode, from its checkpoint."""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import timedelta
from graphlib import TopologicalSorter
from typing import Self

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from penstock.analysis.checkpoint import on_disk
from penstock.analysis.conserving import against
from penstock.analysis.frames import (
    ADDED,
    RAW,
    boundary,
    built,
    dead_letters,
    encoded,
    sorted_out,
    told_of_seen,
    typed,
    words,
)
from penstock.analysis.modes import Verdict, accepts_update, decide, objection, refusal
from penstock.analysis.query import Emit, Mode, Query, Shape
from penstock.analysis.settings import SparkSettings
from penstock.analysis.wire import Wire
from penstock.errors import Misconfigured, Unavailable

_WITHOUT_DATA = "spark.sql.streaming.noDataMicroBatches.enabled"


@dataclass(frozen=True)
class Engine:
    """What all queries of a pipeline share."""

    spark: SparkSession
    settings: SparkSettings
    wire: Wire
    checkpoints: str
    shapes: Mapping[str, Shape]
    _gates: dict[str, bool] = field(default_factory=dict, compare=False)

    def stream(self, channel: str) -> DataFrame:
        """The raw records of a channel, from the beginning and on."""
        return self.wire.stream(self.spark, channel)

    def batch(
        self, channel: str, until: Mapping[int, int] | None = None, since: Mapping[int, int] | None = None
    ) -> DataFrame:
        """The raw records that a channel holds, from these offsets up to those."""
        return self.wire.batch(self.spark, channel, since, until)

    def frame(self, query: Query, raw: Callable[[str], DataFrame]) -> DataFrame:
        """The result of a query over raw frames of its inputs."""
        gated = self.gated(query)
        return built(query, [sorted_out(raw(name), self.shapes[name], query, gated) for name in query.inputs])

    def gated(self, query: Query) -> bool:
        """Whether what is late or doubled is taken out before the query: its channel says what a duplicate is.

        Spark then remembers each record until the watermark passes it, which costs. A query that keeps each record as a
        row needs no gate: stores and clients know the numbers that they have.
        """
        if query.watermark is None or len(query.inputs) != 1 or self.shapes[query.inputs[0]].unique is None:
            return False
        if query.name not in self._gates:
            (channel,) = query.inputs
            columns = built(query, [typed(self.nothing(channel), self.shapes[channel])]).columns
            self._gates[query.name] = "origin" not in columns
        return self._gates[query.name]

    def updates(self, query: Query) -> bool:
        """Whether rows are written whenever they change; otherwise once, when they are final."""
        return query.emit is Emit.CHANGE and accepts_update(self.frame(query, self.stream))

    def uncounted(self, query: Query) -> str | None:
        """Why it cannot be checked that each record is counted in one row of the result; None when it can."""
        if not self.updates(query):
            return "its rows come when they are final"
        return against(self.frame(query, self.nothing), boundary(query, self.gated(query)))

    def nothing(self, channel: str) -> DataFrame:
        """No records, of the shape that Kafka's have."""
        return self.spark.createDataFrame([], RAW)

    def recompute(self, query: Query, until: Mapping[str, Mapping[int, int]] | None = None) -> DataFrame:
        """The query as a batch over the log: what its live result has to be equal to."""
        return self.frame(query, lambda name: self.batch(name, (until or {}).get(name)))

    def columns(self, query: Query) -> list[str]:
        """The columns of a query's result; Misconfigured when it cannot work."""
        result = self._over_nothing(query)
        encoded(result, query)
        return result.columns

    def result(self, query: Query) -> Shape:
        """What a query's result looks like to another query."""
        rows = self._over_nothing(query).drop(*ADDED)
        if "seen" in rows.columns:
            rows = rows.withColumn("seen", told_of_seen())
        return Shape(query.into, rows.schema.toDDL())

    def _over_nothing(self, query: Query) -> DataFrame:
        return self.frame(query, self.nothing)

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
        places = self.settings.real_time_queries
        found: dict[str, Verdict] = {}
        for query in queries:
            found[query.name] = decide(query, self.objection(query), places)
            places -= found[query.name].mode is Mode.REAL_TIME
        return found

    def objection(self, query: Query) -> str | None:
        return self._against(query) or objection(
            self.spark, lambda raw: encoded(self.frame(query, lambda _: raw()), query)
        )

    def _against(self, query: Query) -> str | None:
        """What speaks against real time before Spark is asked."""
        return "its rows come when they are final" if query.emit is Emit.FINAL else self.wire.objection

    def launch(
        self, query: Query, places: int, topics: Mapping[str, str], turn: int = 0
    ) -> tuple[StreamingQuery, Verdict]:
        """Start a query where its checkpoint stands, in the best mode that Spark accepts.

        Nothing is rehearsed here: real time is tried, and an objection comes before the first record is read. `topics`
        are the ids of the topics that the query touches. Queries with different turns do not all run at once.
        """
        verdict = decide(query, self._against(query), places)
        if verdict.mode is Mode.REAL_TIME:
            try:
                started = self._start(query, verdict.mode, topics, turn)
                against = refusal(self.spark, started)
            except (PySparkException, Py4JJavaError) as error:
                against = words(error)
            if against is None:
                return started, verdict
            verdict = decide(query, against, places)
            if verdict.mode is Mode.REAL_TIME:
                raise Misconfigured(f"query {query.name}", f"it cannot run in real time: {against}", "leave mode= out")
            _forget_if_unused(self.checkpoint(query.name))
        return self._start(query, verdict.mode, topics, turn), verdict

    def _start(self, query: Query, mode: Mode, topics: Mapping[str, str], turn: int) -> StreamingQuery:
        result = self.frame(query, self.stream)
        update = mode is Mode.REAL_TIME or (query.emit is Emit.CHANGE and accepts_update(result))
        writer = self._into(encoded(result, query), query.into, query.name, topics)
        writer = writer.outputMode("update" if update else "append")
        if mode is Mode.REAL_TIME:
            length = self.settings.real_time_batch.total_seconds()
            # PySpark's own overloads do not know this trigger yet.
            return writer.trigger(realTime=f"{length:g} seconds").start()  # type: ignore[call-overload,no-any-return]
        # A row may become final without another record: by what the last batch has done to the watermark.
        self.spark.conf.set(_WITHOUT_DATA, str(not update).lower())
        return writer.trigger(processingTime=_every(query.every or self.settings.every, turn)).start()

    def sift(self, shape: Shape, into: str, topics: Mapping[str, str], turn: int = 0) -> StreamingQuery:
        """Bring what does not fit a channel's schema to its dead letters."""
        refused = dead_letters(self.stream(shape.channel), shape)
        writer = self._into(refused, into, f"{shape.channel}.dead", topics).outputMode("append")
        return writer.trigger(processingTime=_every(self.settings.every, turn)).start()

    def checkpoint(self, name: str) -> str:
        return f"{self.checkpoints}/{name}"

    def _into(self, records: DataFrame, channel: str, name: str, topics: Mapping[str, str]) -> DataStreamWriter:
        folder = self.checkpoint(name)
        _belong_together(folder, topics)
        writer = self.wire.into(records, channel)
        return writer.queryName(name).option("checkpointLocation", folder)


def _every(interval: timedelta, turn: int) -> str:
    """Spark begins batches at multiples of their interval; slightly different ones keep queries out of step."""
    return f"{int(interval.total_seconds() * 1000) + 130 * turn} milliseconds"


def in_order(queries: Sequence[Query]) -> list[Query]:
    """Each query after those whose results it reads."""
    made_by = {query.into: query for query in queries}
    needs = {query.into: [name for name in query.inputs if name in made_by] for query in queries}
    return [made_by[name] for name in TopologicalSorter(needs).static_order()]


def slots(
    queries: Sequence[Query],
    partitions: Mapping[str, int],
    sifted: Iterable[str],
    shuffle: int,
    unique: Set[str] = frozenset(),
) -> int:
    """How many tasks may have to run at once, if every query takes its turn at the same moment.

    The tasks of a real-time query never end, and Spark starts them all together or not at all: each needs a slot.
    """
    reading = sum(partitions[name] for query in queries for name in query.inputs)
    # The gate that finds duplicates takes a shuffle of its own.
    shuffles = sum(1 if query.watermark is None or unique.isdisjoint(query.inputs) else 2 for query in queries)
    return reading + shuffle * shuffles + sum(partitions[name] for name in sifted)


def failed(queries: Iterable[StreamingQuery]) -> Unavailable | None:
    """The first query that ended, with its reason."""
    for query in queries:
        if not query.isActive:
            error: StreamingQueryException | None = query.exception()
            return Unavailable(f"query {query.name}", _telling(error) if error else "it ended")
    return None


def _telling(error: StreamingQueryException) -> str:
    """The line that tells most: of a Python function's failure the end of its trace, otherwise the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if "PYTHON_EXCEPTION" in lines[0]:
        traced = [line for line in lines if re.match(r"[A-Za-z_.]+(Error|Exception)\b", line)]
        return (traced or lines)[-1]
    return lines[0]


def _belong_together(folder: str, topics: Mapping[str, str]) -> None:
    """Refuse a checkpoint that was made for other topics: going on from it would skip records in silence."""
    if (path := on_disk(folder)) is None:
        return
    note = path / "penstock.json"
    if note.exists():
        for name, known in json.loads(note.read_text()).items():
            if name in topics and topics[name] != known:
                raise Misconfigured(
                    f"checkpoint {folder}",
                    f"it belongs to another topic {name} than the one that is there now",
                    "remove the checkpoint to read the new topic from its beginning",
                )
        return
    path.mkdir(parents=True, exist_ok=True)
    written = note.with_suffix(".new")
    written.write_text(json.dumps(topics))
    written.replace(note)


def _forget_if_unused(folder: str) -> None:
    """Remove what an attempt left behind that Spark refused; a checkpoint that holds a batch is kept."""
    path = on_disk(folder)
    if path is not None and not any(path.glob("commits/[0-9]*")):
        shutil.rmtree(path, ignore_errors=True)

"""Analyze a query with Spark's planner, without a broker.

From the plan: its nodes, its cost, its windows, and whether it counts each record once. By a trial: its mode, and the
objections to others. And the slots that queries need.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock.analysis.frames import DELETED, KEY, RAW, SPARK_ERRORS, description, is_boundary
from penstock.analysis.query import Emit, Mode, Query
from penstock.analysis.supervision import is_transient
from penstock.core.errors import Misconfigured

if TYPE_CHECKING:
    from pyspark.sql.types import StructField

STATE_IN_PYTHON = "TransformWithStateInPySpark"
"""The plan node of state in Python."""
EVENT_TIME, CLOCK, NO_TIME = "EventTime", "ProcessingTime", "None"
"""Spark's names for the time of timers and TTLs."""
_WATERMARK = "spark.watermarkDelayMs"


def analyzed(frame: DataFrame) -> Any:
    """The analyzed plan: names are resolved, nothing is optimized."""
    return frame._jdf.queryExecution().analyzed()


def text(frame: DataFrame) -> str:
    return str(analyzed(frame).toString())


def nodes(top: Any, until: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    """A node or an expression and its descendants, from left to right; not those below nodes where `until` is true."""
    waiting = [top]
    while waiting:
        node = waiting.pop()
        yield node
        if until is None or not until(node):
            waiting += reversed(list(each(node.children())))


def kind_of(node: Any) -> str:
    return str(node.nodeName())


def columns(node: Any) -> set[str]:
    return {str(one.name()) for one in each(node.output())}


def each(sequence: Any) -> Iterator[Any]:
    """The elements of a Scala sequence."""
    return (sequence.apply(index) for index in range(sequence.size()))


def bare(expression: Any) -> Any:
    """An expression without its alias."""
    return expression.child() if kind_of(expression) == "Alias" else expression


def grouped(aggregate: Any) -> list[list[Any]]:
    """For each grouping expression of an aggregation, its columns in the result."""
    columns = [(one, bare(one)) for one in each(aggregate.aggregateExpressions())]
    return [
        [one for one, expression in columns if by.semanticEquals(expression)]
        for by in each(aggregate.groupingExpressions())
    ]


def watermarked(column: "StructField") -> bool:
    """Whether a column of a stream has the watermark."""
    return _WATERMARK in (column.metadata or {})


def time_of(node: Any) -> str:
    return str(node.timeMode().toString())


def from_state(frame: DataFrame) -> set[str]:
    """The output columns of all nodes with state in Python."""
    keepers = (node for node in nodes(analyzed(frame)) if kind_of(node) == STATE_IN_PYTHON)
    return {name for node in keepers for name in columns(node)}


_OPERATOR = re.compile(r"^[\s:+-]*(?:\*\(\d+\) )?([A-Z]\w*)", re.MULTILINE)
_IN_COLUMNS = re.compile(r"Arrow|Pandas|Python")
_BY_ROWS = re.compile(r"BatchEvalPython|TransformWithStateIn|InPandasWithState")


class Cost(StrEnum):
    """The cost class of a query."""

    JVM = "jvm"
    ARROW = "arrow"
    ROW = "row"

    @property
    def description(self) -> str:
        """The approximate cost of each record."""
        match self:
            case Cost.JVM:
                return "no Python: everything runs in the JVM"
            case Cost.ARROW:
                return "records go to Python in columns: about 3 µs each for a function, very little for mapInArrow"
            case Cost.ROW:
                return "records go to Python one by one: about 20 µs each; a function with useArrow=True costs less"


def cost(result: DataFrame) -> Cost:
    """The cost class of a query, by the most expensive operator of its result over streams."""
    names = operators(result)
    if any(_BY_ROWS.search(name) for name in names):
        return Cost.ROW
    return Cost.ARROW if any(_IN_COLUMNS.search(name) for name in names) else Cost.JVM


def shuffles(result: DataFrame) -> int:
    return operators(result).count("Exchange")


def operators(result: DataFrame) -> list[str]:
    jvm = result.sparkSession._jvm
    assert jvm is not None
    simple = jvm.org.apache.spark.sql.execution.ExplainMode.fromString("simple")
    # For a plain SQL query, Spark would not notice the streams.
    analyzed = result.select("*")
    return _OPERATOR.findall(str(analyzed._jdf.queryExecution().explainString(simple)))


_HARMLESS = {"Project", "SubqueryAlias", "View", "EventTimeWatermark", "Aggregate", "CollectMetrics", "Union"}
_STATELESS = {"Project", "SubqueryAlias", "View", "EventTimeWatermark", "Filter", "Generate", "CollectMetrics"}
_MULTIPLIES = {"Generate", "Expand", "Join"}
_REASONS = {
    "Filter": "it uses where(): declare the condition as where= instead",
    "Expand": "its windows overlap: a record counts in several rows",
    "Generate": "it makes several rows from one record",
    "Join": "it joins",
    "Deduplicate": "it drops duplicates",
    "Limit": "it has a limit",
    "TransformWithState": "it keeps state in Python",
}

AS_IT_CAME = "as_it_came"
"""The alias of results that depend on the arrival of records: a batch over the log cannot repeat them."""


def against(result: DataFrame, boundaries: Sequence[str]) -> str | None:
    """Why the records of a result cannot be counted; None when they can. Nodes below the boundaries are ignored."""
    if "seen" not in result.columns and "origin" not in result.columns:
        return "its rows carry neither seen() nor origin"
    met: list[Any] = []
    above = list(_above(result, boundaries, met))
    timed = not any({KEY, DELETED} <= columns(channel) for channel in met)
    for node, text in above:
        if node in _HARMLESS or _ours(node, text) or (timed and _of_windows(node, text)):
            continue
        if _of_windows(node, text):
            return "rows of a table may have no time, so they are in no window"
        return next((description for name, description in _REASONS.items() if name in node), f"it has a {node}")
    aggregates = sum(node == "Aggregate" for node, _ in above)
    if aggregates > 1:
        return "it aggregates twice"
    if "seen" in result.columns and not aggregates:
        return "it passes on the counts of another query"
    if Counter(str(channel.name()) for channel in met) != Counter(boundaries):
        return "it does not read each of its channels once"
    return None


def stateless(result: DataFrame) -> bool:
    return next(_stateful(result), None) is None


def judges(result: DataFrame) -> list[bool]:
    """For each operator that may drop late records: whether it checks each record alone.

    Joins of channels do, and state in Python with event time.
    """
    return [kind_of(node) in ("Join", STATE_IN_PYTHON) for node in _stateful(result) if not _timeless(node)]


def multiplied(frame: DataFrame) -> bool:
    """Whether several rows may come from one record of a channel."""
    above = list(nodes(analyzed(frame), until=_is_channel))
    met = [str(node.name()) for node in above if _is_channel(node)]
    return len(met) > len(set(met)) or any(kind_of(node) in _MULTIPLIES and _reads(node) for node in above)


def _stateful(result: DataFrame) -> Iterator[Any]:
    """The nodes of a result that may keep state, without the nodes below a channel."""
    for node in nodes(analyzed(result), until=_is_channel):
        if kind_of(node) == "Join":
            if all(map(_reads, each(node.children()))):
                yield node
        elif kind_of(node) not in _STATELESS and node.children().size():
            yield node


def _timeless(node: Any) -> bool:
    """Whether a node never drops late records: a union, or state in Python without event time."""
    return kind_of(node) == "Union" or (kind_of(node) == STATE_IN_PYTHON and time_of(node) != EVENT_TIME)


def _reads(plan: Any) -> bool:
    """Whether a part of a plan reads a channel."""
    return any(map(_is_channel, nodes(plan)))


def _is_channel(node: Any) -> bool:
    return kind_of(node) == "CollectMetrics" and is_boundary(str(node.name()))


def by_arrival(result: DataFrame) -> bool:
    """Whether rows depend on the arrival of records."""
    return any(text.split() == ["SubqueryAlias", AS_IT_CAME] for _, text in _above(result, (), []))


def _above(result: DataFrame, boundaries: Sequence[str], met: list[Any]) -> Iterator[tuple[str, str]]:
    """The nodes above the boundaries, as kind and text. The boundary nodes are added to `met`."""

    def ends(node: Any) -> bool:
        return kind_of(node) == "CollectMetrics" and str(node.name()) in boundaries

    for node in nodes(analyzed(result), until=ends):
        if ends(node):
            met.append(node)
        else:
            yield kind_of(node), str(node.simpleString(200))


def _ours(node: str, text: str) -> bool:
    """Whether a node is a filter that Penstock adds."""
    return node == "Filter" and re.fullmatch(r"Filter \(_fits#\d+ AND _wanted#\d+\)", text) is not None


def _of_windows(node: str, text: str) -> bool:
    """Whether a node is the null check that Spark adds to each window. Event times of a stream are never null."""
    return node == "Filter" and re.fullmatch(r"Filter isnotnull\(event_time#\d+(-T\d+ms)?\)", text) is not None


def of_sessions(result: DataFrame) -> bool:
    """Whether a result has session windows. They are merged, so the window of one record is unknown."""
    return "session_window#" in text(result)


def gap_of(result: DataFrame) -> str | None:
    """The gap of the session windows of a result; None when it is not constant."""
    found = re.findall(r"event_time#\d+L? \+ cast\(([\w .]+) as interval\)", text(result))
    return str(found[0]) if len(found) == 1 else None


def by_time(result: DataFrame) -> bool:
    """Whether the windows of a result end in time. Windows by count do not."""
    return "end" in getattr(result.schema["window"].dataType, "names", ())


def why_late_unknown(query: Query, result: DataFrame, uncounted: str | None) -> str | None:
    """Why late records of a query without deduplication cannot be identified; None when its windows identify them.

    `uncounted` is why its records cannot be counted.
    """
    if len(query.inputs) != 1:
        return "it reads several channels"
    if of_sessions(result):
        return "its sessions are merged"
    if missing := [name for name in ("window", "seen") if name not in result.columns]:
        return f"its rows have no {' and no '.join(missing)}"
    if not by_time(result):
        return "its windows do not end in time"
    # A record in several windows is late when all of them are closed.
    overlap = uncounted is not None and uncounted.startswith("its windows overlap")
    return None if overlap else uncounted


_TIMEOUT = 60.0


@dataclass(frozen=True)
class Verdict:
    """The mode of a query, and the reason for `penstock plan`."""

    mode: Mode
    why: str


def decide(query: Query, objection: str | None, locations: int) -> Verdict:
    """The mode of a query, by Spark's objection to real time and the free real-time slots."""
    if query.mode is Mode.MICRO_BATCH:
        return Verdict(Mode.MICRO_BATCH, "set by mode=")
    if query.mode is Mode.REAL_TIME:
        return Verdict(Mode.REAL_TIME, "set by mode=" + (f", although Spark refuses: {objection}" if objection else ""))
    if query.every is not None:
        return Verdict(Mode.MICRO_BATCH, "set by every=")
    if objection:
        return Verdict(Mode.MICRO_BATCH, f"no real time: {objection}")
    if locations < 1:
        why = "Spark allows real time, but other queries use the slots ([spark] real_time_queries)"
        return Verdict(Mode.MICRO_BATCH, why)
    return Verdict(Mode.REAL_TIME, "Spark allows it, and a real-time slot is free")


def objection(build: Callable[[], DataFrame]) -> str | None:
    """Spark's objection to real time; None if it accepts.

    `build` uses `empty_stream`, Spark's in-memory source of real-time streams: so the planner does the same as for
    Kafka.
    """
    try:
        frame = build()
        writer = frame.writeStream.format("console").outputMode("update")
        writer = writer.trigger(realTime="5 seconds")  # type: ignore[call-overload]  # unknown to PySpark's overloads
        with TemporaryDirectory(prefix="penstock-rehearsal-", ignore_cleanup_errors=True) as folder:
            query = writer.option("checkpointLocation", folder).start()
            try:
                return refusal(frame.sparkSession, query)
            finally:
                query.stop()
    except SPARK_ERRORS as error:
        return plainly(error)


def refusal(spark: SparkSession, query: StreamingQuery) -> str | None:
    """Wait until a real-time query is planned; return Spark's objection, or None when its job runs."""
    until = time.monotonic() + _TIMEOUT
    jobs = spark.sparkContext.statusTracker()
    while not (planned := jobs.getJobIdsForGroup(str(query.runId))) and query.isActive and time.monotonic() < until:
        time.sleep(0.02)
    error = query.exception()
    # Neither a failure of the running job nor a transient error is an objection to the mode.
    return plainly(error) if error and not planned and not is_transient(error) else None


def accepts_update(frame: DataFrame) -> bool:
    """Whether the result can be written on each change; otherwise rows are written once, when they are final."""
    return refused(frame, "Update") is None


def refused(frame: DataFrame, output: str) -> str | None:
    """Spark's objection to an output mode (Update, Append or Complete); None if it accepts."""
    jvm = frame.sparkSession._jvm
    assert jvm is not None
    checker = getattr(jvm, "org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker$")
    mode = getattr(jvm.org.apache.spark.sql.streaming.OutputMode, output)()
    try:
        getattr(checker, "MODULE$").checkForStreaming(analyzed(frame), mode)
    except SPARK_ERRORS as error:
        return plainly(error)
    return None


_ONLY = "runs in micro-batches only"
_OPERATORS = {
    "StreamingSymmetricHashJoin": "a join of two streams",
    "StreamingDeduplicateWithinWatermark": "dropDuplicatesWithinWatermark()",
    "SessionWindowStateStoreSave": "a session window",
    "ArrowEvalPython": "a Python function",
    "BatchEvalPython": "a Python function",
    "MapInArrow": "mapInArrow()",
    "MapInPandas": "mapInPandas()",
    "FlatMapGroupsInArrow": "applyInArrow()",
    "FlatMapGroupsInPandas": "applyInPandas()",
    "FlatMapGroupsInPandasWithState": "applyInPandasWithState()",
    "TransformWithStateInPySpark": "state in Python",
    "ArrowAggregatePython": "an aggregation in Python",
    "AggregateInPandas": "an aggregation in Python",
    "StreamingGlobalLimit": "LIMIT",
    "BroadcastNestedLoopJoin": "a join without equal columns",
    "CartesianProduct": "a join without equal columns",
    "SortMergeJoin": "a join with a table that is too large to be sent to every task",
    "ShuffledHashJoin": "a join with a table that is too large to be sent to every task",
}
"""Operators that Spark refuses in real time, as users know them."""
_SENTENCES = {
    "session window streaming aggregations": "sessions are written when they are final",
    "stateful operators .* before a union": "what is aggregated before a union runs in micro-batches only",
    "union on two or more identical": "it reads one channel twice, which runs in micro-batches only",
    "possible 'correctness' issue": (
        "it aggregates what is aggregated already, which takes a watermark and rows that come when they are final"
    ),
    "Distinct aggregations": "distinct values cannot be counted over a stream; approx_count_distinct() can",
    "Sorting is not supported": "the rows of a stream, which has no end, cannot be sorted",
    "Limits are not supported": "some rows of a stream cannot be kept up to date; leave LIMIT out",
    "Window function is not supported": "a function over a window of rows needs all rows; group by window() instead",
}
"""Short texts for errors of Spark, by a part of their text."""


def plainly(error: Exception) -> str:
    """Spark's objection as a sentence for users; Spark's text when it is unknown."""
    text = description(error)
    if listed := re.search(r"\(s\): (.+?) (?:is|are) not in the \w+ allowlist", text):
        names = dict.fromkeys(_OPERATORS[name] for name in listed[1].split(", ") if name in _OPERATORS)
        return f"{' and '.join(names)} {_ONLY}" if names else text
    return next((plain for part, plain in _SENTENCES.items() if re.search(part, text)), text)


def empty_stream(spark: SparkSession) -> DataFrame:
    """An empty stream with the columns of raw records, which may run in real time."""
    jvm = spark._jvm
    assert jvm is not None
    encoder = jvm.org.apache.spark.sql.Encoders.row(jvm.org.apache.spark.sql.types.StructType.fromDDL(RAW))
    source = getattr(jvm, "org.apache.spark.sql.execution.streaming.sources.LowLatencyMemoryStream$")
    return DataFrame(getattr(source, "MODULE$").apply(spark._jsparkSession, 1, encoder).toDF(), spark)


_SHUFFLES = 3
"""An upper bound for nearly all queries; the plan gives the exact number."""


@dataclass(frozen=True)
class Need:
    """The slots of all queries. Tasks of a real-time query keep their slots; other tasks can wait."""

    fixed: int
    """Slots that real-time queries keep."""
    waiting: int
    """Tasks of the other queries, if all run at the same time."""

    @property
    def least(self) -> int:
        return self.fixed + min(self.waiting, 1)

    @property
    def most(self) -> int:
        return self.fixed + self.waiting

    def check(self, there: int, master: str) -> str | None:
        """Misconfigured when there are too few slots; a remark when micro-batches must share slots."""
        if there < self.least:
            raise Misconfigured(
                "penstock.toml, [spark]",
                f"the queries need {self.least} slots at once, and {master} has {there}",
                "use more slots, run fewer queries in real time (real_time_queries, mode=), "
                "or declare fewer partitions for the channels that these read",
            )
        if there < self.most:
            return f"the queries can use {self.most} slots, and {master} has {there}: micro-batches wait for each other"
        return None


def need(
    queries: Sequence[Query],
    real_time: Mapping[str, int],
    partitions: Mapping[str, int],
    validated: Iterable[str],
    shuffle: int,
    spread: Mapping[str, int] | None = None,
) -> Need:
    """The slots that all queries need. `real_time`: the real-time queries, and how often they shuffle.

    `spread`: the state partitions of queries with a checkpoint; others use `shuffle`.
    """
    fixed = waiting = 0
    for query in queries:
        reading = sum(partitions[name] for name in query.inputs)
        state = (spread or {}).get(query.name, shuffle)
        if query.name in real_time:
            # Spark starts the tasks of all stages at once.
            fixed += reading + state * real_time[query.name]
        else:
            waiting += max(reading, state)
    return Need(fixed, waiting + sum(partitions[name] for name in validated))


def guessed(queries: Sequence[Query], locations: int, partitions: Mapping[str, int]) -> dict[str, int]:
    """The queries that may run in real time, and how often they may shuffle: the worst case, without Spark."""
    forced = [query for query in queries if query.mode is Mode.REAL_TIME]
    able = [query for query in queries if query.mode is Mode.AUTO and not query.every and query.emit is Emit.CHANGE]
    able.sort(key=lambda query: -sum(partitions[name] for name in query.inputs))
    return {query.name: _SHUFFLES for query in (*forced, *able[:locations])}

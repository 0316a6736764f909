"""What Spark's plan of a query tells: its nodes, its cost, its windows, and whether it counts each record once.

It is read through py4j.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame

from penstock.analysis.frames import DELETED, KEY, is_boundary
from penstock.analysis.query import Query

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructField

STATE_IN_PYTHON = "TransformWithStateInPySpark"
"""The node that keeps state in Python."""
EVENT_TIME, CLOCK, NO_TIME = "EventTime", "ProcessingTime", "None"
"""By which time such a node calls timers and forgets values, in Spark's words."""
_WATERMARK = "spark.watermarkDelayMs"


def analyzed(frame: "DataFrame") -> Any:
    """What was written, with every name resolved and nothing optimized."""
    return frame._jdf.queryExecution().analyzed()


def text(frame: "DataFrame") -> str:
    """The whole plan, for those who look for a word in it."""
    return str(analyzed(frame).toString())


def nodes(top: Any, until: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    """A node, or an expression, and all below it, from left to right; below those that `until` is true for, nothing."""
    waiting = [top]
    while waiting:
        node = waiting.pop()
        yield node
        if until is None or not until(node):
            waiting += reversed(list(each(node.children())))


def kind_of(node: Any) -> str:
    return str(node.nodeName())


def columns(node: Any) -> set[str]:
    """The names of what a node gives."""
    return {str(one.name()) for one in each(node.output())}


def each(sequence: Any) -> Iterator[Any]:
    """The elements of a sequence of Scala's."""
    return (sequence.apply(index) for index in range(sequence.size()))


def bare(expression: Any) -> Any:
    """An expression without the name that it was given."""
    return expression.child() if kind_of(expression) == "Alias" else expression


def grouped(aggregate: Any) -> list[list[Any]]:
    """For each expression that an aggregation groups by, the columns of its result that hold it."""
    given = [(one, bare(one)) for one in each(aggregate.aggregateExpressions())]
    return [[one for one, meant in given if by.semanticEquals(meant)] for by in each(aggregate.groupingExpressions())]


def watermarked(column: "StructField") -> bool:
    """Whether a column of a stream is the one that its watermark goes by."""
    return _WATERMARK in (column.metadata or {})


def time_of(node: Any) -> str:
    """By which time a node that keeps state in Python goes."""
    return str(node.timeMode().toString())


def from_state(frame: "DataFrame") -> set[str]:
    """The columns that state in Python gives, wherever it stands."""
    keepers = (node for node in nodes(analyzed(frame)) if kind_of(node) == STATE_IN_PYTHON)
    return {name for node in keepers for name in columns(node)}


_OPERATOR = re.compile(r"^[\s:+-]*(?:\*\(\d+\) )?([A-Z]\w*)", re.MULTILINE)
_IN_COLUMNS = re.compile(r"Arrow|Pandas|Python")
_BY_ROWS = re.compile(r"BatchEvalPython|TransformWithStateIn|InPandasWithState")


class Cost(StrEnum):
    """The class of a query's cost."""

    JVM = "jvm"
    ARROW = "arrow"
    ROW = "row"

    @property
    def description(self) -> str:
        """What it means for each record, by order of magnitude."""
        match self:
            case Cost.JVM:
                return "no Python: all of it runs in the JVM"
            case Cost.ARROW:
                return "records go to Python in columns: some 3 µs each for a function, hardly any for mapInArrow"
            case Cost.ROW:
                return "records go to Python one by one: some 20 µs each; a function made with useArrow=True costs less"


def cost(result: DataFrame) -> Cost:
    """The class of a query, from its result over streams: the dearest operator decides."""
    names = operators(result)
    if any(_BY_ROWS.search(name) for name in names):
        return Cost.ROW
    return Cost.ARROW if any(_IN_COLUMNS.search(name) for name in names) else Cost.JVM


def shuffles(result: DataFrame) -> int:
    """How often its records change their task on their way."""
    return operators(result).count("Exchange")


def operators(result: DataFrame) -> list[str]:
    """The names of the operators that Spark would run."""
    jvm = result.sparkSession._jvm
    assert jvm is not None
    simple = jvm.org.apache.spark.sql.execution.ExplainMode.fromString("simple")
    # Of a text in SQL alone, Spark would not see that it is about streams.
    analyzed = result.select("*")
    return _OPERATOR.findall(str(analyzed._jdf.queryExecution().explainString(simple)))


_HARMLESS = {"Project", "SubqueryAlias", "View", "EventTimeWatermark", "Aggregate", "CollectMetrics", "Union"}
_STATELESS = {"Project", "SubqueryAlias", "View", "EventTimeWatermark", "Filter", "Generate", "CollectMetrics"}
_MULTIPLIES = {"Generate", "Expand", "Join"}
_WORDS = {
    "Filter": "its own where() is not declared: say it as where= instead",
    "Expand": "its windows overlap, so that a record counts in several rows",
    "Generate": "it makes several rows of one record",
    "Join": "it joins",
    "Deduplicate": "it drops rows that it has seen",
    "Limit": "it keeps some rows only",
    "TransformWithState": "it keeps state of its own, in Python",
}

AS_IT_CAME = "as_it_came"
"""The name in Spark's plan of what depends on when records came: a batch over the log cannot find it again."""


def against(result: DataFrame, boundaries: Sequence[str]) -> str | None:
    """Why the records of a result cannot be counted; None when they can. Below the boundaries all is our own."""
    if "seen" not in result.columns and "origin" not in result.columns:
        return "its rows carry neither seen() nor origin"
    met: list[Any] = []
    above = list(_above(result, boundaries, met))
    timed = not any({KEY, DELETED} <= columns(channel) for channel in met)
    for node, text in above:
        if node in _HARMLESS or _ours(node, text) or (timed and _of_windows(node, text)):
            continue
        if _of_windows(node, text):
            return "rows of a table may have no time, and are in no window then"
        return next((description for name, description in _WORDS.items() if name in node), f"it holds a {node}")
    aggregates = sum(node == "Aggregate" for node, _ in above)
    if aggregates > 1:
        return "it aggregates what is aggregated already"
    if "seen" in result.columns and not aggregates:
        return "it hands on what another query has counted"
    if Counter(str(channel.name()) for channel in met) != Counter(boundaries):
        return "it does not read each of its channels once"
    return None


def stateless(result: DataFrame) -> bool:
    """Whether a result needs no state: each batch stands for itself."""
    return next(_stateful(result), None) is None


def judges(result: DataFrame) -> list[bool]:
    """Of what may drop late records in a result over streams: whether each judges every record by itself.

    So do joins of channels, and state in Python that goes by event time.
    """
    return [kind_of(node) in ("Join", STATE_IN_PYTHON) for node in _stateful(result) if not _timeless(node)]


def multiplied(frame: DataFrame) -> bool:
    """Whether several rows may stem from one record of a channel."""
    above = list(nodes(analyzed(frame), until=_is_channel))
    met = [str(node.name()) for node in above if _is_channel(node)]
    return len(met) > len(set(met)) or any(kind_of(node) in _MULTIPLIES and _reads(node) for node in above)


def _stateful(result: DataFrame) -> Iterator[Any]:
    """The nodes of a result that keep state, or may do so. Below a channel all is our own."""
    for node in nodes(analyzed(result), until=_is_channel):
        if kind_of(node) == "Join":
            if all(map(_reads, each(node.children()))):
                yield node
        elif kind_of(node) not in _STATELESS and node.children().size():
            yield node


def _timeless(node: Any) -> bool:
    """Whether nothing is late for it: state in Python may go by the clock, or by no time."""
    return kind_of(node) == "Union" or (kind_of(node) == STATE_IN_PYTHON and time_of(node) != EVENT_TIME)


def _reads(plan: Any) -> bool:
    """Whether a part of a plan reads a channel."""
    return any(map(_is_channel, nodes(plan)))


def _is_channel(node: Any) -> bool:
    return kind_of(node) == "CollectMetrics" and is_boundary(str(node.name()))


def by_arrival(result: DataFrame) -> bool:
    """Whether rows depend on when their records came, and not on the records alone."""
    return any(text.split() == ["SubqueryAlias", AS_IT_CAME] for _, text in _above(result, (), []))


def _above(result: DataFrame, boundaries: Sequence[str], met: list[Any]) -> Iterator[tuple[str, str]]:
    """What is done with records behind the boundaries, which are met: the kind of each node, and its text."""

    def ends(node: Any) -> bool:
        return kind_of(node) == "CollectMetrics" and str(node.name()) in boundaries

    for node in nodes(analyzed(result), until=ends):
        if ends(node):
            met.append(node)
        else:
            yield kind_of(node), str(node.simpleString(200))


def _ours(node: str, text: str) -> bool:
    """A filter that we add."""
    return node == "Filter" and re.fullmatch(r"Filter \(_fits#\d+ AND _wanted#\d+\)", text) is not None


def _of_windows(node: str, text: str) -> bool:
    """A filter that Spark adds to each window: its time must not be null. That of a stream's records never is."""
    return node == "Filter" and re.fullmatch(r"Filter isnotnull\(event_time#\d+(-T\d+ms)?\)", text) is not None


def of_sessions(result: DataFrame) -> bool:
    """Whether a result has session windows. They grow together, so a record's own is not among them."""
    return "session_window#" in str(result._jdf.queryExecution().analyzed().toString())


def gap_of(result: DataFrame) -> str | None:
    """The gap that ends the sessions of a result, as it was written; None when it differs from record to record."""
    plan = str(result._jdf.queryExecution().analyzed().toString())
    found = re.findall(r"event_time#\d+L? \+ cast\(([\w .]+) as interval\)", plan)
    return str(found[0]) if len(found) == 1 else None


def by_time(result: DataFrame) -> bool:
    """Whether the windows of a result have an end in time. Those by count have none, and close nothing out."""
    return "end" in getattr(result.schema["window"].dataType, "names", ())


def untold(query: Query, result: DataFrame, uncounted: str | None) -> str | None:
    """Why nobody can tell which records of a query without a gate came too late; None when its windows tell it.

    `uncounted` is why its records cannot be counted.
    """
    if len(query.inputs) != 1:
        return "it reads several channels"
    if of_sessions(result):
        return "its sessions grow together"
    if lacking := [name for name in ("window", "seen") if name not in result.columns]:
        return f"its rows have no {' and no '.join(lacking)}"
    if not by_time(result):
        return "its windows are not of time"
    # That a record counts in several rows is no matter here: it is late when all of them are closed.
    overlap = uncounted is not None and uncounted.startswith("its windows overlap")
    return None if overlap else uncounted

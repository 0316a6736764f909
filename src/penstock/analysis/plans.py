"""Spark's own plan of a frame: how it is gone through, and what its nodes and expressions tell.

It is read through py4j, so nothing of Spark is imported for it.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

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

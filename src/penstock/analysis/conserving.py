"""Whether each record that a query takes is counted in exactly one row of its result: read from Spark's own plan."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql import DataFrame

from penstock.analysis.frames import DELETED, KEY, is_boundary

_HARMLESS = {"Project", "SubqueryAlias", "View", "EventTimeWatermark", "Aggregate", "CollectMetrics", "Union"}
_STATELESS = {"Project", "SubqueryAlias", "View", "EventTimeWatermark", "Filter", "Generate", "CollectMetrics"}
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
    columns = result.columns
    if "seen" not in columns and "origin" not in columns:
        return "its rows carry neither seen() nor origin"
    plan = result._jdf.queryExecution().analyzed()
    aggregates = 0
    met: list[Any] = []
    nodes = list(_above(plan, boundaries, met))
    timed = not any({KEY, DELETED} <= _columns(channel) for channel in met)
    for node, text in nodes:
        aggregates += node == "Aggregate"
        if node in _HARMLESS or _ours(node, text) or (timed and _of_windows(node, text)):
            continue
        if _of_windows(node, text):
            return "rows of a table may have no time, and are in no window then"
        return next((words for name, words in _WORDS.items() if name in node), f"it holds a {node}")
    if aggregates > 1:
        return "it aggregates what is aggregated already"
    if "seen" in columns and not aggregates:
        return "it hands on what another query has counted"
    if Counter(str(channel.name()) for channel in met) != Counter(boundaries):
        return "it does not read each of its channels once"
    return None


def joins_streams(result: DataFrame) -> bool:
    """Whether all that a result has of state is one join of channels, which judges each record by itself."""
    return _joins(result._jdf.queryExecution().analyzed()) == [True]


def stateless(result: DataFrame) -> bool:
    """Whether a result needs no state: each batch stands for itself."""
    return not _joins(result._jdf.queryExecution().analyzed())


def _joins(plan: Any) -> list[bool]:
    """Of the nodes that may drop what is late: whether each is a join of channels. Below a channel all is our own."""
    name = str(plan.nodeName())
    if _is_channel(plan):
        return []
    children = [plan.children().apply(index) for index in range(plan.children().size())]
    found = [one for child in children for one in _joins(child)]
    if name == "Join":
        return [*found, True] if all(map(_reads, children)) else found
    return found if name in _STATELESS or not children else [*found, False]


def _reads(plan: Any) -> bool:
    """Whether a part of a plan reads a channel."""
    return _is_channel(plan) or any(_reads(plan.children().apply(index)) for index in range(plan.children().size()))


def _is_channel(plan: Any) -> bool:
    return str(plan.nodeName()) == "CollectMetrics" and is_boundary(str(plan.name()))


def by_arrival(result: DataFrame) -> bool:
    """Whether rows depend on when their records came, and not on the records alone."""
    plan = result._jdf.queryExecution().analyzed()
    return any(text.split() == ["SubqueryAlias", AS_IT_CAME] for _, text in _above(plan, (), []))


def _above(plan: Any, boundaries: Sequence[str], met: list[Any]) -> Iterator[tuple[str, str]]:
    name = str(plan.nodeName())
    if name == "CollectMetrics" and str(plan.name()) in boundaries:
        met.append(plan)
        return
    yield name, str(plan.simpleString(200))
    children = plan.children()
    for index in range(children.size()):
        yield from _above(children.apply(index), boundaries, met)


def _columns(plan: Any) -> set[str]:
    output = plan.output()
    return {str(output.apply(index).name()) for index in range(output.size())}


def _ours(node: str, text: str) -> bool:
    """A filter that we add."""
    return node == "Filter" and re.fullmatch(r"Filter \(_fits#\d+ AND _wanted#\d+\)", text) is not None


def _of_windows(node: str, text: str) -> bool:
    """A filter that Spark adds to each window: its time must not be null. That of a stream's records never is."""
    return node == "Filter" and re.fullmatch(r"Filter isnotnull\(event_time#\d+(-T\d+ms)?\)", text) is not None

"""Whether each record that a query takes is counted in exactly one row of its result: read from Spark's own plan."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql import DataFrame

_HARMLESS = {"Project", "SubqueryAlias", "View", "EventTimeWatermark", "Aggregate", "CollectMetrics", "Union"}
_STATELESS = {"Project", "SubqueryAlias", "View", "EventTimeWatermark", "Filter", "Generate"}
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
    met: Counter[str] = Counter()
    for node, text in _above(plan, boundaries, met):
        aggregates += node == "Aggregate"
        if node in _HARMLESS or _not_its_own(node, text):
            continue
        return next((words for name, words in _WORDS.items() if name in node), f"it holds a {node}")
    if aggregates > 1:
        return "it aggregates what is aggregated already"
    if "seen" in columns and not aggregates:
        return "it hands on what another query has counted"
    if any(met[boundary] != 1 for boundary in boundaries):
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
    if name == "CollectMetrics":
        return []
    children = [plan.children().apply(index) for index in range(plan.children().size())]
    found = [one for child in children for one in _joins(child)]
    if name == "Join":
        return [*found, True] if all(map(_reads, children)) else found
    return found if name in _STATELESS or not children else [*found, False]


def _reads(plan: Any) -> bool:
    """Whether a part of a plan reads a channel."""
    return str(plan.nodeName()) == "CollectMetrics" or any(
        _reads(plan.children().apply(index)) for index in range(plan.children().size())
    )


def by_arrival(result: DataFrame) -> bool:
    """Whether rows depend on when their records came, and not on the records alone."""
    plan = result._jdf.queryExecution().analyzed()
    return any(text.split() == ["SubqueryAlias", AS_IT_CAME] for _, text in _above(plan, (), Counter()))


def _above(plan: Any, boundaries: Sequence[str], met: Counter[str]) -> Iterator[tuple[str, str]]:
    name = str(plan.nodeName())
    if name == "CollectMetrics" and (boundary := str(plan.name())) in boundaries:
        met[boundary] += 1
        return
    yield name, str(plan.simpleString(200))
    children = plan.children()
    for index in range(children.size()):
        yield from _above(children.apply(index), boundaries, met)


def _not_its_own(node: str, text: str) -> bool:
    """A filter that we add, or Spark to each window: its time must not be null, and ours never is."""
    of_windows = r"Filter isnotnull\(event_time#\d+(-T\d+ms)?\)"
    ours = r"Filter \(_fits#\d+ AND _wanted#\d+\)"
    return node == "Filter" and re.fullmatch(f"{of_windows}|{ours}", text) is not None

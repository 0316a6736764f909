"""Whether each record that a query takes is counted in exactly one row of its result: read from Spark's own plan."""

import re
from collections.abc import Iterator
from typing import Any

from pyspark.sql import DataFrame

_HARMLESS = {"Project", "SubqueryAlias", "View", "EventTimeWatermark", "Aggregate", "CollectMetrics"}
_WORDS = {
    "Filter": "its own where() is not declared: say it as where= instead",
    "Expand": "its windows overlap, so that a record counts in several rows",
    "Generate": "it makes several rows of one record",
    "Join": "it joins",
    "Deduplicate": "it drops rows that it has seen",
    "Limit": "it keeps some rows only",
}


def against(result: DataFrame, boundary: str) -> str | None:
    """Why the records of a result cannot be counted; None when they can. Below the boundary all is our own."""
    columns = result.columns
    if "seen" not in columns and "origin" not in columns:
        return "its rows carry neither seen() nor origin"
    plan = result._jdf.queryExecution().analyzed()
    aggregates = 0
    for node, text in _above(plan, boundary):
        aggregates += node == "Aggregate"
        if node in _HARMLESS or _not_its_own(node, text):
            continue
        return next((words for name, words in _WORDS.items() if name in node), f"it holds a {node}")
    if aggregates > 1:
        return "it aggregates what is aggregated already"
    if "seen" in columns and not aggregates:
        return "it hands on what another query has counted"
    return None


def _above(plan: Any, boundary: str) -> Iterator[tuple[str, str]]:
    name = str(plan.nodeName())
    if name == "CollectMetrics" and str(plan.name()) == boundary:
        return
    yield name, str(plan.simpleString(200))
    children = plan.children()
    for index in range(children.size()):
        yield from _above(children.apply(index), boundary)


def _not_its_own(node: str, text: str) -> bool:
    """A filter that we add, or Spark to each window: its time must not be null, and ours never is."""
    of_windows = r"Filter isnotnull\(event_time#\d+(-T\d+ms)?\)"
    ours = r"Filter \(_fits#\d+ AND _wanted#\d+\)"
    return node == "Filter" and re.fullmatch(f"{of_windows}|{ours}", text) is not None

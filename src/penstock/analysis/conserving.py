"""Whether each record that a query takes is counted in exactly one row of its result: read from Spark's own plan."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql import DataFrame

from penstock.analysis.frames import DELETED, KEY, is_boundary
from penstock.analysis.plans import EVENT_TIME, STATE_IN_PYTHON, analyzed, columns, each, kind_of, nodes, time_of

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
        return next((words for name, words in _WORDS.items() if name in node), f"it holds a {node}")
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

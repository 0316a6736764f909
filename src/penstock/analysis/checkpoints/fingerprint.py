"""What of a query its checkpoint depends on: where it reads and writes, and what its state means, from Spark's plan.

Spark compares the types of a state alone. A sum of one column may be followed by the sum of another, and the two would
be added up. So what is kept here are the expressions themselves, as they were written.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from penstock.analysis.plans import analyzed, bare, each, kind_of, nodes

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_TAKEN = " taken"
"""How Spark's plan names the place where the records of a channel enter a query."""
_STATEFUL = re.compile(r"Aggregate|Distinct|Deduplicate|WithState|Limit")
_LAMBDA = re.compile(r"\b(lambda \w+?)_\d+(?=#\d)")
_NUMBERED = re.compile(
    # Behind the name of a column, which may be that of an expression. A text that begins so is a literal.
    r"(?<=[^\s(\[,])#\d+L?\b(-T\d+ms)?|(?<=\w)@[0-9a-f]+\b"
    r"|\b0x[0-9a-f]+|\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"
)
_MOST = 10_000
"""Of so many fields a line of the plan tells."""


@dataclass(frozen=True, slots=True)
class Operator:
    """One that keeps state: its kind, what tells its rows apart, and what it keeps for each."""

    kind: str
    keys: tuple[str, ...] = ()
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fingerprint:
    sources: tuple[str, ...]
    """The channels in the order in which Spark reads them."""
    into: str
    output: str
    """Whether rows are written when they change (update) or once (append)."""
    operators: tuple[Operator, ...] = ()
    plan: str = ""
    """A hash over all that is done with a record."""

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Self:
        """From JSON."""
        operators = tuple(Operator(one["kind"], tuple(one["keys"]), tuple(one["values"])) for one in told["operators"])
        return cls(tuple(told["sources"]), str(told["into"]), str(told["output"]), operators, str(told["plan"]))


def fingerprint(result: "DataFrame", into: str, output: str) -> Fingerprint:
    """That of a result over streams."""
    sources, operators, lines = list[str](), list[Operator](), list[str]()
    for node in nodes(analyzed(result)):
        kind = kind_of(node)
        if _stateful(node, kind):
            operators.append(_operator(node, kind))
        if kind == "CollectMetrics":
            name = str(node.name())
            sources += [name.removesuffix(_TAKEN)] if name.endswith(_TAKEN) else []
        elif node.children().size():
            # A source tells addresses that may change, and what observes the records changes nothing.
            lines.append(plain(str(node.simpleString(_MOST))))
    whole = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return Fingerprint(tuple(sources), into, output, tuple(operators), whole[:16])


def plain(expression: str) -> str:
    """An expression without the numbers that Spark gives anew each time."""
    return _NUMBERED.sub("", _LAMBDA.sub(r"\1", expression))


def _stateful(node: Any, kind: str) -> bool:
    if kind == "Join":
        return bool(node.left().isStreaming() and node.right().isStreaming())
    return _STATEFUL.search(kind) is not None and bool(node.isStreaming())


def _operator(node: Any, kind: str) -> Operator:
    if kind == "Aggregate":
        keys = tuple(_text(bare(one)) for one in each(node.groupingExpressions()))
        found = (one for named in each(node.aggregateExpressions()) for one in _aggregated(named))
        # The same function twice is kept once.
        return Operator(kind, keys, tuple(dict.fromkeys(map(_text, found))))
    if kind.startswith("Deduplicate"):
        return Operator(kind, tuple(sorted(_text(one) for one in each(node.keys()))))
    if kind == "Join":
        condition = node.condition()
        return Operator(f"{node.joinType()} Join", (_text(condition.get()),) if condition.isDefined() else ())
    if "WithState" in kind:
        own = node.leftAttributes if kind.startswith("TransformWithStateInP") else node.groupingAttributes
        return Operator(kind, tuple(_text(one) for one in each(own())))
    return Operator(kind)


def _aggregated(expression: Any) -> Iterator[Any]:
    """The functions that fold records, wherever they stand in an expression."""
    return filter(_folds, nodes(expression, until=_folds))


def _folds(expression: Any) -> bool:
    return kind_of(expression) == "AggregateExpression"


def _text(expression: Any) -> str:
    return f"{plain(str(expression.toString()))} {expression.dataType().catalogString()}"

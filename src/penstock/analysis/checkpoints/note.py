"""The note beside a checkpoint, penstock.json: facts about the query that Spark does not store.

Its fingerprint holds what the checkpoint depends on: the inputs, the output, and the expressions of the state. Spark
compares only types: without the expressions, a sum of one column could continue as the sum of another.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from pydantic import TypeAdapter

from penstock.analysis.checkpoints.batches import on_disk, parse_offsets
from penstock.analysis.plans import analyzed, bare, each, kind_of, nodes
from penstock.core.contracts import Offsets
from penstock.core.errors import Misconfigured

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_RESERVED = " taken"
"""The suffix of the observation in Spark's plan where the records of a channel enter a query."""
_STATEFUL = re.compile(r"Aggregate|Distinct|Deduplicate|WithState|Limit")
_LAMBDA = re.compile(r"\b(lambda \w+?)_\d+(?=#\d)")
_NUMBERED = re.compile(
    # After the name of a column or an expression. A literal may begin with the same characters.
    r"(?<=[^\s(\[,])#\d+L?\b(-T\d+ms)?|(?<=\w)@[0-9a-f]+\b"
    r"|\b0x[0-9a-f]+|\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"
)
_MOST = 10_000
"""How many fields a line of the plan shows."""


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator with state: its kind, the keys of its rows, and the values."""

    kind: str
    keys: tuple[str, ...] = ()
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fingerprint:
    sources: tuple[str, ...]
    """The channels, in Spark's order."""
    into: str
    output: str
    """Whether rows are written when they change (update) or once (append)."""
    operators: tuple[Operator, ...] = ()
    plan: str = ""
    """A hash of the whole plan."""


_FINGERPRINT = TypeAdapter[Fingerprint | None](Fingerprint | None)


def fingerprint(result: "DataFrame", into: str, output: str) -> Fingerprint:
    """The fingerprint of a result over streams."""
    sources, operators, lines = list[str](), list[Operator](), list[str]()
    for node in nodes(analyzed(result)):
        kind = kind_of(node)
        if _stateful(node, kind):
            operators.append(_operator(node, kind))
        if kind == "CollectMetrics":
            name = str(node.name())
            sources += [name.removesuffix(_RESERVED)] if name.endswith(_RESERVED) else []
        elif node.children().size():
            # Sources contain addresses, which may change. Observations change nothing.
            lines.append(plain(str(node.simpleString(_MOST))))
    whole = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return Fingerprint(tuple(sources), into, output, tuple(operators), whole[:16])


def plain(expression: str) -> str:
    """An expression without ids that differ between plans."""
    return _NUMBERED.sub("", _LAMBDA.sub(r"\1", expression))


def _stateful(node: Any, kind: str) -> bool:
    if kind == "Join":
        return bool(node.left().isStreaming() and node.right().isStreaming())
    return _STATEFUL.search(kind) is not None and bool(node.isStreaming())


def _operator(node: Any, kind: str) -> Operator:
    if kind == "Aggregate":
        keys = tuple(_text(bare(one)) for one in each(node.groupingExpressions()))
        found = (one for named in each(node.aggregateExpressions()) for one in _aggregated(named))
        # Spark stores equal functions once.
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


def _aggregated(expression: Any) -> list[Any]:
    return [one for one in nodes(expression) if kind_of(one) == "AggregateExpression"]


def _text(expression: Any) -> str:
    return f"{plain(str(expression.toString()))} {expression.dataType().catalogString()}"


NAME = "penstock.json"
FORMAT = 2
_CHECKSUM = "checksum"
LAST = 2**9 - 1
"""The highest generation that fits into a version: stores compare versions as numbers of 53 bits."""


@dataclass(frozen=True)
class Note:
    topics: Mapping[str, str] = field(default_factory=dict)
    """The ids of the query's topics."""
    generation: int = 0
    """How many checkpoints the query had before this one."""
    since: Mapping[str, Offsets] | None = None
    """Per channel, the first offsets of this generation; None: the beginning of the channels."""
    query: Fingerprint | None = None
    """The query at its last start; None in old notes."""
    writer: str = ""
    """The writer token of its rows; empty before the first start."""
    began: Mapping[str, Offsets] | None = None
    """Per channel, its first offsets when this generation started; None in old notes."""

    def write(self, folder: str) -> None:
        """Write the note; nothing is written to a remote file system."""
        if (path := on_disk(folder)) is None:
            return
        path.mkdir(parents=True, exist_ok=True)
        written = (path / NAME).with_suffix(".new")
        # As it will be read: JSON keys are strings.
        fields = json.loads(json.dumps({"format": FORMAT, **asdict(self)}))
        written.write_text(json.dumps({**fields, _CHECKSUM: _checksum(fields)}), encoding="utf-8")
        written.replace(path / NAME)


def _checksum(fields: Mapping[str, Any]) -> int:
    return crc32(json.dumps(fields, sort_keys=True).encode())


def note_of(folder: str) -> Note:
    """Read the note of a checkpoint; it is empty when it is missing or remote; Misconfigured when it is invalid."""
    path = on_disk(folder)
    if path is None or not (path / NAME).exists():
        return Note()
    try:
        fields = json.loads((path / NAME).read_text(encoding="utf-8"))
        if not isinstance(fields.get("format"), int):
            # The first format held only the topics.
            return Note(_topics(fields))
        if fields.pop(_CHECKSUM, None) not in (None, _checksum(fields)):
            raise ValueError("its checksum does not match")
        if fields["format"] > FORMAT:
            raise ValueError(f"a later version of Penstock wrote it, in format {fields['format']}")
        return Note(
            _topics(fields["topics"]),
            # Notes of earlier versions call it "life".
            int(fields["generation"] if "generation" in fields else fields["life"]),
            None if fields["since"] is None else parse_offsets(fields["since"]),
            _FINGERPRINT.validate_python(fields["query"]),
            str(fields.get("writer", "")),
            None if fields.get("began") is None else parse_offsets(fields["began"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"its note {NAME} cannot be read: {error!r}"
        raise Misconfigured(f"checkpoint {folder}", problem, "bring it back from a copy") from error


def last_generation(folder: str) -> int:
    """The highest generation of a checkpoint and those that were set aside; 0 when there is none."""
    path, generations = on_disk(folder), [0]
    for one in [] if path is None else [path, *_aside(path).values()]:
        with suppress(Misconfigured):
            generations.append(note_of(str(one)).generation)
    return max(generations)


def next_generation(name: str, generation: int) -> int:
    """The next generation of a query; Misconfigured after the last one."""
    if generation >= LAST:
        problem = f"it has had {LAST} generations, and versions cannot count more"
        raise Misconfigured(f"query {name}", problem, "give it another name, and its result another channel")
    return generation + 1


def set_aside(path: Path) -> Path | None:
    """Rename a checkpoint with the next free number; None when there is none."""
    if not path.exists():
        return None
    aside = path.with_name(f"{path.name}.{1 + max(_aside(path), default=0)}")
    path.rename(aside)
    return aside


def _aside(path: Path) -> dict[int, Path]:
    """The checkpoints that were set aside, by number."""
    pattern = re.compile(re.escape(path.name) + r"\.(\d+)")
    others = path.parent.iterdir() if path.parent.is_dir() else ()
    return {int(match[1]): other for other in others if (match := pattern.fullmatch(other.name))}


def _topics(fields: Mapping[str, Any]) -> dict[str, str]:
    return {str(name): str(topic) for name, topic in fields.items()}

"""The state that a query keeps, as its checkpoint holds it: which parts of it can be asked, and by which columns."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StructField, StructType

from penstock.analysis.checkpoints.batches import Batch, batches, on_disk
from penstock.analysis.engine import Engine
from penstock.analysis.frames import words
from penstock.analysis.plans import analyzed, grouped, kind_of, nodes
from penstock.analysis.query import Query
from penstock.core.clock import Clock
from penstock.core.errors import Unavailable

_AGGREGATIONS = ("stateStoreSave", "StatefulStreamlineAggregate")
"""In micro-batches, and in real time."""
_SESSIONS, _OWN = "sessionWindowStateStoreSaveExec", "transformWithState"
_UNASKED = {
    "dedupe": "what it has seen, to know it when it comes again",
    "dedupeWithinWatermark": "what it has seen, to know it when it comes again",
    "symmetricHashJoin": "the records of both sides that may still find their partners",
}
_EXPIRES = ["value", "ttlExpirationMs"]
_TIMER, _TIMERS = "expiration_timestamp_ms", "timers"

Columns = Sequence[tuple[str, Column, DataType]]
"""The columns by which entries are kept: the name, the value, the type."""


@dataclass(frozen=True)
class Part:
    """A stateful operator that can be asked, or one of its variables: a frame with a row for each entry."""

    frame: DataFrame
    key: Columns
    value: Column
    variable: str | None = None
    of: Column | None = None
    """Of a map, the key of an entry within it."""
    several: bool = False
    """A key has any number of entries."""


def opened(engine: Engine, query: Query, clock: Clock) -> tuple[dict[str, Any], list[Part]]:
    """The query, the position and what is to be said of it; and the parts of its state that can be asked."""
    folder = engine.checkpoint(query.name)
    told: dict[str, Any] = {"query": query.name, "into": query.into, "position": None, "note": None}
    known = batches(folder)
    if not known and on_disk(folder) is not None:
        return {**told, "note": "it has not finished a batch yet"}, []
    with told_by_spark(query):
        operators = _operators(engine, folder)
        number = known[-1].number if known else max((one["maxBatchId"] for one in operators), default=None)
        told["position"] = _position(folder, known[-1] if known else None, number)
        parts: list[Part] = []
        notes: dict[str, None] = {}
        for operator in operators:
            options = {"batchId": str(number), "operatorId": str(operator["operatorId"])}
            name = operator["operatorName"]
            if name in _UNASKED:
                notes[f"it keeps {_UNASKED[name]}: that cannot be asked for by the keys of its rows"] = None
            elif name.startswith(_OWN):
                parts += _variables(engine, folder, options, operator["operatorProperties"], clock)
            elif name == _SESSIONS:
                parts.append(_sessions(_read(engine, folder, options)))
            elif name in _AGGREGATIONS:
                parts.append(_aggregation(engine, query, _read(engine, folder, options)))
            else:
                notes[f"it keeps the state of {name}, which cannot be asked for"] = None
    if not operators:
        notes["it keeps no state: each of its rows stems from what came with it"] = None
    return {**told, "note": None if parts else "; ".join(notes)}, parts


def _operators(engine: Engine, folder: str) -> list[Any]:
    """Each stateful operator once: some have several stores."""
    path = on_disk(folder)
    if path is not None and not (path / "state").exists():
        return []
    rows = engine.spark.read.format("state-metadata").load(folder).collect()
    return list({row["operatorId"]: row for row in sorted(rows, key=lambda row: row["operatorId"])}.values())


def _position(folder: str, batch: Batch | None, number: int | None) -> dict[str, Any]:
    """Up to where the state reflects the channels: all that is known, where the checkpoint cannot be looked into."""
    if batch is None:
        return {"batch": number, "at": None, "watermark": None, "reads": None}
    at = None
    if (path := on_disk(folder)) is not None:
        commit = path / "commits" / str(batch.number)
        at = commit.stat().st_mtime_ns // 1_000 if commit.exists() else None
    reads = {channel: {str(part): end for part, end in ends.items()} for channel, ends in batch.ends.items()}
    return {"batch": batch.number, "at": at, "watermark": batch.watermark * 1_000 or None, "reads": reads}


def _read(engine: Engine, folder: str, options: Mapping[str, str]) -> DataFrame:
    """By a single task: the queries of the session keep their slots."""
    return engine.spark.read.format("statestore").options(**options).load(folder).coalesce(1)


def _aggregation(engine: Engine, query: Query, frame: DataFrame) -> Part:
    kept = _struct(frame, "key")
    names = kept.names
    if set(names) != set(query.key):
        names = _grouped_by(engine, query, len(kept)) or names
    renamed = _renamed("key", kept, [str(at) for at in range(len(kept))])
    key = [(name, renamed.getField(str(at)), kept[at].dataType) for at, name in enumerate(names)]
    value = _struct(frame, "value")
    return Part(frame, key, _renamed("value", value, _told_apart(value.names)))


def _sessions(frame: DataFrame) -> Part:
    """Sessions are kept by their beginning, and hold their own window and keys beside what they fold."""
    value = _struct(frame, "value")
    kept = [field.name for field in _struct(frame, "key")][:-1]
    window = next(field.name for field in value if getattr(field.dataType, "names", None) == ["start", "end"])
    own = [name for name in value.names if name == window or name in kept]
    renamed = _renamed("value", value, _told_apart(value.names))
    return Part(frame, [(name, renamed.getField(name), value[name].dataType) for name in own], renamed)


def _variables(
    engine: Engine, folder: str, options: Mapping[str, str], properties: str, clock: Clock
) -> Iterator[Part]:
    """The user's own state: a part for each variable."""
    names = [variable["stateName"] for variable in json.loads(properties)["stateVariables"]]
    # What begins so is Spark's own: how it keeps timers.
    own = [name for name in names if not name.startswith("$")]
    for name in own if own == names else [*own, _TIMERS]:
        which = {"stateVarName": name} if name in own else {"readRegisteredTimers": "true"}
        frame = _read(engine, folder, {**options, **which})
        columns = [column for column in frame.columns if column not in ("key", "partition_id")]
        key = [(field.name, F.col(f"key.`{field.name}`"), field.dataType) for field in _struct(frame, "key")]
        held, of = columns[-1], F.col(columns[0]) if len(columns) > 1 else None
        value = F.col(held)
        if held == _TIMER:
            value = F.timestamp_millis(held)
        elif _struct(frame, held).names == _EXPIRES:
            # Spark removes what has expired when it comes by; until then it is as good as gone.
            frame = frame.where(F.col(f"{held}.{_EXPIRES[1]}") > clock.now() // 1_000)
            value = F.col(f"{held}.{_EXPIRES[0]}")
        yield Part(frame, key, value, name, of, several=held != "value")


def _struct(frame: DataFrame, column: str) -> StructType:
    found = frame.schema[column].dataType
    assert isinstance(found, StructType)
    return found


def _renamed(column: str, struct: StructType, names: Sequence[str]) -> Column:
    """A struct under other names: Spark may give the same one to several of its fields."""
    fields = [StructField(name, field.dataType) for name, field in zip(names, struct, strict=True)]
    return F.col(column).cast(StructType(fields))


def _told_apart(names: Sequence[str]) -> list[str]:
    """`max`, `max` as `max`, `max_2`."""
    found: list[str] = []
    for name in names:
        before = sum(1 for other in names[: len(found)] if other == name)
        found.append(f"{name}_{before + 1}" if before else name)
    return found


def _grouped_by(engine: Engine, query: Query, columns: int) -> list[str] | None:
    """The names that the result gives to what it groups by, in that order; None when its plan does not tell.

    State knows an expression, such as `upper(name) AS name`, by no name.
    """
    plan = analyzed(engine.over_nothing(query))
    aggregates = [node for node in nodes(plan) if kind_of(node) == "Aggregate"]
    if len(aggregates) != 1:
        return None
    names = [str(held[0].name()) for held in grouped(aggregates[0]) if held]
    return names if len(names) == columns else None


@contextmanager
def told_by_spark(query: Query) -> Iterator[None]:
    """What Spark cannot read is told as a sentence."""
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        raise Unavailable(f"the state of {query.name}", words(error)) from None

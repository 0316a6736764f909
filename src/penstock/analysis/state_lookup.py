"""Read the state of a query from its checkpoint, as of its last committed batch.

Only committed files are read, so the query may run. The whole state is scanned by one task: a request uses one slot.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, DecimalType, StringType, StructField, StructType

from penstock.analysis.checkpoints.batches import Batch, batches, on_disk
from penstock.analysis.engine import Engine
from penstock.analysis.frames import spark_errors
from penstock.analysis.interactive import distinct, exactly
from penstock.analysis.plans import analyzed, grouped, kind_of, nodes
from penstock.analysis.query import Query
from penstock.core.clock import SystemClock
from penstock.core.errors import Refused

_AGGREGATIONS = ("stateStoreSave", "StatefulStreamlineAggregate")
"""Operator names in micro-batches, and in real time."""
_SESSIONS, _OWN = "sessionWindowStateStoreSaveExec", "transformWithState"
_UNASKED = {
    "dedupe": "known records, to find duplicates",
    "dedupeWithinWatermark": "known records, to find duplicates",
    "symmetricHashJoin": "unmatched records of both sides",
}
_EXPIRES = ["value", "ttlExpirationMs"]
_TIMER, _TIMERS = "expiration_timestamp_ms", "timers"

Columns = Sequence[tuple[str, Column, DataType]]
"""The key columns of entries: name, value, type."""


@dataclass(frozen=True)
class Part:
    """A readable stateful operator, or one of its variables: a frame with a row for each entry."""

    frame: DataFrame
    key: Columns
    value: Column
    variable: str | None = None
    of: Column | None = None
    """The key of an entry in a map."""
    several: bool = False
    """Whether a key has several entries."""


def opened(engine: Engine, query: Query) -> tuple[dict[str, Any], list[Part]]:
    """The query with its offsets and a note; and the readable parts of its state."""
    folder = engine.checkpoint(query.name)
    header: dict[str, Any] = {"query": query.name, "into": query.into, "position": None, "note": None}
    finished = batches(folder)
    if not finished and on_disk(folder) is not None:
        return {**header, "note": "it has no committed batch"}, []
    with spark_errors(f"the state of {query.name}"):
        operators = _operators(engine, folder)
        number = finished[-1].number if finished else max((one["maxBatchId"] for one in operators), default=None)
        header["position"] = _position(folder, finished[-1] if finished else None, number)
        parts: list[Part] = []
        notes: dict[str, None] = {}
        for operator in operators:
            options = {"batchId": str(number), "operatorId": str(operator["operatorId"])}
            name = operator["operatorName"]
            if name in _UNASKED:
                notes[f"it keeps {_UNASKED[name]}: which cannot be read by the keys of its rows"] = None
            elif name.startswith(_OWN):
                parts += _variables(engine, folder, options, operator["operatorProperties"])
            elif name == _SESSIONS:
                parts.append(_sessions(_read(engine, folder, options)))
            elif name in _AGGREGATIONS:
                parts.append(_aggregation(engine, query, _read(engine, folder, options)))
            else:
                notes[f"it keeps the state of {name}, which cannot be read"] = None
    if not operators:
        notes["it has no state"] = None
    return {**header, "note": None if parts else "; ".join(notes)}, parts


def _operators(engine: Engine, folder: str) -> list[Any]:
    """The stateful operators, each once: some have several stores."""
    path = on_disk(folder)
    if path is not None and not (path / "state").exists():
        return []
    rows = engine.spark.read.format("state-metadata").load(folder).collect()
    return list({row["operatorId"]: row for row in sorted(rows, key=lambda row: row["operatorId"])}.values())


def _position(folder: str, batch: Batch | None, number: int | None) -> dict[str, Any]:
    """The offsets of the state; only the batch number when the checkpoint is remote."""
    if batch is None:
        return {"batch": number, "at": None, "watermark": None, "reads": None}
    at = None
    if (path := on_disk(folder)) is not None:
        commit = path / "commits" / str(batch.number)
        at = commit.stat().st_mtime_ns // 1_000 if commit.exists() else None
    reads = {channel: {str(part): end for part, end in ends.items()} for channel, ends in batch.ends.items()}
    return {"batch": batch.number, "at": at, "watermark": batch.watermark * 1_000 or None, "reads": reads}


def _read(engine: Engine, folder: str, options: Mapping[str, str]) -> DataFrame:
    """Read by one task: the queries of the session keep their slots."""
    return engine.spark.read.format("statestore").options(**options).load(folder).coalesce(1)


def _aggregation(engine: Engine, query: Query, frame: DataFrame) -> Part:
    kept = _struct(frame, "key")
    names = kept.names
    if set(names) != set(query.key):
        names = _grouped_by(engine, query, len(kept)) or names
    renamed = _renamed("key", kept, [str(at) for at in range(len(kept))])
    key = [(name, renamed.getField(str(at)), kept[at].dataType) for at, name in enumerate(names)]
    value = _struct(frame, "value")
    return Part(frame, key, _renamed("value", value, distinct(value.names)))


def _sessions(frame: DataFrame) -> Part:
    """Sessions are keyed by their start. Their value holds the window, the keys and the aggregates."""
    value = _struct(frame, "value")
    kept = [field.name for field in _struct(frame, "key")][:-1]
    window = next(field.name for field in value if getattr(field.dataType, "names", None) == ["start", "end"])
    own = [name for name in value.names if name == window or name in kept]
    renamed = _renamed("value", value, distinct(value.names))
    return Part(frame, [(name, renamed.getField(name), value[name].dataType) for name in own], renamed)


def _variables(engine: Engine, folder: str, options: Mapping[str, str], properties: str) -> Iterator[Part]:
    """The user's state: a part for each variable."""
    names = [variable["stateName"] for variable in json.loads(properties)["stateVariables"]]
    # Names with $ are Spark's timers.
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
            # Spark removes expired entries later; they are ignored here.
            frame = frame.where(F.col(f"{held}.{_EXPIRES[1]}") > SystemClock().now() // 1_000)
            value = F.col(f"{held}.{_EXPIRES[0]}")
        yield Part(frame, key, value, name, of, several=held != "value")


def _struct(frame: DataFrame, column: str) -> StructType:
    found = frame.schema[column].dataType
    assert isinstance(found, StructType)
    return found


def _renamed(column: str, struct: StructType, names: Sequence[str]) -> Column:
    """A struct with other field names: Spark may use a name for several fields."""
    fields = [StructField(name, field.dataType) for name, field in zip(names, struct, strict=True)]
    return F.col(column).cast(StructType(fields))


def _grouped_by(engine: Engine, query: Query, columns: int) -> list[str] | None:
    """The names of the grouping columns in the result, in order; None when they are unknown.

    The state has no name for an expression such as `upper(name) AS name`.
    """
    plan = analyzed(engine.over_nothing(query))
    aggregates = [node for node in nodes(plan) if kind_of(node) == "Aggregate"]
    if len(aggregates) != 1:
        return None
    names = [str(held[0].name()) for held in grouped(aggregates[0]) if held]
    return names if len(names) == columns else None


MOST = 10_000
"""The maximal number of entries in a response."""
LONGEST = 8_192
"""The maximal length of a key."""
_EXAMPLES = 5

_ALL = {"ignoreNullFields": "false"}


def get(engine: Engine, query: Query, key: str, most: int = MOST) -> dict[str, Any]:
    """The state of a key, with its offsets; without an entry, some other keys.

    `key` is a JSON array of column values, as in the key of the result; for a single column, also the plain value. At
    most `most` entries of a list or a map are returned. Raises Refused for an invalid key, Unavailable when the state
    cannot be read.
    """
    if len(key) > LONGEST:
        raise Refused("the key", f"it has {len(key):,} characters, the limit is {LONGEST:,}")
    header, parts = opened(engine, query)
    found: dict[str, Any] = {"key": parse_key(key, len(query.key)), "state": None, "keys": []}
    if not parts and found["key"] is None:
        raise Refused(
            "the key",
            f"its rows are identified by {' and '.join(query.key)}: write a JSON array of {len(query.key)} values",
        )
    with spark_errors(f"the state of {query.name}"):
        for part in parts:
            columns = _ordered(part.key, query.key)
            values = parse_key(key, len(columns))
            others = len(columns) != len(query.key)
            if others and found["key"] is not None and (values is None or _array(key, len(query.key)) is not None):
                found["note"] = f"its state has the key {_names(columns)}, not the key of its rows"
                continue
            found["key"], wanted = _parsed(engine, columns, values)
            entries = _first_rows(part, columns, wanted, most + 1 if part.several else 1)
            if len(entries) > most:
                found["note"] = f"{part.variable} has more than {most:,} entries"
            if entries:
                found["state"] = {**(found["state"] or {}), **_gathered(part, entries[:most])}
        if parts and found["state"] is None:
            # All entries of a list or a map may have one key.
            first = min(parts, key=lambda part: part.several)
            some = _first_rows(first, _ordered(first.key, query.key), F.lit(True), _EXAMPLES)
            found["keys"] = list({json.dumps(entry["key"]): entry["key"] for entry in some}.values())
    return {**header, **found}


def scan(engine: Engine, query: Query, prefix: str, limit: int) -> dict[str, Any]:
    """The entries of a query's state whose first key column starts with a prefix, up to a limit."""
    if not 1 <= limit <= MOST:
        raise Refused("the limit", f"it is {limit}, and must be from 1 to {MOST:,}")
    header, parts = opened(engine, query)
    entries: list[dict[str, Any]] = []
    with spark_errors(f"the state of {query.name}"):
        for part in parts:
            columns = _ordered(part.key, query.key)
            which = _text(columns[0]).startswith(F.lit(prefix)) if prefix and columns else F.lit(True)
            entries += _first_rows(part, columns, which, limit + 1 - len(entries))
    return {**header, "entries": entries[:limit], "more": len(entries) > limit}


def parse_key(key: str, columns: int) -> list[Any] | None:
    """Parse a key: a JSON array of as many values; for a single column, any other text is its value. Otherwise None."""
    values = _array(key, columns)
    return [key] if values is None and columns == 1 else values


def _array(key: str, columns: int) -> list[Any] | None:
    try:
        values = orjson.loads(key)
    except orjson.JSONDecodeError:
        return None
    return values if isinstance(values, list) and len(values) == columns else None


# --- keys -------------------------------------------------------------------------------------------------------------


def _ordered(kept: Columns, wanted: Sequence[str]) -> Columns:
    """The columns of a state in the order of the result's key.

    Columns with other names fill the gaps in order. With another number of columns, the order does not change.
    """
    if len(kept) != len(wanted):
        return kept
    left = list(kept)
    found: dict[str, tuple[str, Column, DataType]] = {}
    for name in wanted:
        for at, column in enumerate(left):
            if column[0] == name:
                found[name] = left.pop(at)
                break
    return [found[name] if name in found else left.pop(0) for name in wanted]


def _names(columns: Columns) -> str:
    return " and ".join(name for name, _, _ in columns) or "nothing"


def _parsed(engine: Engine, columns: Columns, values: Sequence[Any] | None) -> tuple[list[Any], Column]:
    """The values as Spark parses them by the types of the columns, and whether an entry has this key."""
    if values is None:
        raise Refused(
            "the key", f"the state has the key {_names(columns)}: write a JSON array of {len(columns)} values"
        )
    parsed = {str(at): _spelt(value, columns[at][2]) for at, value in enumerate(values)}
    schema = StructType([StructField(str(at), kind) for at, (_, _, kind) in enumerate(columns)])
    row = engine.spark.sql("SELECT * FROM VALUES (:asked) AS v(asked)", {"asked": json.dumps(parsed)})
    text = row.select(F.to_json(F.from_json("asked", schema), _ALL)).collect()[0][0]
    read: dict[str, Any] = exactly(text)
    for at, (name, _, kind) in enumerate(columns):
        if read[str(at)] is None and parsed[str(at)] is not None:
            problem = f"{json.dumps(parsed[str(at)], ensure_ascii=False)[:80]} is not a {kind.simpleString()}"
            raise Refused("the key", f"its {name} cannot be read: {problem}")
    # Compared as JSON: keys of results have milliseconds, the state has microseconds.
    return list(read.values()), F.to_json(_key(columns), _ALL) == text if columns else F.lit(True)


def _spelt(value: Any, kind: DataType) -> Any:
    """Parse a plain value as JSON, unless its type is text."""
    # Spark parses decimals from text without rounding.
    if isinstance(value, str) and not isinstance(kind, StringType | DecimalType):
        with suppress(orjson.JSONDecodeError):
            return orjson.loads(value)
    return value


def _key(columns: Columns) -> Column:
    return F.struct(*(column.alias(str(at)) for at, (_, column, _) in enumerate(columns)))


def _text(column: tuple[str, Column, DataType]) -> Column:
    _, value, kind = column
    return F.to_json(value, _ALL) if isinstance(kind, StructType) else value.cast("string")


# --- entries ----------------------------------------------------------------------------------------------------------


def _first_rows(part: Part, columns: Columns, which: Column, most: int) -> list[dict[str, Any]]:
    if most < 1:
        return []
    header = [part.value.alias("value")]
    if columns:
        header.append(_key(columns).alias("key"))
    if part.of is not None:
        header.append(part.of.alias("of"))
    rows = part.frame.where(which).limit(most).select(F.to_json(F.struct(*header), _ALL)).collect()
    found = []
    for (text,) in rows:
        entry = exactly(text)
        key = list(entry.get("key", {}).values())
        named = {"variable": part.variable} if part.variable else {}
        found.append({"key": key, **named, **{name: entry[name] for name in ("of", "value") if name in entry}})
    return found


def _gathered(part: Part, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The entries of a part for one key; of the user's state, by variable."""
    if part.variable is None:
        return dict(entries[0]["value"])
    if part.of is not None:
        return {part.variable: [{"key": entry["of"], "value": entry["value"]} for entry in entries]}
    return {part.variable: [entry["value"] for entry in entries] if part.several else entries[0]["value"]}

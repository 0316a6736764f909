"""What a query remembers: its state as of the last batch that it has finished, read from its checkpoint by Spark.

Committed files alone are read, so it can be asked while the query runs. All of the state is gone through, by a single
task at a time: a question takes one slot, however large the state is.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import orjson
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, DecimalType, StringType, StructField, StructType

from penstock.analysis.engine import Engine
from penstock.analysis.exact import exactly
from penstock.analysis.query import Query
from penstock.analysis.state.kept import Columns, Part, opened, told_by_spark
from penstock.core.clock import Clock, SystemClock
from penstock.core.errors import Refused

MOST = 10_000
"""So many entries are told of in one answer."""
LONGEST = 8_192
"""So many characters a key may have."""
_EXAMPLES = 5

_ALL = {"ignoreNullFields": "false"}


def get(engine: Engine, query: Query, key: str, clock: Clock | None = None, most: int = MOST) -> dict[str, Any]:
    """What a query remembers of a key, and the position that this reflects; where there is nothing, some other keys.

    `key` is the JSON array of the values of its columns, as in the key of the result; of a single column, also the bare
    value. Of a list or a map, `most` entries are told. Raises Refused when it cannot be one, Unavailable when the state
    cannot be read.
    """
    if len(key) > LONGEST:
        raise Refused("the key", f"it has {len(key):,} characters, and {LONGEST:,} are the most")
    told, parts = opened(engine, query, clock or SystemClock())
    found: dict[str, Any] = {"key": given(key, len(query.key)), "state": None, "keys": []}
    if not parts and found["key"] is None:
        raise Refused("the key", f"its rows are told apart by {' and '.join(query.key)}: {_written_as(len(query.key))}")
    with told_by_spark(query):
        for part in parts:
            columns = _ordered(part.key, query.key)
            values = given(key, len(columns))
            others = len(columns) != len(query.key)
            if others and found["key"] is not None and (values is None or _array(key, len(query.key)) is not None):
                found["note"] = f"its state is kept by {_names(columns)}, not by the key of its rows"
                continue
            found["key"], wanted = _asked(engine, columns, values)
            entries = _taken(part, columns, _equal(columns, wanted), most + 1 if part.several else 1)
            if len(entries) > most:
                found["note"] = f"{part.variable} has more entries than the {most:,} that are told of"
            if entries:
                found["state"] = {**(found["state"] or {}), **_gathered(part, entries[:most])}
        if parts and found["state"] is None:
            # Of lists and maps, all entries may be of one key.
            first = min(parts, key=lambda part: part.several)
            some = _taken(first, _ordered(first.key, query.key), F.lit(True), _EXAMPLES)
            found["keys"] = list({json.dumps(entry["key"]): entry["key"] for entry in some}.values())
    return {**told, **found}


def scan(engine: Engine, query: Query, prefix: str, limit: int, clock: Clock | None = None) -> dict[str, Any]:
    """What a query remembers, entry by entry, of keys whose first column begins with a text; no more than the limit."""
    if not 1 <= limit <= MOST:
        raise Refused("the limit", f"it is {limit}, and has to lie between 1 and {MOST:,}")
    told, parts = opened(engine, query, clock or SystemClock())
    entries: list[dict[str, Any]] = []
    with told_by_spark(query):
        for part in parts:
            columns = _ordered(part.key, query.key)
            which = F.lit(True)
            if prefix and columns:
                which = _text(columns[0]).startswith(F.lit(prefix))
            entries += _taken(part, columns, which, limit + 1 - len(entries))
    return {**told, "entries": entries[:limit], "more": len(entries) > limit}


def given(key: str, columns: int) -> list[Any] | None:
    """A key as a person writes it: a JSON array of as many values; of a single column, anything else is its value.

    None when it is neither.
    """
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
    """The columns of a state in the order of the result's key, as far as they are the same ones.

    What has another name there is taken in its turn; a state that is kept by more columns, or fewer, has its own order.
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


def _written_as(columns: int) -> str:
    return f"write a JSON array of {columns} values"


def _asked(engine: Engine, columns: Columns, values: Sequence[Any] | None) -> tuple[list[Any], Column]:
    """The values as Spark reads them by the types of the columns; and a struct of them, under their numbers."""
    if values is None:
        raise Refused("the key", f"the state is kept by {_names(columns)}: {_written_as(len(columns))}")
    asked = {str(at): _spelt(value, columns[at][2]) for at, value in enumerate(values)}
    schema = StructType([StructField(str(at), kind) for at, (_, _, kind) in enumerate(columns)])
    row = engine.spark.sql("SELECT * FROM VALUES (:asked) AS v(asked)", {"asked": json.dumps(asked)})
    read: dict[str, Any] = exactly(row.select(F.to_json(F.from_json("asked", schema), _ALL)).collect()[0][0])
    for at, (name, _, kind) in enumerate(columns):
        if read[str(at)] is None and asked[str(at)] is not None:
            problem = f"{json.dumps(asked[str(at)], ensure_ascii=False)[:80]} is no {kind.simpleString()}"
            raise Refused("the key", f"its {name} cannot be read: {problem}")
    return list(read.values()), F.from_json(F.lit(json.dumps(asked)), schema)


def _spelt(value: Any, kind: DataType) -> Any:
    """A bare value is text; what is no text by its type may be the JSON of it."""
    # Decimals Spark reads from a text as well, to the last digit.
    if isinstance(value, str) and not isinstance(kind, StringType | DecimalType):
        with suppress(orjson.JSONDecodeError):
            return orjson.loads(value)
    return value


def _equal(columns: Columns, wanted: Column) -> Column:
    which = F.lit(True)
    for at, (_, column, kind) in enumerate(columns):
        value = wanted.getField(str(at))
        same = column.eqNullSafe(value)
        if "timestamp" in kind.simpleString():
            # The key of a result tells milliseconds; state knows microseconds.
            same = _written(column) == _written(value)
        which = which & same
    return which


def _written(value: Column) -> Column:
    return F.to_json(F.struct(value.alias("v")), _ALL)


def _text(column: tuple[str, Column, DataType]) -> Column:
    _, value, kind = column
    return F.to_json(value, _ALL) if isinstance(kind, StructType) else value.cast("string")


# --- entries ----------------------------------------------------------------------------------------------------------


def _taken(part: Part, columns: Columns, which: Column, most: int) -> list[dict[str, Any]]:
    if most < 1:
        return []
    told = [part.value.alias("value")]
    if columns:
        told.append(F.struct(*(column.alias(str(at)) for at, (_, column, _) in enumerate(columns))).alias("key"))
    if part.of is not None:
        told.append(part.of.alias("of"))
    rows = part.frame.where(which).limit(most).select(F.to_json(F.struct(*told), _ALL)).collect()
    found = []
    for (text,) in rows:
        entry = exactly(text)
        key = list(entry.get("key", {}).values())
        named = {"variable": part.variable} if part.variable else {}
        found.append({"key": key, **named, **{name: entry[name] for name in ("of", "value") if name in entry}})
    return found


def _gathered(part: Part, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a part holds under one key: of the user's own state, a variable."""
    if part.variable is None:
        return dict(entries[0]["value"])
    if part.of is not None:
        return {part.variable: [{"key": entry["of"], "value": entry["value"]} for entry in entries]}
    return {part.variable: [entry["value"] for entry in entries] if part.several else entries[0]["value"]}

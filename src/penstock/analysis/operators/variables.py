"""State variables of a key: a value, a list, a map. Declared by DDL, used as plain Python.

A single column is a plain value; several columns are a row with attributes. Timestamps are aware, in UTC.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, Self, TypeVar, overload

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle
from pyspark.sql.types import ArrayType, DataType, DoubleType, FloatType, MapType, StructType, _make_type_verifier

from penstock.core.clock import duration
from penstock.core.errors import Misconfigured

Schema = StructType | str
"""The columns as parsed by Spark; or their DDL, without Spark."""


Read = Callable[[str], Schema]
"""Parses a DDL; raises ValueError when it is invalid."""


Stored = TypeVar("Stored")


class Variable(ABC, Generic[Stored]):
    """A declaration of state in a class; in an instance, the state of the current key."""

    def __init__(self, *ddls: str, ttl: str | None) -> None:
        self.name = ""
        self.ddls = ddls
        self.ttl = ttl

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Stored: ...
    def __get__(self, instance: object | None, owner: type) -> Self | Stored:
        if instance is None:
            return self
        try:
            stored: Stored = instance.__dict__[f"_{self.name}"]
        except KeyError:
            raise AttributeError(f"{self.name} is available only in process() and on_timer()") from None
        return stored

    def __set__(self, instance: object, value: object) -> None:
        raise AttributeError(f"{self.name} cannot be assigned; change its value, as with {self.name}.set(…)")

    def read(self, location: str, read: Read) -> tuple["Columns", ...]:
        """Parse its columns; Misconfigured when its DDL or its ttl is invalid."""
        try:
            self.milliseconds()
            return tuple(Columns(f"{location}.{self.name}", read(ddl)) for ddl in self.ddls)
        except ValueError as error:
            raise Misconfigured(f"{location}.{self.name}", str(error)) from error

    def milliseconds(self) -> int | None:
        return None if self.ttl is None else max(1, duration(self.ttl) // timedelta(milliseconds=1))

    @abstractmethod
    def open(self, handle: StatefulProcessorHandle, read: "tuple[Columns, ...]") -> Stored:
        """The state of the current key, for an instance."""


class ValueState(Variable["KeptValue"]):
    """One row or one value per key."""

    def __init__(self, schema: str, *, ttl: str | None = None) -> None:
        """`schema` as DDL; `ttl`: it expires so long after it was last set, by the clock."""
        super().__init__(schema, ttl=ttl)

    def open(self, handle: StatefulProcessorHandle, read: "tuple[Columns, ...]") -> "KeptValue":
        (columns,) = read
        return KeptValue(handle.getValueState(self.name, columns.schema, self.milliseconds()), columns)


class ListState(Variable["KeptList"]):
    """A list of rows or values per key, in insertion order."""

    def __init__(self, schema: str, *, ttl: str | None = None) -> None:
        """`schema` as DDL; `ttl`: an item expires so long after it was added, by the clock."""
        super().__init__(schema, ttl=ttl)

    def open(self, handle: StatefulProcessorHandle, read: "tuple[Columns, ...]") -> "KeptList":
        (columns,) = read
        return KeptList(handle.getListState(self.name, columns.schema, self.milliseconds()), columns)


class MapState(Variable["KeptMap"]):
    """A map of rows or values per key."""

    def __init__(self, key: str, schema: str, *, ttl: str | None = None) -> None:
        """`key` and `schema` as DDL; `ttl`: an entry expires so long after it was last set, by the clock."""
        super().__init__(key, schema, ttl=ttl)

    def open(self, handle: StatefulProcessorHandle, read: "tuple[Columns, ...]") -> "KeptMap":
        keys, columns = read
        return KeptMap(handle.getMapState(self.name, keys.schema, columns.schema, self.milliseconds()), columns, keys)


class Kept:
    """The state of the current key. It is true when it is not empty."""

    def __init__(self, state: Any, columns: "Columns") -> None:
        self._state, self._columns = state, columns

    def __bool__(self) -> bool:
        return bool(self._state.exists())

    def clear(self) -> None:
        self._state.clear()


class KeptValue(Kept):
    """The value of a `ValueState` for the current key. It is true when there is a value."""

    def get(self, default: Any = None) -> Any:
        """The value or row; `default` when there is none."""
        kept = self._state.get()
        return default if kept is None else self._columns.from_spark(kept)

    def set(self, value: Any = None, /, **columns: Any) -> None:
        """Store a value; for several columns a tuple, a mapping, or keyword arguments."""
        self._state.update(self._columns.named(columns) if columns else self._columns.to_spark(value))


class KeptList(Kept):
    """The items of a `ListState` for the current key. It is true when there are items."""

    def __iter__(self) -> Iterator[Any]:
        # A copy: changes during the iteration have no effect on it.
        return iter([self._columns.from_spark(kept) for kept in self._state.get()])

    def __len__(self) -> int:
        return sum(1 for _ in self._state.get())

    def append(self, value: Any = None, /, **columns: Any) -> None:
        """Add a value; for several columns a tuple, a mapping, or keyword arguments."""
        self._state.appendValue(self._columns.named(columns) if columns else self._columns.to_spark(value))

    def extend(self, values: Iterable[Any]) -> None:
        if to_spark := [self._columns.to_spark(value) for value in values]:
            self._state.appendList(to_spark)

    def set(self, values: Iterable[Any]) -> None:
        """Replace all items."""
        if to_spark := [self._columns.to_spark(value) for value in values]:
            self._state.put(to_spark)
        else:
            self._state.clear()


class KeptMap(Kept):
    """The entries of a `MapState` for the current key, used as a dict. It is true when there are entries."""

    def __init__(self, state: Any, columns: "Columns", keys: "Columns") -> None:
        super().__init__(state, columns)
        self._keys = keys

    def __contains__(self, key: Any) -> bool:
        return bool(self._state.containsKey(self._keys.to_spark(key)))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def __getitem__(self, key: Any) -> Any:
        kept = self._state.getValue(self._keys.to_spark(key))
        if kept is None:
            raise KeyError(key)
        return self._columns.from_spark(kept)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._state.updateValue(self._keys.to_spark(key), self._columns.to_spark(value))

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        self._state.removeKey(self._keys.to_spark(key))

    def get(self, key: Any, default: Any = None) -> Any:
        kept = self._state.getValue(self._keys.to_spark(key))
        return default if kept is None else self._columns.from_spark(kept)

    def keys(self) -> list[Any]:
        return list(map(self._keys.from_spark, self._state.keys()))

    def values(self) -> list[Any]:
        return list(map(self._columns.from_spark, self._state.values()))

    def items(self) -> list[tuple[Any, Any]]:
        return [(self._keys.from_spark(key), self._columns.from_spark(kept)) for key, kept in self._state.iterator()]


class Columns:
    """Columns of state or results: converts between Python's values and Spark's."""

    def __init__(self, location: str, schema: Schema) -> None:
        self.location = location
        self.schema = schema
        self._verify: Callable[[Any], None] = lambda _: None
        self._fractions: list[bool] = []
        if isinstance(schema, StructType):
            self.names = tuple(schema.names)
            # Spark silently turns values of another type into null, even an int for a double.
            self._verify = _make_type_verifier(schema)
            self._fractions = [isinstance(field.dataType, DoubleType | FloatType) for field in schema.fields]
        else:
            self.names = names(schema)
        self._row = Row(*self.names)

    def to_spark(self, value: Any) -> tuple[Any, ...]:
        """Convert a value or a row for Spark; ValueError with the place when it does not fit."""
        alone = len(self.names) == 1
        # A mapping may be the value itself, for a single map or struct.
        if isinstance(value, Mapping) and (not alone or tuple(value) == self.names):
            return self.named(value)
        return self._fitting((value,) if alone and not isinstance(value, tuple) else self._by_position(value))

    def named(self, value: Mapping[str, Any]) -> tuple[Any, ...]:
        """Convert a row by column names for Spark; ValueError with the place when it does not fit."""
        if strange := [name for name in value if name not in self.names]:
            raise ValueError(f'{self.location} has no column "{strange[0]}"; it has {", ".join(self.names)}')
        return self._fitting(tuple(value.get(name) for name in self.names))

    def from_spark(self, kept: Any) -> Any:
        """Convert a stored value from Spark."""
        values = [plain(value) for value in kept]
        return values[0] if len(values) == 1 else self._row(*values)

    def _fitting(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._fractions:
            row = tuple(
                float(one) if fraction and type(one) is int else one
                for one, fraction in zip(row, self._fractions, strict=True)
            )
        try:
            self._verify(row)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.location}: {_message(error)}") from None
        return row

    def _by_position(self, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, tuple | list) or len(value) != len(self.names):
            raise ValueError(
                f"{self.location} takes {len(self.names)} columns ({', '.join(self.names)}), not {value!r}"
            )
        return tuple(value)


def plain(value: Any) -> Any:
    """Convert a value from Spark's state: timestamps become aware, structs become dicts."""
    if isinstance(value, datetime):
        return value.astimezone(UTC)
    if isinstance(value, Row):
        return {name: plain(inner) for name, inner in value.asDict().items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    if isinstance(value, dict):
        return {plain(key): plain(inner) for key, inner in value.items()}
    return value


class Maps:
    """Converts maps in records to dicts: Spark passes them as lists of pairs."""

    def __init__(self, schema: StructType) -> None:
        self._kinds = {field.name: field.dataType for field in schema if _holds_map(field.dataType)}

    def read(self, record: Any) -> Any:
        if not self._kinds:
            return record
        fields = zip(record.__fields__, record, strict=True)
        return Row(*record.__fields__)(*(_with_dicts(value, self._kinds.get(name)) for name, value in fields))


def _holds_map(kind: DataType) -> bool:
    match kind:
        case ArrayType():
            return _holds_map(kind.elementType)
        case StructType():
            return any(_holds_map(field.dataType) for field in kind)
    return isinstance(kind, MapType)


def _with_dicts(value: Any, kind: DataType | None) -> Any:
    if value is None:
        return None
    match kind:
        case MapType():
            pairs = value.items() if isinstance(value, Mapping) else value
            return {_with_dicts(key, kind.keyType): _with_dicts(one, kind.valueType) for key, one in pairs}
        case ArrayType():
            return [_with_dicts(one, kind.elementType) for one in value]
        case StructType():
            return {field.name: _with_dicts(value[field.name], field.dataType) for field in kind}
    return value


def names(ddl: str) -> tuple[str, ...]:
    """The column names of a DDL, without Spark; a single type has the column `value`."""
    parts: list[str] = [""]
    depth = 0
    for mark in re.findall(r"`(?:[^`]|``)*`|'[^']*'|.", ddl, re.DOTALL):
        depth += (mark in "<(") - (mark in ">)")
        if mark == "," and not depth:
            parts.append("")
        else:
            parts[-1] += mark
    found = [re.match(r"\s*(?:`((?:[^`]|``)+)`|(\w+))(?:\s*:|\s+\w)", part) for part in parts]
    if len(parts) == 1 and not found[0] and re.fullmatch(r"\s*\w+\s*([<(].*)?", ddl, re.DOTALL):
        return ("value",)
    if not all(found):
        raise ValueError(f'"{ddl}" has no columns; write names and types, such as "city STRING, at TIMESTAMP"')
    return tuple((one[1] or one[2]).replace("``", "`") for one in found if one)


def _message(error: Exception) -> str:
    return re.sub(r"^\[\w+\]\s*", "", str(error)).strip().rstrip(".")

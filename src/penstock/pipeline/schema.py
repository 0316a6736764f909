"""A channel's schema: DDL as it is, or DDL from the annotations of a Python class."""

import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any, ClassVar

from pydantic import BaseModel

from penstock.core.errors import Misconfigured

_SIMPLE: dict[Any, str] = {
    int: "BIGINT",
    float: "DOUBLE",
    str: "STRING",
    bool: "BOOLEAN",
    bytes: "BINARY",
    datetime: "TIMESTAMP",
    date: "DATE",
    Decimal: "DECIMAL(38,18)",
}


def ddl(schema: str | type) -> str:
    """The columns of a payload. A field of a class that may be None or has a default may be absent; others may not."""
    if isinstance(schema, str):
        return schema
    if not isinstance(schema, type):
        fix = 'write DDL, such as "city STRING, guests BIGINT", or give a class with annotated fields'
        raise Misconfigured("schema", f"it is {type(schema).__name__}", fix)
    columns = [f"`{name}` {kind}" + ("" if optional else " NOT NULL") for name, kind, optional in _fields(schema)]
    if not columns:
        raise Misconfigured(
            f"schema {schema.__name__}", "it has no annotated field", "write fields such as `guests: int`"
        )
    return ", ".join(columns)


def _fields(cls: type) -> list[tuple[str, str, bool]]:
    found = []
    defaults = _defaults(cls)
    for name, annotation in typing.get_type_hints(cls).items():
        if typing.get_origin(annotation) is not ClassVar:
            kind, optional = _without_none(annotation)
            found.append((name, _type(kind, f"{cls.__name__}.{name}"), optional or name in defaults))
    return found


def _defaults(cls: type) -> Collection[str]:
    """The fields that may be left out, by what each kind of class knows of them itself."""
    if is_dataclass(cls):
        return {one.name for one in fields(cls) if (one.default, one.default_factory) != (MISSING, MISSING)}
    if issubclass(cls, BaseModel):
        return {name for name, one in cls.model_fields.items() if not one.is_required()}
    for known in ("_field_defaults", "__optional_keys__"):  # Of a NamedTuple, and of a TypedDict.
        if isinstance(told := getattr(cls, known, None), Collection):
            return told
    return {name for name in typing.get_type_hints(cls) if hasattr(cls, name)}


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        if len(kinds) == 1:
            return kinds[0], True
    return annotation, False


def _type(kind: Any, place: str) -> str:
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is list and len(arguments) == 1:
        return f"ARRAY<{_type(_without_none(arguments[0])[0], place)}>"
    if origin in (dict, Mapping) and len(arguments) == 2 and arguments[0] is str:
        return f"MAP<STRING, {_type(_without_none(arguments[1])[0], place)}>"
    if isinstance(kind, type) and typing.get_type_hints(kind):
        return "STRUCT<" + ", ".join(f"`{name}`: {inner}" for name, inner, _ in _fields(kind)) + ">"
    known = ", ".join(simple.__name__ for simple in _SIMPLE)
    raise Misconfigured(
        f"schema {place}", f"{kind!r} is not a type of a field", f"use {known}, list[…], dict[str, …] or a class"
    )

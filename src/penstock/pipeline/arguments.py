"""Checks the arguments of Pipeline methods. Each check raises Misconfigured."""

import re
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel

from penstock.analysis.query import NUMBER, PAYLOAD, Emit, Late
from penstock.core.clock import duration
from penstock.core.errors import Misconfigured

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,199}")
Choice = TypeVar("Choice", bound=str)


def check_name(kind: str, name: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        fix = "begin with a letter and use letters, digits, _ and -"
        raise Misconfigured(f"{kind} {name!r}", "this is not a name", fix)
    return name


def check_columns(location: str, option: str, value: str | Sequence[str]) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
    if not all(isinstance(name, str) for name in names):
        raise Misconfigured(location, f"{option}= is {value!r}", f'name columns: {option}="…" or {option}=["…", "…"]')
    return names


def check_text(location: str, option: str, value: Any) -> None:
    if value is not None and not isinstance(value, str):
        raise Misconfigured(location, f"{option}= is {value!r}", f'write a string: {option}="…"')


def check_choice(location: str, option: str, choices: Iterable[Choice], value: str) -> Choice:
    choices = list(choices)
    for choice in choices:
        if choice == value:
            return choice
    raise Misconfigured(location, f'{option} is "{value}"', f"the choices are {', '.join(choices)}")


def check_partitions(location: str, partitions: int) -> int:
    if not isinstance(partitions, int) or isinstance(partitions, bool) or partitions < 1:
        raise Misconfigured(location, f"partitions= is {partitions!r}", "set 1 or more")
    return partitions


def check_duration(location: str, text: str) -> timedelta:
    try:
        return duration(text)
    except ValueError as error:
        raise Misconfigured(location, str(error)) from error
    except (AttributeError, TypeError):
        raise Misconfigured(location, f"{text!r} is not a duration", 'write a string, such as "10 seconds"') from None


def optional_duration(location: str, text: str | None) -> timedelta | None:
    return None if text is None else check_duration(location, text)


def check_unique_by(location: str, unique: str | None, columns: str | None) -> str | None:
    """Check `unique=`: a column, or one of two constants."""
    if unique in (None, NUMBER, PAYLOAD) or unique in (columns or "").replace("`", " ").split():
        return unique
    fix = f'name a column, or "{NUMBER}", or "{PAYLOAD}"'
    raise Misconfigured(location, f'unique is "{unique}"', fix)


def check_event_time(location: str, watermark: timedelta | None, emit: Emit, late: Late, lateness: str | None) -> None:
    """Check that the options about event time fit together."""
    if watermark is None:
        for option, needed in (("emit", emit is Emit.FINAL), ("late", late is not Late.DROP), ("lateness", lateness)):
            if needed:
                fix = 'set how late a record may be: watermark="…"'
                raise Misconfigured(location, f"{option}= needs watermark=", fix)
    if (late is Late.UPDATE) != (lateness is not None):
        raise Misconfigured(location, 'late="update" and lateness= need each other', "set both, or neither")
    if late is Late.UPDATE and emit is Emit.FINAL:
        fix = 'remove emit="final", or set a longer watermark='
        raise Misconfigured(location, "late records cannot update rows that are final", fix)


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
    """The schema as DDL. A field of a class is nullable if its type allows None or it has a default."""
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
    """The fields with a default."""
    if is_dataclass(cls):
        return {field.name for field in fields(cls) if (field.default, field.default_factory) != (MISSING, MISSING)}
    if issubclass(cls, BaseModel):
        return {name for name, field in cls.model_fields.items() if not field.is_required()}
    for attribute in ("_field_defaults", "__optional_keys__"):  # Of a NamedTuple, and of a TypedDict.
        if isinstance(names := getattr(cls, attribute, None), Collection):
            return names
    return {name for name in typing.get_type_hints(cls) if hasattr(cls, name)}


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        if len(kinds) == 1:
            return kinds[0], True
    return annotation, False


def _type(kind: Any, location: str) -> str:
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is list and len(arguments) == 1:
        return f"ARRAY<{_type(_without_none(arguments[0])[0], location)}>"
    if origin in (dict, Mapping) and len(arguments) == 2 and arguments[0] is str:
        return f"MAP<STRING, {_type(_without_none(arguments[1])[0], location)}>"
    if isinstance(kind, type) and typing.get_type_hints(kind):
        return "STRUCT<" + ", ".join(f"`{name}`: {inner}" for name, inner, _ in _fields(kind)) + ">"
    types = ", ".join(simple.__name__ for simple in _SIMPLE)
    raise Misconfigured(
        f"schema {location}", f"{kind!r} is not a supported type", f"use {types}, list[…], dict[str, …] or a class"
    )

"""Checks of the arguments with which a pipeline is declared. Each raises Misconfigured: place, problem, fix."""

import re
from collections.abc import Iterable, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Any, TypeVar, get_args

from penstock.analysis.query import NUMBER, PAYLOAD, Emit, Json, Late
from penstock.core.clock import duration
from penstock.core.errors import Misconfigured

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,199}")
Choice = TypeVar("Choice", bound=StrEnum)


def check_name(kind: str, name: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        fix = "begin with a letter and use letters, digits, _ and -"
        raise Misconfigured(f"{kind} {name!r}", "this is not a name", fix)
    return name


def check_columns(place: str, option: str, value: str | Sequence[str]) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
    if not all(isinstance(name, str) for name in names):
        raise Misconfigured(place, f"{option}= is {value!r}", f'name columns: {option}="…" or {option}=["…", "…"]')
    return names


def check_text(place: str, option: str, value: Any) -> None:
    if value is not None and not isinstance(value, str):
        raise Misconfigured(place, f"{option}= is {value!r}", f'write it as a text: {option}="…"')


def check_json(place: str, value: Json) -> Json:
    if value not in (choices := get_args(Json)):
        raise Misconfigured(place, f'json is "{value}"', f"the choices are {', '.join(choices)}")
    return value


def check_choice(place: str, option: str, choices: type[Choice], value: str) -> Choice:
    try:
        return choices(value)
    except ValueError:
        raise Misconfigured(place, f'{option} is "{value}"', f"the choices are {', '.join(choices)}") from None


def check_partitions(place: str, partitions: int) -> int:
    if not isinstance(partitions, int) or isinstance(partitions, bool) or partitions < 1:
        raise Misconfigured(place, f"{partitions} partitions are asked for", "ask for one or more")
    return partitions


def check_duration(place: str, text: str) -> timedelta:
    try:
        return duration(text)
    except ValueError as error:
        raise Misconfigured(place, str(error)) from error
    except (AttributeError, TypeError):
        raise Misconfigured(place, f"{text!r} is not a duration", 'write it as a text, such as "10 seconds"') from None


def optional_duration(place: str, text: str | None) -> timedelta | None:
    return None if text is None else check_duration(place, text)


def check_unique_by(place: str, unique: str | None, columns: str | None) -> str | None:
    """Check by what duplicate records are recognized: a column, or one of two words."""
    if unique in (None, NUMBER, PAYLOAD) or unique in (columns or "").replace("`", " ").split():
        return unique
    fix = f'name a column, or "{NUMBER}", or "{PAYLOAD}"'
    raise Misconfigured(place, f'records cannot be told apart by "{unique}"', fix)


def check_event_time(place: str, watermark: timedelta | None, emit: Emit, late: Late, lateness: str | None) -> None:
    """Refuse options about time that contradict each other."""
    if watermark is None:
        for option, needed in (("emit", emit is Emit.FINAL), ("late", late is not Late.DROP), ("lateness", lateness)):
            if needed:
                fix = 'say how late a record may be: watermark="…"'
                raise Misconfigured(place, f"{option}= needs watermark=", fix)
    if (late is Late.UPDATE) != (lateness is not None):
        raise Misconfigured(place, 'late="update" and lateness= need each other', "give both, or neither")
    if late is Late.UPDATE and emit is Emit.FINAL:
        fix = 'leave emit="final" out, or give the records more time by watermark='
        raise Misconfigured(place, "rows that are final cannot be updated by late records", fix)

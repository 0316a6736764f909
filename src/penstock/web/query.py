"""Paths and query strings of requests. Parsing is strict: an unknown parameter is an error."""

import re
from collections.abc import Collection
from datetime import timedelta

from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import Request

from penstock.core.clock import duration
from penstock.core.text import did_you_mean
from penstock.web.responses import Problem

LARGEST = 2**63 - 1


class _Rest(Convertor[str]):
    # Starlette's own `path` ends at a line feed.
    regex = r"[\s\S]*"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


def register_rest_convertor() -> None:
    """Let routes use `{name:rest}`: the rest of a path, with any characters."""
    register_url_convertor("rest", _Rest())


class Query:
    """The query parameters of a request: only `allowed` ones, each at most once."""

    def __init__(self, request: Request, allowed: Collection[str] = ()) -> None:
        self._values: dict[str, str] = {}
        for name, value in request.query_params.multi_items():
            if name not in allowed:
                names = f"the parameters are {', '.join(sorted(allowed))}" if allowed else "this address has none"
                raise Problem(400, f"?{name[:100]}", "unknown parameter", did_you_mean(name, allowed, names))
            if name in self._values:
                raise Problem(400, f"?{name}", "it occurs twice", "give it once")
            self._values[name] = value

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def text(self, name: str) -> str | None:
        return self._values.get(name)

    def flag(self, name: str) -> bool:
        if self._values.get(name):
            raise Problem(400, f"?{name}", "it takes no value", f"write ?{name} alone")
        return name in self._values

    def number(self, name: str, default: int, most: int = LARGEST, least: int = 0) -> int:
        if name not in self._values:
            return default
        return integer(f"?{name}", self._values[name], most, least)

    def choice(self, name: str, choices: Collection[str], default: str) -> str:
        value = self._values.get(name, default)
        if value not in choices:
            raise Problem(400, f"?{name}", f'"{value}" is not a valid value', f"use {' or '.join(choices)}")
        return value

    def seconds(self, name: str, most: timedelta | None = None) -> float | None:
        """A duration such as `10s`, in seconds; None when it is missing."""
        if name not in self._values:
            return None
        try:
            found = duration(self._values[name])
        except ValueError as error:
            why, _, fix = str(error).rpartition("; ")
            raise Problem(400, f"?{name}", why, fix) from error
        if most is not None and found > most:
            longest = f"{most.total_seconds():g}s"
            raise Problem(400, f"?{name}", f"{self._values[name]} is too long", f"use at most {longest}")
        return found.total_seconds()

    def offsets(self, name: str) -> dict[int, int]:
        """`0:12,1:7`: an offset per partition."""
        found: dict[int, int] = {}
        for part in self._values[name].split(","):
            partition, colon, offset = part.partition(":")
            if not colon:
                raise Problem(400, f"?{name}", f'"{part}" is not an offset', "write PARTITION:OFFSET,PARTITION:OFFSET")
            number = integer(f"?{name}", partition)
            if number in found:
                raise Problem(400, f"?{name}", f"partition {number} occurs twice", "give it once")
            found[number] = integer(f"?{name}", offset)
        return found


def integer(location: str, text: str, most: int = LARGEST, least: int = 0) -> int:
    # Longer texts are not parsed: a number of more than twenty digits is out of range anyway.
    if not re.fullmatch(r"[0-9]{1,20}", text) or not least <= int(text) <= most:
        raise Problem(400, location, f'"{text[:40]}" is not a valid integer', f"use a number from {least} to {most}")
    return int(text)

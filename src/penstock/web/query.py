"""Strict query-string parsing: an unknown parameter is an error."""

import re
from collections.abc import Collection
from datetime import timedelta

from starlette.requests import Request

from penstock.core.clock import duration
from penstock.core.text import did_you_mean
from penstock.web.problems import Problem

LARGEST = 2**63 - 1


class Query:
    """The parameters of a request, each of them known and given once."""

    def __init__(self, request: Request, known: Collection[str] = ()) -> None:
        self._given: dict[str, str] = {}
        for name, value in request.query_params.multi_items():
            if name not in known:
                all_known = f"the parameters are {', '.join(sorted(known))}" if known else "there are none here"
                raise Problem(400, f"?{name[:100]}", "this is not a parameter", did_you_mean(name, known, all_known))
            if name in self._given:
                raise Problem(400, f"?{name}", "it is there twice", "give it once")
            self._given[name] = value

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def text(self, name: str) -> str | None:
        return self._given.get(name)

    def flag(self, name: str) -> bool:
        if self._given.get(name):
            raise Problem(400, f"?{name}", "it takes no value", f"write ?{name} alone")
        return name in self._given

    def number(self, name: str, default: int, most: int = LARGEST, least: int = 0) -> int:
        if name not in self._given:
            return default
        return integer(f"?{name}", self._given[name], most, least)

    def choice(self, name: str, choices: Collection[str], default: str) -> str:
        given = self._given.get(name, default)
        if given not in choices:
            raise Problem(400, f"?{name}", f'"{given}" is none of the choices', f"choose {' or '.join(choices)}")
        return given

    def seconds(self, name: str, most: timedelta | None = None) -> float | None:
        """A duration such as `10s`, in seconds; None when it is not given."""
        if name not in self._given:
            return None
        try:
            found = duration(self._given[name])
        except ValueError as error:
            why, _, fix = str(error).rpartition("; ")
            raise Problem(400, f"?{name}", why, fix) from error
        if most is not None and found > most:
            longest = f"{most.total_seconds():g}s"
            raise Problem(400, f"?{name}", f"{self._given[name]} is too long", f"at most {longest}, and ask again")
        return found.total_seconds()

    def positions(self, name: str) -> dict[int, int]:
        """`0:12,1:7`: per partition, an offset."""
        found: dict[int, int] = {}
        for part in self._given[name].split(","):
            partition, colon, offset = part.partition(":")
            if not colon:
                raise Problem(400, f"?{name}", f'"{part}" is no position', "write PARTITION:OFFSET,PARTITION:OFFSET")
            number = integer(f"?{name}", partition)
            if number in found:
                raise Problem(400, f"?{name}", f"partition {number} is there twice", "give it once")
            found[number] = integer(f"?{name}", offset)
        return found


def integer(place: str, text: str, most: int = LARGEST, least: int = 0) -> int:
    # Twenty digits are beyond all bounds: longer texts are not parsed.
    if not re.fullmatch(r"[0-9]{1,20}", text) or not least <= int(text) <= most:
        raise Problem(400, place, f'"{text[:40]}" is not a valid integer', f"write one from {least} to {most}")
    return int(text)

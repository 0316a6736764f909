"""An alarm, and the words in which it is told."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from penstock.core.clock import Micros

LONGEST = 80
"""Longer names are cut."""


class Level(StrEnum):
    ALARM = "alarm"
    """Somebody has to look."""
    NOTICE = "notice"
    """Good to know; nothing is wrong with it."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """What is wrong, and where: name and stage together tell one alarm from another."""

    name: str
    stage: str
    """As in the graph of the pipeline, or the name of a process."""
    text: str
    """The facts, and where to look."""
    since: Micros
    level: Level = Level.ALARM

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.stage

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def named(name: object, longest: int = LONGEST) -> str:
    """A name from outside, fit to be read by people: in one line, without escape codes, and not too long."""
    text = str(name)
    short = text if len(text) <= longest else f"{text[:longest]}…"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in short)


def listed(names: Sequence[str], most: int) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def lasting(seconds: float) -> str:
    """A length of time in the unit that people would use."""
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"

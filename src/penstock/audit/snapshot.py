"""The parts that all rules use: an alarm, the snapshot that is evaluated, and state between evaluations. No I/O."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from penstock.audit.settings import AuditSettings
from penstock.core.clock import Micros

LONGEST = 80
"""Longer names are truncated."""


class Level(StrEnum):
    ALARM = "alarm"
    """An operator must act."""
    NOTICE = "notice"
    """Information; nothing is wrong."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """A problem of a stage: name and stage together identify an alarm."""

    name: str
    stage: str
    """As in the graph of the pipeline, or the name of a process."""
    text: str
    """The facts, and the command that shows more."""
    since: Micros
    level: Level = Level.ALARM

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.stage

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def named(name: object, longest: int = LONGEST) -> str:
    """Return a name from outside as one printable line of limited length."""
    text = str(name)
    short = text if len(text) <= longest else f"{text[:longest]}…"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in short)


def listed(names: Sequence[str], most: int) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def lasting(seconds: float) -> str:
    """Return a duration in a suitable unit."""
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


Json = Mapping[str, Any]
LONGEST_STEP = 5.0
"""Maximum seconds that count between two evaluations."""


class Elapsed:
    """Seconds of observation: jumps of the clock and sleep of the machine do not count."""

    def __init__(self) -> None:
        self._now: Micros | None = None
        self._seconds = 0.0

    def at(self, now: Micros) -> float:
        if self._now is not None:
            self._seconds += min(max(now - self._now, 0) / 1e6, LONGEST_STEP)
        self._now = now
        return self._seconds


@dataclass(frozen=True)
class Snapshot:
    now: Micros
    elapsed: float
    """See `Elapsed`."""
    settings: AuditSettings
    balance: Json
    processes: Json

    @property
    def hops(self) -> Iterator[Json]:
        return mappings(self.balance.get("hops"))

    @cached_property
    def channels(self) -> dict[str, Json]:
        return {str(one["channel"]): one for one in mappings(self.balance.get("channels"))}

    @property
    def unread(self) -> float:
        """The number of entries that the audit has not read."""
        return sum(number(one.get("unread")) or 0 for one in self.channels.values())

    @cached_property
    def nodes(self) -> dict[str, Json]:
        """The figures of each part of the pipeline, from the reports of all processes."""
        found: dict[str, Json] = {}
        for report in self.processes.values():
            nodes = report.get("nodes") if isinstance(report, Mapping) else None
            if isinstance(nodes, Mapping):
                found |= {str(node): figures for node, figures in nodes.items() if isinstance(figures, Mapping)}
        return found

    def ago(self, seconds: float) -> Micros:
        """Return the time this many seconds before."""
        return self.now - round(seconds * 1e6)

    def feeder(self, channel: str) -> str:
        """Return the source of a channel; the channel itself if there are several, or none is known."""
        sources = [str(hop["stage"]) for hop in self.hops if not hop.get("reads") and hop.get("writes") == channel]
        return sources[0] if len(sources) == 1 else f"channel:{channel}"

    def newest(self, channel: str) -> Micros:
        """Return when the channel last received a record; 0 if the balance does not contain it."""
        times = [number(one.get("newest")) or 0 for one in senders(self.channels[channel])]
        minutes = self.balance.get("minutes", {}).get(channel) or [(0, 0)]
        return int(max([*times, *(minute * 60_000_000 for minute, _ in minutes)]))


def senders(channel: Json) -> Iterator[Json]:
    """Return the epochs of the senders in the balance of a channel."""
    return mappings(channel.get("by_sender") or channel.get("worst"))


def number(value: object) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def mappings(value: object) -> Iterator[Json]:
    return (one for one in value if isinstance(one, Mapping)) if isinstance(value, list | tuple) else iter(())


OVER = 300.0
"""Seconds over which growth is measured."""


class Growth:
    """How much totals grew in the last minutes: over a time between half of `OVER` and all of it."""

    __slots__ = ("_at", "_newer", "_older")

    def __init__(self) -> None:
        self._at = 0.0
        self._older: tuple[float, ...] = ()
        self._newer: tuple[float, ...] = ()

    def reach(self, elapsed: float, *totals: float) -> tuple[float, ...]:
        """Take the current totals and return their growth since the first call.

        If the first of them shrinks, its process has restarted, and the measurement restarts, too.
        """
        if not self._older or totals[0] < self._newer[0]:
            self._at, self._older, self._newer = elapsed, totals, totals
        elif elapsed - self._at >= OVER / 2:
            self._at, self._older, self._newer = elapsed, self._newer, totals
        return tuple(now - before for now, before in zip(totals, self._older, strict=True))


class Standstill:
    """How long a part has had input without progress."""

    __slots__ = ("_at", "_input", "_since", "_state")

    SETTLES = 10.0
    """Input that is counted this soon after a step can belong to the step: two counts are never simultaneous."""

    def __init__(self) -> None:
        self._at = 0.0
        self._state: object = None
        self._input: float | None = None
        self._since: float | None = None

    def look(self, elapsed: float, state: object, waiting: bool, arrived: float | None = None) -> float:
        """Return for how many seconds there was input while `state` stayed the same.

        There is input if `waiting`, or if `arrived`, a total, grew since the last step.
        """
        if self._state is None or state != self._state:
            self._state, self._at, self._since = state, elapsed, None
        if self._input is None or elapsed - self._at < self.SETTLES:
            self._input = arrived
        elif arrived is not None:
            self._input = min(self._input, arrived)
        grew = arrived is not None and self._input is not None and arrived > self._input
        if not waiting and not grew:
            self._since = None
        elif self._since is None:
            self._since = elapsed
        return 0.0 if self._since is None else elapsed - self._since

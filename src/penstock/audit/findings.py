"""What a batch of entries tells the audit, from their headers alone. No I/O."""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from penstock.audit.latency import Sketch
from penstock.audit.runs import Runs
from penstock.clock import Micros
from penstock.contracts import Entry, Positions
from penstock.errors import Refused
from penstock.record import Blind, Headers, Heartbeat, Origin


class Kind(StrEnum):
    """What is expected of a channel."""

    SOURCE = "source"
    """Each sender's numbers have no gap."""
    DEAD = "dead"
    """What did not fit the schema of the channel that it is named after."""
    RESULT = "result"
    """What a query wrote: counted and timed."""


@dataclass(frozen=True, slots=True)
class Watched:
    channel: str
    kind: Kind


Numbering = tuple[str, str, int]
"""One numbering: channel, sender, epoch."""


@dataclass(slots=True)
class Findings:
    """A batch, reduced: its size grows with senders and gaps, not with entries.

    Claims and blind intervals come with the channel that they are about; it is empty when they do not tell.
    """

    start: Mapping[str, Positions]
    end: Mapping[str, Positions]
    records: Counter[str] = field(default_factory=Counter)
    without_identity: Counter[str] = field(default_factory=Counter)
    deletions: Counter[str] = field(default_factory=Counter)
    numbered: Counter[Numbering] = field(default_factory=Counter)
    runs: dict[Numbering, Runs] = field(default_factory=dict)
    latencies: dict[str, Sketch] = field(default_factory=dict)
    claims: list[tuple[str, Heartbeat, Micros]] = field(default_factory=list)
    blinds: list[tuple[str, Blind]] = field(default_factory=list)


def reduced(
    entries: Sequence[Entry],
    start: Mapping[str, Positions],
    end: Mapping[str, Positions],
    kinds: Mapping[str, Kind],
    heartbeats: str,
) -> Findings:
    """What the entries tell. An entry whose headers are broken is counted as one without identity."""
    found = Findings(start, end)
    numbers: defaultdict[Numbering, list[int]] = defaultdict(list)
    delays: defaultdict[str, Counter[Micros]] = defaultdict(Counter)
    for entry in entries:
        channel = entry.channel
        found.records[channel] += 1
        if channel == heartbeats:
            _note(found, entry)
            continue
        if entry.value is None:
            found.deletions[channel] += 1
        origin = _origin(entry.headers)
        if origin is not None:
            numbers[channel, origin.sender, origin.epoch].append(origin.seq)
            time: Micros | None = origin.time
        else:
            if kinds.get(channel) is not Kind.RESULT:
                found.without_identity[channel] += 1
            time = time_of(entry.headers)
        if time is not None:
            delays[channel][entry.appended - time] += 1
    for sequence, some in numbers.items():
        found.numbered[sequence] = len(some)
        found.runs[sequence] = islands(some)
    for channel, counts in delays.items():
        found.latencies[channel] = sketch = Sketch()
        for micros, times in counts.items():
            # A broker cuts its times to whole milliseconds: less than one back in time is that, and no skew.
            sketch.add(0 if -1_000 < micros < 0 else micros / 1_000, times)
    return found


def islands(numbers: list[int]) -> Runs:
    """The numbers as runs; sorting first makes each run one step."""
    ordered = sorted(numbers)
    firsts = ordered[:1] + [after for before, after in pairwise(ordered) if after > before + 1]
    lasts = [before for before, after in pairwise(ordered) if after > before + 1] + ordered[-1:]
    return Runs(zip(firsts, lasts, strict=True))


def _origin(headers: Headers) -> Origin | None:
    try:
        return Origin.of(headers)
    except Refused:
        return None


def time_of(headers: Headers) -> Micros | None:
    """The time that the headers tell, also when they tell no whole origin, as those of a result do."""
    for name, value in headers:
        if name == "time":
            try:
                return int(value)
            except (TypeError, ValueError):
                return None
    return None


def _note(found: Findings, entry: Entry) -> None:
    try:
        told = json.loads(entry.value or b"")
        channel = _text(told.get("channel", ""))
        if told["kind"] == "heartbeat":
            heartbeat = Heartbeat(_text(told["sender"]), *(_number(told[name]) for name in ("epoch", "seq", "time")))
            # By the channel's clock: the sender's own may be wrong.
            found.claims.append((channel, heartbeat, entry.appended))
        elif told["kind"] == "blind":
            blind = Blind(_text(told["source"]), _number(told["since"]), _number(told["until"]))
            if blind.until < blind.since:
                raise ValueError("it ends before it begins")
            found.blinds.append((channel, blind))
        else:
            raise ValueError("it is of no known kind")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        found.without_identity[entry.channel] += 1


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    value.encode()
    return value


def _number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise ValueError(f"{value!r} is not a number of 64 bits")
    return value

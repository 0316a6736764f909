"""The findings of a batch of entries, computed from their headers only. No I/O."""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import md5
from itertools import pairwise

from penstock.audit.account import Account, is_account
from penstock.audit.writers import WriterTokens
from penstock.core.clock import Micros
from penstock.core.contracts import Entry, Offsets
from penstock.core.errors import Refused
from penstock.core.metrics import Sketch
from penstock.core.record import Headers, Heartbeat, Origin, OutageInterval
from penstock.core.runs import Runs

MINUTE = 60_000_000
LATE_PREFIX = "late: "
"""Prefix of the reason of a dead letter whose record is in the channel, but was too late for a query."""
FORGED_NAMED = 100
"""Maximum forged rows that are named for each batch, and kept for each channel."""
LONGEST_KEY = 200
EXCLUDED = "excluded: "
"""The same for a record that makes one query fail, and that only this query excludes."""
IN_CHANNEL = (LATE_PREFIX, EXCLUDED)
_LONGEST = 2**62
_MOST_SHED = 10_000_000


class Kind(StrEnum):
    """What is expected of a channel."""

    SOURCE = "source"
    """Each sender's numbers have no gap."""
    DEAD = "dead"
    """Records that did not fit the schema of the channel with the same name."""
    RESULT = "result"
    """The rows of a query: counted and timed."""


@dataclass(frozen=True, slots=True)
class Watched:
    channel: str
    kind: Kind
    fed_by: tuple[str, ...] = ()
    """The stages that write to it: `source:rsvps`, `query:by_country`."""
    windowed: bool = False
    """Its rows are windows: rows that have not changed for long will not change again."""
    compacted: bool = False
    """A record may be removed after a later one with the same key."""


Numbering = tuple[str, str, int]
"""One numbering: channel, sender, epoch."""

NumberingPartition = tuple[str, int, str, int]
"""A numbering within a partition: channel, partition, sender, epoch."""


@dataclass(slots=True)
class Span:
    """The latencies of the records of a sender, in microseconds, and when the newest arrived."""

    count: int
    least: Micros
    total: Micros
    most: Micros
    newest: Micros

    def merge(self, other: "Span") -> None:
        self.count += other.count
        self.least = min(self.least, other.least)
        self.total += other.total
        self.most = max(self.most, other.most)
        self.newest = max(self.newest, other.newest)


@dataclass(slots=True)
class Findings:
    """A reduced batch: its size grows with senders, gaps and result rows, not with entries.

    Claims and outage intervals have the name of their channel; it is empty if they do not contain it.
    """

    start: Mapping[str, Offsets]
    end: Mapping[str, Offsets]
    records: Counter[str] = field(default_factory=Counter)
    without_identity: Counter[str] = field(default_factory=Counter)
    minutes: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Records per channel and minute of arrival, in minutes since 1970."""
    numbered: Counter[Numbering] = field(default_factory=Counter)
    redriven: Counter[Numbering] = field(default_factory=Counter)
    """Numbered records that were redriven from the dead letters: they are not duplicates."""
    runs: dict[Numbering, Runs] = field(default_factory=dict)
    disorder: dict[Numbering, Runs] = field(default_factory=dict)
    """Numbers that arrived after a higher one of the same sender in the same partition."""
    tails: dict[NumberingPartition, tuple[int, int]] = field(default_factory=dict)
    """The first number in a partition, and the highest: to find disorder across batches."""
    spans: dict[Numbering, Span] = field(default_factory=dict)
    rows: dict[str, dict[int, int]] = field(default_factory=dict)
    """Per result channel: the highest version of each row, by the hash of its key."""
    latencies: dict[str, Sketch] = field(default_factory=dict)
    steps: dict[str, Sketch] = field(default_factory=dict)
    """Of results: from the arrival of the newest record in its channel to the arrival of the row in this one."""
    claims: list[tuple[str, Heartbeat, Micros]] = field(default_factory=list)
    blinds: list[tuple[str, OutageInterval]] = field(default_factory=list)
    accounts: list[Account] = field(default_factory=list)
    forged: Counter[str] = field(default_factory=Counter)
    """Rows per result channel that none of its writers has written. No other count includes them."""
    forged_rows: list["ForgedRow"] = field(default_factory=list)
    """Some of the forged rows."""


@dataclass(frozen=True, slots=True)
class ForgedRow:
    """A row of a result that its query has not written."""

    channel: str
    partition: int
    offset: int
    key: str
    version: int | None

    @classmethod
    def of(cls, entry: Entry) -> "ForgedRow":
        version = _micros(_first_values(entry.headers).get("version"))
        return cls(entry.channel, entry.partition, entry.offset, key_text(entry.key), version)

    @property
    def name(self) -> str:
        version = "" if self.version is None else f", version {self.version}"
        return f"partition {self.partition}, offset {self.offset}, key {self.key}{version}"


def reduced(
    entries: Sequence[Entry],
    start: Mapping[str, Offsets],
    end: Mapping[str, Offsets],
    kinds: Mapping[str, Kind],
    heartbeats: str = "",
    bookmarks: str = "",
    writers: WriterTokens | None = None,
) -> Findings:
    """Reduce entries to findings. An entry with invalid headers is counted as one without identity.

    Rows of results that none of these writers has written are forged.
    """
    found = Findings(start, end)
    numbers: defaultdict[Numbering, list[int]] = defaultdict(list)
    delays: defaultdict[str, Counter[Micros]] = defaultdict(Counter)
    steps: defaultdict[str, Counter[Micros]] = defaultdict(Counter)
    for entry in entries:
        channel = entry.channel
        if channel == bookmarks:
            _take_account(found, entry)
            continue
        if writers is not None and kinds.get(channel) is Kind.RESULT and not writers.genuine(entry):
            found.forged[channel] += 1
            if len(found.forged_rows) < FORGED_NAMED:
                found.forged_rows.append(ForgedRow.of(entry))
            continue
        found.records[channel] += 1
        if channel == heartbeats:
            _note(found, entry)
            continue
        found.minutes[channel, entry.appended // MINUTE] += 1
        values = _first_values(entry.headers)
        origin = Origin.read(entry.headers) if "sender" in values or "seq" in values or "epoch" in values else None
        if kinds.get(channel) is Kind.DEAD and _in_channel(entry.headers):
            # Its outcome is in the account of the query.
            continue
        if origin is not None:
            numbering = (channel, origin.sender, origin.epoch)
            numbers[numbering].append(origin.seq)
            if "redriven" in values:
                found.redriven[numbering] += 1
            else:
                _order(found, entry.partition, numbering, origin.seq)
                _under_way(found, numbering, entry.appended - origin.time, entry.appended)
            time: Micros | None = origin.time
        else:
            if kinds.get(channel) is not Kind.RESULT:
                found.without_identity[channel] += 1
            time = _micros(values.get("time"))
        if time is not None:
            delays[channel][entry.appended - time] += 1
        if kinds.get(channel) is Kind.RESULT:
            _row(found, entry, values)
            if (read := _micros(values.get("appended"))) is not None:
                steps[channel][entry.appended - read] += 1
    for sequence, some in numbers.items():
        found.numbered[sequence] = len(some)
        found.runs[sequence] = islands(some)
    found.latencies = {channel: _sketch(counts) for channel, counts in delays.items()}
    found.steps = {channel: _sketch(counts) for channel, counts in steps.items()}
    return found


def shed_from(channel: str) -> str:
    """Return the name that holds the numbers dropped on purpose before a channel. It cannot be a channel's name."""
    return f"{channel} shed"


def key_hash(key: bytes) -> int:
    """Return a hash of 60 bits of a row's key; Spark computes the same."""
    return int(md5(key, usedforsecurity=False).hexdigest()[:15], 16)


def _sketch(counts: Counter[Micros]) -> Sketch:
    sketch = Sketch()
    for micros, times in counts.items():
        sketch.add(as_delay(micros), times)
    return sketch


def as_delay(micros: Micros) -> float:
    """Convert to milliseconds. A broker truncates its times: a delay above -1 ms is 0, not clock skew."""
    return 0 if -1_000 < micros < 0 else micros / 1_000


def _first_values(headers: Headers) -> dict[str, bytes]:
    """Return the first value of each header."""
    values: dict[str, bytes] = {}
    for name, value in headers:
        values.setdefault(name, value)
    return values


def _in_channel(headers: Headers) -> bool:
    # The last: a record may have had such a header before.
    reason = next((value for name, value in reversed(headers) if name == "reason"), b"")
    return reason.startswith(tuple(kind.encode() for kind in IN_CHANNEL))


def _order(found: Findings, partition: int, numbering: Numbering, seq: int) -> None:
    channel, sender, epoch = numbering
    position = (channel, partition, sender, epoch)
    first, highest = found.tails.get(position, (seq, seq))
    if seq < highest:
        found.disorder.setdefault(numbering, Runs()).add(seq)
    found.tails[position] = (first, max(highest, seq))


def _under_way(found: Findings, numbering: Numbering, micros: Micros, appended: Micros) -> None:
    # A difference with an invented time must fit into 64 bits.
    micros = max(-_LONGEST, min(_LONGEST, micros))
    one = Span(1, micros, micros, micros, appended)
    before = found.spans.setdefault(numbering, one)
    if before is not one:
        before.merge(one)


def _row(found: Findings, entry: Entry, values: Mapping[str, bytes]) -> None:
    version = _micros(values.get("version"))
    if version is None or entry.key is None:
        return
    rows = found.rows.setdefault(entry.channel, {})
    key = key_hash(entry.key)
    rows[key] = max(version, rows.get(key, version))


def key_text(key: bytes | None) -> str:
    """Return a key as text, truncated if it is long."""
    return "null" if key is None else key[:LONGEST_KEY].decode(errors="replace")


def _take_account(found: Findings, entry: Entry) -> None:
    if not is_account(entry.key) or entry.value is None:
        return
    try:
        found.accounts.append(Account.of(entry.key or b"", entry.value))
    except Refused:
        found.without_identity[entry.channel] += 1


def location_of(place: bytes) -> tuple[str, int, int] | None:
    """Return channel, partition and offset from the header `place` of a dead letter; None if it cannot be parsed."""
    channel, _, offset = place.decode(errors="replace").rpartition(":")
    channel, _, partition = channel.rpartition(":")
    # Longer numbers are beyond 64 bits; Python refuses to parse the longest.
    if not all(part.isdecimal() and len(part) < 20 for part in (partition, offset)):
        return None
    return channel, int(partition), int(offset)


def islands(numbers: list[int]) -> Runs:
    """Return the numbers as runs."""
    ordered = sorted(numbers)
    firsts = ordered[:1] + [after for before, after in pairwise(ordered) if after > before + 1]
    lasts = [before for before, after in pairwise(ordered) if after > before + 1] + ordered[-1:]
    return Runs(zip(firsts, lasts, strict=True))


def time_of(headers: Headers) -> Micros | None:
    """Return the time in the headers, also if they hold no complete origin, as those of a result."""
    return _micros(_first_values(headers).get("time"))


def _micros(value: bytes | None) -> Micros | None:
    try:
        number = None if value is None else int(value)
    except ValueError:
        return None
    usual = number is not None and b"%d" % number == value and -(2**63) <= number < 2**63
    return number if usual else None


def _note(found: Findings, entry: Entry) -> None:
    try:
        values = json.loads(entry.value or b"")
        channel = _text(values.get("channel", ""))
        if values["kind"] == "heartbeat":
            numbers = (_number(values[name]) for name in ("epoch", "seq", "time"))
            heartbeat = Heartbeat(_text(values["sender"]), *numbers)
            # By the channel's clock: the sender's own may be wrong.
            found.claims.append((channel, heartbeat, entry.appended))
        elif values["kind"] == "blind":
            outage = OutageInterval(_text(values["source"]), _number(values["since"]), _number(values["until"]))
            if outage.until < outage.since:
                raise ValueError("the end is before the start")
            found.blinds.append((channel, outage))
        elif values["kind"] == "shed":
            for sender, *run in values["runs"]:
                epoch, first, last = map(_number, run)
                if not 0 <= last - first < _MOST_SHED:
                    raise ValueError("the end is before the start, or too far from it")
                found.runs.setdefault((shed_from(channel), _text(sender), epoch), Runs()).add(first, last)
        else:
            raise ValueError("unknown kind")
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

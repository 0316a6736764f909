"""Deduplication: which arrivals become records, dead letters, or are dropped as duplicates. No I/O."""

import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import orjson

from penstock.collect.numbers import Numbering, Numbers, no_collectors, number_runs
from penstock.core.clock import Micros
from penstock.core.contracts import Arrival, Intake
from penstock.core.record import Headers, Heartbeat, Origin, OutageInterval, Record
from penstock.core.runs import Runs

CURSOR = "cursor"
"""The header with the cursor of a record: so the channel holds the point from which its source resumes."""
DEDUP_KEY = "mark"
"""The header with the dedup key of the record, where it has one."""
CHECKSUM = "checksum"
"""The header with the checksum of the whole payload, where a dead letter holds only its first bytes."""
MAX_RECENT = 1 << 16
"""How many a process remembers, for a source that repeats some after a reconnect."""
MAX_LENGTH = 100
"""Characters. A longer cursor is remembered as a digest. Only the last one is kept in full, to resume after it."""
DEAD_BYTES = 64 << 10
"""How much of a refused payload is kept."""
SHED_RUNS = 500
"""Runs of numbers in one record about shed arrivals. A channel refuses huge records, and sender names can be long."""
_MAX_SHED_RUN = 1_000_000


class RecordId(NamedTuple):
    """Identifies a record with a cursor. The checksum of the payload tells apart records that share a cursor."""

    cursor: str
    checksum: int
    dedup_key: str | None = None

    @property
    def identity(self) -> tuple[str, int]:
        return shortened(self.cursor if self.dedup_key is None else self.dedup_key), self.checksum


def record_id(cursor: str, value: bytes, dedup_key: str | None = None) -> RecordId:
    return RecordId(cursor, zlib.crc32(value), dedup_key)


def cursor_of(headers: Headers) -> str | None:
    return _text(headers, CURSOR)


def _text(headers: Headers, header: str) -> str | None:
    for name, value in headers:
        if name == header:
            try:
                return value.decode(errors="surrogatepass")
            except UnicodeDecodeError:
                # Not written by a source of Penstock.
                return None
    return None


def id_in_channel(headers: Headers, value: bytes | None) -> RecordId | None:
    """The id of a record in a channel; None if it has no cursor."""
    if (cursor := cursor_of(headers)) is None:
        return None
    dedup_key = _text(headers, DEDUP_KEY)
    for name, header in headers:
        if name == CHECKSUM and header.isdigit() and len(header) <= 10:
            return RecordId(cursor, int(header), dedup_key)
    return record_id(cursor, value or b"", dedup_key)


def shortened(cursor: str) -> str:
    """A cursor as it is remembered: a digest if it is long."""
    if len(cursor) <= MAX_LENGTH:
        return cursor
    return "#" + blake2b(cursor.encode(errors="surrogatepass"), digest_size=16).hexdigest()


class RecentRecords:
    """The last records that were received, and those that a former process left after a gap.

    `recent` and `after_gap` have the identities. Who makes `after_gap` removes from it.
    """

    def __init__(self, recent: Iterable[tuple[str, int]] = (), after_gap: Mapping[str, int] | None = None) -> None:
        self._received = OrderedDict.fromkeys(recent)
        self._after_gap = {} if after_gap is None else after_gap

    def received(self, one: RecordId) -> bool:
        """Whether this process received it, or it lies before the point at which this process resumed."""
        return one.identity in self._received

    def add(self, one: RecordId) -> bool:
        """Return whether it is new."""
        identity = short, checksum = one.identity
        if identity in self._received:
            return False
        self._received[identity] = None
        if len(self._received) > MAX_RECENT:
            self._received.popitem(last=False)
        return self._after_gap.get(short) != checksum


@dataclass
class DedupResult:
    """The parts of an intake. Each arrival is in exactly one of `records`, `dead`, `shed` and `duplicates`."""

    records: list[Record] = field(default_factory=list)
    dead: list[Record] = field(default_factory=list)
    notices: list[Record] = field(default_factory=list)
    """Records for the heartbeats channel."""
    duplicates: int = 0
    runs: Sequence[tuple[str, int, int, int]] = ()
    """The numbers that senders gave, as runs: sender, epoch, first, last."""
    last: int = 0
    """The last number that the collector gave, up to and including this intake."""
    ids: list[RecordId] = field(default_factory=list)
    """The arrivals with a cursor that this generation had not received before."""
    shed: list[Origin] = field(default_factory=list)


@dataclass
class Dedup:
    """Numbers arrivals without a number, drops repeated ones, refuses those that are too large."""

    channel: str
    numbering: Numbering
    received: Numbers
    key: str | Sequence[str] | None
    max_bytes: int
    recent: RecentRecords = field(default_factory=RecentRecords)
    is_other_collector: Callable[[str], bool] = no_collectors

    def process(self, intake: Intake, now: Micros) -> DedupResult:
        result = DedupResult()
        runs = list(number_runs(intake.arrivals))
        result.runs = [run for run in runs if self._is_external(run[0])]
        pending, remaining, external, new_run = iter(runs), 0, False, False
        for arrival in intake.arrivals:
            if not isinstance(arrival, Arrival):
                result.notices.append(heartbeat_record(self.channel, arrival))
                continue
            headers: Headers = ()
            if (origin := arrival.origin) is not None:
                if not remaining:
                    run = next(pending)
                    remaining, external = run[3] - run[2] + 1, self._is_external(run[0])
                    # A run above all numbers that were received has no duplicates.
                    new_run = external and self.received.extend(*run)
                remaining -= 1
            # A sender must not use the name of a collector: two records could then have the same origin.
            if origin is None or not external:
                if arrival.cursor is not None:
                    if not self._is_new(arrival, arrival.cursor, result):
                        result.duplicates += 1
                        continue
                    headers = ((CURSOR, arrival.cursor.encode(errors="surrogatepass")),)
                    if arrival.dedup_key is not None:
                        headers = (*headers, (DEDUP_KEY, arrival.dedup_key.encode(errors="surrogatepass")))
                origin = self.numbering.next(now)
            elif not new_run and not self.received.add(origin.sender, origin.epoch, origin.seq):
                result.duplicates += 1
                continue
            if arrival.shed:
                result.shed.append(origin)
            else:
                self._keep(arrival, origin, headers, result)
        result.last = self.numbering.last
        if result.shed:
            result.notices += shed_records(self.channel, result.shed)
        return result

    def _is_external(self, sender: str) -> bool:
        return sender != self.numbering.sender and not self.is_other_collector(sender)

    def _is_new(self, arrival: Arrival, cursor: str, result: DedupResult) -> bool:
        identity = record_id(cursor, arrival.value, arrival.dedup_key)
        if self.recent.received(identity):
            # The source reconnected and repeats it: the resume cursor must not move back to it.
            return False
        result.ids.append(identity)
        return self.recent.add(identity)

    def _keep(self, arrival: Arrival, origin: Origin, headers: Headers, result: DedupResult) -> None:
        value, reason, key = arrival.value, arrival.refused, None
        size = len(value)
        if reason is None:
            if self.key is not None and size <= self.max_bytes:
                key = key_of(value, self.key)
            if (total := size + len(key or b"")) <= self.max_bytes:
                result.records.append(Record(value, origin, key, headers))
                return
            with_key = f" with its key of {len(key)}" if key else ""
            reason = f"it has {total} bytes{with_key}, more than the {self.max_bytes} that the channel takes"
        if headers and size > DEAD_BYTES:
            # The dead letter holds only the first bytes: the checksum identifies a repeated record.
            headers = (*headers, (CHECKSUM, b"%d" % record_id("", value).checksum))
        headers = (*headers, ("reason", reason.encode(errors="replace")), ("size", b"%d" % size))
        result.dead.append(Record(value[:DEAD_BYTES], origin, extra=headers))


def heartbeat_record(channel: str, notice: Heartbeat | OutageInterval) -> Record:
    """A heartbeat or an outage interval, as a record of the heartbeats channel."""
    # Both are dataclasses: their fields follow.
    kind = "heartbeat" if isinstance(notice, Heartbeat) else "blind"
    key = notice.sender if isinstance(notice, Heartbeat) else notice.source
    return Record(orjson.dumps({"kind": kind, "channel": channel, **asdict(notice)}), key=key.encode())


def shed_records(channel: str, origins: Sequence[Origin]) -> Iterator[Record]:
    """The numbers of shed arrivals, as records of the heartbeats channel."""
    runs: dict[tuple[str, int], Runs] = {}
    for origin in origins:
        runs.setdefault((origin.sender, origin.epoch), Runs()).add(origin.seq)
    rows = [[*sender, first, last] for sender, numbers in runs.items() for first, last in numbers]
    for at in range(0, len(rows), SHED_RUNS):
        fields = {"kind": "shed", "channel": channel, "runs": rows[at : at + SHED_RUNS]}
        yield Record(orjson.dumps(fields), key=origins[0].sender.encode())


def shed_numbers(sender: str, channel: str, value: bytes | None) -> Iterator[tuple[int, int]]:
    """The shed numbers of a sender in a record of the heartbeats channel: (epoch, number)."""
    try:
        document = orjson.loads(value or b"")
        if document["kind"] == "shed" and document["channel"] == channel:
            runs = [(epoch, range(first, last + 1)) for who, epoch, first, last in document["runs"] if who == sender]
            for epoch, numbers in runs:
                # The next generation needs a number, too.
                if type(epoch) is int and 0 <= epoch < 2**63 - 1:
                    yield from ((epoch, number) for number in numbers[:_MAX_SHED_RUN])
    except (ValueError, KeyError, TypeError):
        # Any process can write to the channel. The audit reports such a record.
        return


def key_of(value: bytes, path: str | Sequence[str] | None) -> bytes | None:
    """The key of a record: the JSON value at a path ("group.group_id"), as text: `42`.

    Several paths give a JSON array: `[42,"yes"]`. None without a path, if the value is not JSON, or if there is no
    string, number or boolean at the path. Never raises.
    """
    if not path:
        return None
    try:
        document = orjson.loads(value)
    except orjson.JSONDecodeError:
        return None
    if isinstance(path, str):
        found = scalar_at(document, path.split("."))
        return None if found is None else found.encode() if isinstance(found, str) else orjson.dumps(found)
    parts = [scalar_at(document, each.split(".")) for each in path]
    return None if None in parts else orjson.dumps(parts)


def scalar_at(document: object, steps: Sequence[str]) -> str | int | float | bool | None:
    """The string, number or boolean at a path in a JSON document; None if there is none."""
    for step in steps:
        if not isinstance(document, dict):
            return None
        document = document.get(step)
    return document if isinstance(document, str | int | float | bool) else None

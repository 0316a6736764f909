"""What queries over a stream have to give, in plain Python, and the streams to try them on. Pure functions.

`generate` makes events, some late, repeated and out of order. They are sent as `Event.record()` and found again in the
channel as `placed`: what lies where. What Spark does with them depends on how its batches fell, which its checkpoint
tells: `in_batches` puts the two together, and each oracle follows Spark's rules batch by batch. A record is late by the
watermark of the batch before; a row is final by that of its own.
"""

import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from penstock.analysis.checkpoints.batches import Batch
from penstock.core.contracts import Entry
from penstock.core.record import Origin, Record

BEGIN = 1_700_000_000_000
"""The first event time, in milliseconds; a multiple of all lengths of windows up to 100 seconds."""

DDL = "name STRING NOT NULL, n BIGINT NOT NULL, at BIGINT NOT NULL"
EVENT_TIME = "timestamp_millis(at)"


@dataclass(frozen=True, order=True)
class Event:
    """A record: its number, its key, a value, and when it happened, in milliseconds."""

    seq: int
    name: str
    n: int
    at: int

    def record(self) -> Record:
        value = {"name": self.name, "n": self.n, "at": self.at}
        return Record(json.dumps(value).encode(), Origin("s", 1, self.seq, self.at * 1_000), self.name.encode())


@dataclass(frozen=True)
class Placed:
    """An event where it lies in its channel."""

    partition: int
    offset: int
    event: Event


Lying = TypeVar("Lying", Placed, Entry)
"""What has a partition and an offset."""


@dataclass(frozen=True)
class Snapshot:
    """What Spark took in one batch, with the watermark by which it found records late, and that by which it closed."""

    late_by: int
    closed_by: int
    events: Sequence[Event]


@dataclass
class Folded:
    """What an aggregation gives: (start, end, name) -> (sum of n, number of records). All of it, the part of it that
    is final, and the events that came too late for every row."""

    rows: dict[tuple[int, int, str], tuple[int, int]] = field(default_factory=dict)
    final: dict[tuple[int, int, str], tuple[int, int]] = field(default_factory=dict)
    late: list[Event] = field(default_factory=list)


def generate(
    seed: int,
    n: int,
    keys: int = 5,
    step: int = 400,
    jitter: int = 3_000,
    late: float = 0.05,
    lateness: int = 60_000,
    repeated: float = 0.05,
) -> list[Event]:
    """So many events in the order in which they are sent: time goes on by `step` ms with each, give or take `jitter`.

    Of them, the share `late` is up to `lateness` ms behind, and the share `repeated` is one of the last twenty again.
    """
    chance = random.Random(seed)
    events: list[Event] = []
    seq = 0
    for turn in range(n):
        if events and chance.random() < repeated:
            events.append(chance.choice(events[-20:]))
            continue
        seq += 1
        behind = chance.randrange(lateness) if chance.random() < late else chance.randrange(jitter)
        at = BEGIN + lateness + turn * step - behind
        events.append(Event(seq, f"k{chance.randrange(keys)}", chance.randrange(100), at))
    return events


def placed(entries: Iterable[Entry]) -> list[Placed]:
    """The events that lie in a channel, read from it."""
    found = []
    for entry in entries:
        told, origin = json.loads(entry.value or b""), Origin.of(entry.headers)
        assert origin is not None
        found.append(Placed(entry.partition, entry.offset, Event(origin.seq, **told)))
    return found


def in_batches(channel: str, lying: Iterable[Placed], batches: Sequence[Batch]) -> list[Snapshot]:
    """What each of the batches took. They have to be all that there were, from the first."""
    assert [batch.number for batch in batches] == list(range(len(batches))), "the checkpoint has forgotten some"
    taken, late_by = [], 0
    for batch, some in zip(batches, portions(channel, lying, batches), strict=True):
        taken.append(Snapshot(late_by, batch.watermark, [one.event for one in some]))
        late_by = batch.watermark
    return taken


def portions(channel: str, lying: Iterable[Lying], batches: Sequence[Batch]) -> list[list[Lying]]:
    """What lies in a channel, by the batches that took it: in each, partition by partition."""
    lying = sorted(lying, key=lambda one: (one.partition, one.offset))
    found, before = [], dict[int, int]()
    for batch in batches:
        ends = batch.ends.get(channel, before)
        found.append([one for one in lying if before.get(one.partition, 0) <= one.offset < ends.get(one.partition, 0)])
        before = {**before, **ends}
    return found


def tumbling(taken: Iterable[Snapshot], size: int, per: Callable[[Event], str] = lambda event: event.name) -> Folded:
    """`F.window` of `size` milliseconds. `per=lambda _: ""` is the global one."""
    return sliding(taken, size, size, per)


def sliding(
    taken: Iterable[Snapshot], size: int, slide: int, per: Callable[[Event], str] = lambda event: event.name
) -> Folded:
    """`F.window` of `size` every `slide` milliseconds: an event is late when all its windows were closed."""
    found = Folded()
    closed = 0
    for batch in taken:
        for event in batch.events:
            newest = event.at // slide * slide
            spans = [(start, start + size) for start in range(newest, newest - size, -slide)]
            still_open = [span for span in spans if span[1] > batch.late_by]
            if not still_open:
                found.late.append(event)
            for start, end in still_open:
                total, count = found.rows.get((start, end, per(event)), (0, 0))
                found.rows[start, end, per(event)] = total + event.n, count + 1
        closed = batch.closed_by
    found.final = {key: row for key, row in found.rows.items() if key[1] <= closed}
    return found


def sessions(taken: Iterable[Snapshot], gap: int, per: Callable[[Event], str] = lambda event: event.name) -> Folded:
    """`F.session_window` with a gap in milliseconds: what touches grows together, until the watermark passes it."""
    found = Folded()
    growing: defaultdict[str, list[tuple[int, int, int, int]]] = defaultdict(list)
    for batch in taken:
        for event in batch.events:
            if event.at + gap <= batch.late_by:
                found.late.append(event)
                continue
            start, end, total, count = event.at, event.at + gap, event.n, 1
            apart = []
            for other in growing[per(event)]:
                if other[0] <= end and start <= other[1]:
                    start, end = min(start, other[0]), max(end, other[1])
                    total, count = total + other[2], count + other[3]
                else:
                    apart.append(other)
            growing[per(event)] = [*apart, (start, end, total, count)]
        for name, some in growing.items():
            for start, end, total, count in some:
                if end <= batch.closed_by:
                    found.final[start, end, name] = total, count
            growing[name] = [one for one in some if one[1] > batch.closed_by]
    still = {(one[0], one[1], name): (one[2], one[3]) for name, some in growing.items() for one in some}
    found.rows = {**found.final, **still}
    return found


def by_number(event: Event) -> object:
    return event.seq, event.at


def deduplicated(
    taken: Iterable[Snapshot], same: Callable[[Event], object] = by_number
) -> tuple[list[Snapshot], list[Event], list[Event]]:
    """What a gate lets through, batch by batch; what came twice; and what came too late.

    `same` gives what two copies have in common; with it, they have to have the time.
    """
    passed: list[Snapshot] = []
    doubled: list[Event] = []
    late: list[Event] = []
    known: set[object] = set()
    for batch in taken:
        through = []
        for event in batch.events:
            if event.at <= batch.late_by:
                late.append(event)
            elif same(event) in known:
                doubled.append(event)
            else:
                known.add(same(event))
                through.append(event)
        passed.append(Snapshot(batch.late_by, batch.closed_by, through))
    return passed, doubled, late


def count_window(
    lying: Iterable[Placed],
    size: int,
    slide: int | None = None,
    partial: bool = False,
    per: Callable[[Event], str] = lambda event: event.name,
) -> dict[tuple[str, int], list[Event]]:
    """Windows of `size` records, each a list, by key and number. Each key has to lie in one partition."""
    keys: defaultdict[str, list[Event]] = defaultdict(list)
    for one in sorted(lying, key=lambda one: (one.partition, one.offset)):
        keys[per(one.event)].append(one.event)
    return {
        (name, number): window
        for name, events in keys.items()
        for number, window in _windows(events, size, slide or size, partial)
    }


def by_count_of_all(portions: Iterable[Iterable[Placed]], size: int, slide: int) -> dict[tuple[str, int], list[Event]]:
    """Windows over all records: in each batch, the partition goes on whose next one is oldest."""
    events = []
    for portion in portions:
        queues: defaultdict[int, list[Event]] = defaultdict(list)
        for one in sorted(portion, key=lambda one: (one.partition, one.offset)):
            queues[one.partition].append(one.event)
        while queues:
            first = min(queues, key=lambda partition: (queues[partition][0].at, partition))
            events.append(queues[first].pop(0))
            if not queues[first]:
                del queues[first]
    return {("", number): window for number, window in _windows(events, size, slide, partial=False)}


def _windows(events: Sequence[Event], size: int, slide: int, partial: bool) -> Iterator[tuple[int, list[Event]]]:
    for number, first in enumerate(range(0, len(events), slide), start=1):
        if partial or first + size <= len(events):
            yield number, list(events[first : first + size])


def idle(taken: Iterable[Snapshot], gap: int) -> dict[tuple[str, int], int]:
    """What a timer tells that every record of a key sets anew, by key and time: how many had come before."""
    times: Counter[str] = Counter()
    due: dict[str, int] = {}
    told = {}
    for batch in taken:
        for event in batch.events:
            if event.at > batch.late_by:
                times[event.name] += 1
                due[event.name] = event.at + gap
        for name, at in list(due.items()):
            if at <= batch.closed_by:
                told[name, at] = times.pop(name)
                del due[name]
    return told

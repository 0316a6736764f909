"""What is fed to the queries, step by step: generated streams, each with rows that are late, repeated, out of order."""

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

from tests.analysis.killed.queries import TABLES, channel
from tests.analysis.operators import cards, join_oracles, oracles, table_oracles
from tests.analysis.operators.table_oracles import Change
from tests.channels.traffic import send

from penstock.core.contracts import Channels
from penstock.core.record import Origin, Record

STEPS = 4
NAMES = {"a": ("to", 12)}
"""Rows of the table a name rows of another in the column `to`."""
ANOTHER = 10_000
"""From here on, records have numbers that copies got which are records of their own."""
CLOCKS_TURN_BACK = 1_699_156_800_000
"""Two hours before they do in New York, in milliseconds."""

T = TypeVar("T")


@dataclass(frozen=True)
class Streams:
    """All that is fed: per step, what each channel gets."""

    events: list[list[oracles.Event]]
    lefts: list[list[join_oracles.Event]]
    rights: list[list[join_oracles.Event]]
    changes: list[list[Change]]
    uses: list[list[cards.Used]]
    closing: join_oracles.Event
    """Of both sides, long after all others: the watermark passes those. What is fed after it is late."""


def generate(seed: int) -> Streams:
    lefts, rights = join_oracles.generate(seed, count=100)
    closing = join_oracles.Event(1_000, "closing", max(one.at for one in (*lefts, *rights)) + 300_000)
    belated = replace(lefts[0], id=1_001)
    uses = cards.used(seed, 160)
    moved = [(*use[:4], use[4] - uses[0][4] + CLOCKS_TURN_BACK) for use in uses]
    return Streams(
        parts(list(_disguised(seed, list(_delayed(oracles.generate(seed, n=280, late=0.1))))), STEPS),
        [*parts([*lefts, closing], STEPS - 1), [belated]],
        [*parts([*rights, closing], STEPS - 1), [belated]],
        table_oracles.generate(seed, TABLES, keys=30, batches=STEPS, size=90, names=NAMES),
        parts(list(_repeated(seed, moved)), STEPS),
        closing,
    )


def parts(some: Sequence[T], number: int) -> list[list[T]]:
    ends = [step * len(some) // number for step in range(number + 1)]
    return [list(some[begin:end]) for begin, end in pairwise(ends)]


def _disguised(seed: int, events: Sequence[oracles.Event]) -> Iterator[oracles.Event]:
    """Some come again a little later, equal in one respect only: the number, the payload, or the column n."""
    chance = random.Random(seed)
    for at, event in enumerate(events):
        yield event
        one, number = events[max(0, at - chance.randrange(20))], ANOTHER + at
        yield from chance.choices(
            (
                (),
                (replace(one, n=one.n + 1),),
                (replace(one, seq=number),),
                (replace(one, seq=number, name=f"{one.name}-too"),),
            ),
            weights=(88, 4, 4, 4),
        )[0]


def _delayed(events: Iterable[oracles.Event]) -> Iterator[oracles.Event]:
    """Now and then, one is late for who waits for some seconds, and one for who waits for minutes."""
    for at, event in enumerate(events):
        yield replace(event, at=event.at - {4: 100_000, 11: 400_000}.get(at % 15, 0))


def _repeated(seed: int, uses: Sequence[cards.Used]) -> Iterator[cards.Used]:
    chance = random.Random(seed)
    for at, use in enumerate(uses):
        yield use
        if chance.random() < 0.05:
            yield uses[max(0, at - chance.randrange(20))]


@dataclass
class Feeding:
    """The hand that feeds the channels of a run."""

    channels: Channels
    run: str
    streams: Streams
    fed: int = 0
    """So many steps."""

    def step(self) -> None:
        number, self.fed = self.fed, self.fed + 1
        self._send("events", [event.record() for event in self.streams.events[number]])
        for side, steps in (("left", self.streams.lefts), ("right", self.streams.rights)):
            self._send(side, [_of_side(event, side) for event in steps[number]])
        for name in TABLES:
            self._send(name, self._of_table(number, name))
        self._send("stream", [one for one in self._of_table(number, "a") if one.value is not None])
        cards.send(self.channels, channel(self.run, "uses"), self.streams.uses[number])

    def _send(self, name: str, records: Sequence[Record]) -> None:
        send(self.channels, channel(self.run, name), records)

    def _of_table(self, step: int, table: str) -> list[Record]:
        before = sum(change.table == table for some in self.streams.changes[:step] for change in some)
        own = [change for change in self.streams.changes[step] if change.table == table]
        return [_of_change(change, number) for number, change in enumerate(own, start=before + 1)]


def _of_side(event: join_oracles.Event, side: str) -> Record:
    value = json.dumps({"id": event.id, "key": event.key, "at": event.at}).encode()
    return Record(value, Origin(side, 1, event.id, event.at * 1_000), event.key.encode())


def _of_change(change: Change, number: int) -> Record:
    value = None if change.value is None else json.dumps(change.value).encode()
    return Record(value, Origin(change.table, 1, number, number), change.key.encode())

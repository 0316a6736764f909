"""What a join of two streams has to give, in plain Python; and streams to try it on: late, repeated, out of order."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.analysis.checkpoints.batches import Batch

BEGIN = 1_700_000_000_000
"""The time of the first record, in milliseconds."""


@dataclass(frozen=True)
class Event:
    """A record of one side: the event time is in milliseconds."""

    id: int
    key: str
    at: int


Pair = tuple[int | None, int | None]
"""The ids of a match, or of one record without one."""


def generate(seed: int, count: int, keys: int = 12) -> tuple[list[Event], list[Event]]:
    """Lefts and rights in the order of their arrival, about a second apart.

    Rights follow a left of their key after up to 30 seconds, or come a little before it; one in five belongs to nobody.
    Of all, one in eight comes out of order, one in fifteen much too late, and one in ten twice.
    """
    chance = random.Random(seed)
    lefts = [Event(n, f"k{chance.randrange(keys)}", BEGIN + n * 1_000) for n in range(1, count + 1)]
    rights = []
    for n in range(1, count + 1):
        left = chance.choice(lefts[max(0, n - 10) : n])
        key = "nobody" if chance.random() < 0.2 else left.key
        rights.append(Event(n, key, left.at + chance.randint(-4_000, 30_000)))
    return _disturbed(chance, lefts), _disturbed(chance, rights)


def _disturbed(chance: random.Random, events: Sequence[Event]) -> list[Event]:
    """The same events in another order of arrival, and some of them twice."""
    due: list[tuple[float, Event]] = []
    for event in events:
        delay = 60_000 if chance.random() < 1 / 15 else chance.randint(0, 6_000) if chance.random() < 1 / 8 else 0
        due.append((event.at + delay, event))
        if chance.random() < 0.1:
            due.append((event.at + delay + chance.randint(0, 3_000), event))
    return [event for _, event in sorted(due, key=lambda one: one[0])]


def matches(left: Event, right: Event, before: int, after: int) -> bool:
    return left.key == right.key and left.at - before <= right.at <= left.at + after


def joined(lefts: Iterable[Event], rights: Iterable[Event], before: int, after: int, how: str) -> set[Pair]:
    """All that is to come in the end; of a semi join, the lefts alone."""
    lefts, rights = list(lefts), list(rights)
    pairs: set[Pair] = {(a.id, b.id) for a in lefts for b in rights if matches(a, b, before, after)}
    if how == "semi":
        return {(left, None) for left, _ in pairs}
    matched = {left for left, _ in pairs}, {right for _, right in pairs}
    if how in ("left", "full"):
        pairs |= {(one.id, None) for one in lefts if one.id not in matched[0]}
    if how in ("right", "full"):
        pairs |= {(None, one.id) for one in rights if one.id not in matched[1]}
    return pairs


def in_time(
    placed: Mapping[tuple[int, int], Event], channel: str, batches: Sequence[Batch]
) -> tuple[list[Event], list[Event]]:
    """Of events by partition and offset: those that a query took, and those that came too late for it.

    Late is what is not after the watermark of the batch before: each batch is judged by what the ones before it knew.
    """
    taken, late, stands, watermark = list[Event](), list[Event](), dict[int, int](), 0
    for batch in batches:
        for partition, end in batch.ends.get(channel, {}).items():
            for offset in range(stands.get(partition, 0), end):
                event = placed[partition, offset]
                (taken if event.at > watermark else late).append(event)
            stands[partition] = end
        watermark = batch.watermark
    return taken, late

"""Channels that do not hold what they held when it was counted: records removed before their time, forged rows."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import groupby

from penstock.audit.content import Content, Lost
from penstock.audit.findings import MINUTE, Stranger
from penstock.audit.judge import Discrepancy
from penstock.audit.ledger import Ledger
from penstock.audit.retention import Readers
from penstock.core.clock import Clock, Micros
from penstock.core.contracts import Channels, Topic
from penstock.core.errors import Unaccounted

log = logging.getLogger(__name__)

NAMED = 10
"""So many forged rows and lost ranges are named."""
SLACK = timedelta(minutes=2)
"""Clocks differ, and the age of a record is known to the minute."""
BYTES = "retention.bytes"


class Losses:
    """Looks where channels begin. What was removed from their beginning before its time is lost, see `look`."""

    def __init__(self, channels: Channels, ledger: Ledger, clock: Clock) -> None:
        self._channels, self._ledger, self._clock = channels, ledger, clock
        self._turn = self._marked = 0

    def look(self, names: Sequence[str], readers: Callable[[], Readers] = dict) -> None:
        """Write down what these channels lost since the last look. `readers`: how far each stage has read.

        A channel that keeps its records for ever loses none. One that keeps them for a time removes the older ones;
        those that are known to be younger are lost. One with a limit in bytes may remove any: nothing can be told.
        """
        now, known, counted = self._clock.now(), self._ledger.begins(), self._ledger.positions()
        bounds = {name: self._channels.bounds(name) for name in names}
        moved = {
            name: {at: first for at, (first, _) in bounds[name].items() if first > known.get(name, {}).get(at, first)}
            for name in names
        }
        lost: list[Lost] = []
        for name, firsts in moved.items():
            topic = self._channels.topic(name) if firsts else Topic(name)
            for partition, first in firsts.items():
                before, gone = known[name][partition], min(first, counted.get(name, {}).get(partition, 0))
                if gone > before and (until := self._too_early(topic, partition, gone - 1, now)) is not None:
                    unread = tuple(stage for stage, at in _positions(readers(), name, partition) if at < gone)
                    lost.append(Lost(name, partition, before, gone - 1, until or None, unread))
                    log.warning("%s", _text(name, lost[-1:]))
        # Each write is a sync of the disk: once in a minute, unless there is something new.
        if any(moved.values()) or bounds.keys() - known.keys() or now // MINUTE != self._marked:
            self._ledger.mark_bounds(bounds, lost, now)
            self._marked = now // MINUTE
        self._forgive()

    def _too_early(self, topic: Topic, partition: int, offset: int, now: Micros) -> Micros | None:
        """When a record that was removed would have been removed anyway, 0 for never; None if its time had come."""
        if int(topic.config.get(BYTES, "-1")) >= 0:
            return None
        if topic.retention is None:
            return 0
        keep = topic.retention // timedelta(microseconds=1)
        after = self._ledger.appended_after(topic.name, partition, offset)
        if after is None or now - after >= keep - SLACK // timedelta(microseconds=1):
            return None
        return now + keep

    def _forgive(self) -> None:
        """Forget a forged row that is no longer in its channel: one of them is looked up each time."""
        strangers = self._ledger.strangers()
        if not strangers:
            return
        self._turn = (self._turn + 1) % len(strangers)
        one = strangers[self._turn]
        if not self._holds(one):
            log.info("a forged row is gone from %s: %s", one.channel, one.name)
            self._ledger.forget_stranger(one)

    def _holds(self, one: Stranger) -> bool:
        place = (one.channel, one.partition)
        first, _ = self._channels.bounds(one.channel).get(one.partition, (0, 0))
        if one.offset < first:
            return False
        try:
            with self._channels.reader({one.channel: {one.partition: one.offset}}, only={place}) as reader:
                entries = reader.read(1, 1.0)
                passed = reader.positions(one.channel).get(one.partition, 0) > one.offset
        except Unaccounted:
            return False
        return entries[0].offset == one.offset if entries else not passed


def discrepancies(content: Content) -> Iterator[Discrepancy]:
    """What the ledger knows of rows that were forged, and of records that were removed before their time."""
    for channel, rows in sorted(content.forged.items()):
        watched = content.channels.get(channel)
        if not rows or watched is None:
            continue
        query = " ".join(watched.fed_by).removeprefix("query:")
        text = f"{channel} holds {_count(rows, 'row')} that query {query} has not written: something else wrote there"
        examples = tuple(one.name for one in content.strangers if one.channel == channel)[:NAMED]
        yield Discrepancy("forged", f"channel:{channel}", rows, text, examples)
    for channel, some in groupby(sorted(content.lost, key=lambda one: one.channel), lambda one: one.channel):
        if channel in content.channels:
            ranges = list(some)
            examples = tuple(f"partition {one.partition}, offsets {one.first}–{one.last}" for one in ranges[:NAMED])
            size = sum(one.size for one in ranges)
            yield Discrepancy("lost", f"channel:{channel}", size, _text(channel, ranges), examples)


def _text(channel: str, ranges: Sequence[Lost]) -> str:
    size = sum(one.size for one in ranges)
    stages = sorted({stage for one in ranges for stage in one.unread})
    read = f"not read before by {', '.join(stages)}" if stages else "every stage had read them"
    return f"{channel} has lost {_count(size, 'record')} that were counted, before their time; {read}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _positions(readers: Readers, channel: str, partition: int) -> Iterator[tuple[str, int]]:
    for stage, read in readers.items():
        positions: Mapping[int, int] | None = read.get(channel)
        if positions is not None:
            yield stage, positions.get(partition, 0)

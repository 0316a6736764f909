"""Changes of channels after they were counted: records removed before their retention ended, forged rows."""

import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import groupby

from penstock.audit.content import Content, Lost
from penstock.audit.findings import MINUTE, ForgedRow
from penstock.audit.judge import Discrepancy
from penstock.audit.lag import Readers
from penstock.audit.ledger import Ledger
from penstock.core.clock import Clock, Micros
from penstock.core.contracts import Channels, Topic
from penstock.core.errors import Unaccounted
from penstock.core.text import counted

log = logging.getLogger(__name__)

NAMED = 10
"""Maximum forged rows and lost ranges that are named."""
SLACK = timedelta(minutes=2)
"""Clocks differ, and the age of a record is known to the minute."""
BYTES = "retention.bytes"


class Losses:
    """Watches the first offsets of channels, and finds records that were removed too early."""

    def __init__(self, channels: Channels, ledger: Ledger, clock: Clock) -> None:
        self._channels, self._ledger, self._clock = channels, ledger, clock
        self._turn = self._marked = 0

    def look(self, names: Sequence[str], readers: Callable[[], Readers] = dict) -> None:
        """Store what these channels lost since the last call. `readers`: how far each stage has read.

        A channel without retention loses no record. One with a retention time removes older records; if a removed
        record is known to be younger, it is lost. One with a retention in bytes may remove any: it is not checked.
        """
        now, begins, read_to = self._clock.now(), self._ledger.begins(), self._ledger.positions()
        bounds = {name: self._channels.bounds(name) for name in names}
        moved = {
            name: {at: first for at, (first, _) in bounds[name].items() if first > begins.get(name, {}).get(at, first)}
            for name in names
        }
        lost: list[Lost] = []
        for name, firsts in moved.items():
            topic = self._channels.topic(name) if firsts else Topic(name)
            for partition, first in firsts.items():
                before, gone = begins[name][partition], min(first, read_to.get(name, {}).get(partition, 0))
                if gone > before and (until := self._too_early(topic, partition, gone - 1, now)) is not None:
                    unread = tuple(
                        stage
                        for stage, read in readers().items()
                        if name in read and read[name].get(partition, 0) < gone
                    )
                    lost.append(Lost(name, partition, before, gone - 1, until or None, unread))
                    log.warning("%s", _text(name, lost[-1:]))
        # Each write syncs the disk: once in a minute, unless something is new.
        if any(moved.values()) or bounds.keys() - begins.keys() or now // MINUTE != self._marked:
            self._ledger.mark_bounds(bounds, lost, now)
            self._marked = now // MINUTE
        self._forgive()

    def _too_early(self, topic: Topic, partition: int, offset: int, now: Micros) -> Micros | None:
        """Return when retention would have removed a removed record, 0 for never; None if it was due."""
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
        """Forget forged rows that their channel no longer holds: each call checks one of them."""
        forged_rows = self._ledger.forged_rows()
        if not forged_rows:
            return
        self._turn = (self._turn + 1) % len(forged_rows)
        one = forged_rows[self._turn]
        if not self._holds(one):
            log.info("a forged row is gone from %s: %s", one.channel, one.name)
            self._ledger.forget_forged_row(one)

    def _holds(self, one: ForgedRow) -> bool:
        position = (one.channel, one.partition)
        first, _ = self._channels.bounds(one.channel).get(one.partition, (0, 0))
        if one.offset < first:
            return False
        try:
            with self._channels.reader({one.channel: {one.partition: one.offset}}, only={position}) as reader:
                entries = reader.read(1, 1.0)
                passed = reader.positions(one.channel).get(one.partition, 0) > one.offset
        except Unaccounted:
            return False
        return entries[0].offset == one.offset if entries else not passed


def discrepancies(content: Content) -> Iterator[Discrepancy]:
    """Find the forged rows and the lost records in the content of the ledger."""
    for channel, rows in sorted(content.forged.items()):
        watched = content.channels.get(channel)
        if not rows or watched is None:
            continue
        query = " ".join(watched.fed_by).removeprefix("query:")
        text = f"{channel} holds {counted(rows, 'row')} that query {query} has not written"
        examples = tuple(one.name for one in content.forged_rows if one.channel == channel)[:NAMED]
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
    read = f"not read by {', '.join(stages)}" if stages else "every stage had read them"
    return f"{channel} has lost {counted(size, 'record')} that were counted, before the retention ended; {read}"

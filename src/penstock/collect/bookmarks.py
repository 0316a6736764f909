"""Bookmarks: how a collector knows, after a crash, which records its channel holds already.

A bookmark says which numbers are durable, and up to which offsets of the channel this is complete. What lies after
these offsets is read from the channel. So the result is exact, however old the bookmark is.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from penstock.collect.dedup import RecentRecords, RecordId, id_in_channel, shed_numbers
from penstock.collect.numbers import Numbers
from penstock.collect.spool import SpoolDedup
from penstock.core.clock import Micros
from penstock.core.contracts import Channels, Offsets, ResumeState
from penstock.core.errors import Refused
from penstock.core.record import Headers, Origin, Record
from penstock.core.scan import Bounds, scan

log = logging.getLogger(__name__)

FORGOTTEN_AFTER = 100_000
"""After this many records, a record after a gap is not expected to be repeated any more."""
RECENT = 100
"""How many of the last records a bookmark remembers: some sources resume with the record itself, not after it."""


@dataclass
class CursorState:
    """How far a source was read. After a crash, a record can be durable while one before it is not: a gap."""

    cursor: str | None = None
    """All records up to the one with this cursor are durable."""
    recent: dict[str, int] = field(default_factory=dict)
    """The ids of the last of them."""
    after_gap: dict[str, int] = field(default_factory=dict)
    """The ids of durable records that come after `cursor`."""
    _added: int = 0

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "CursorState":
        """From a bookmark. Raises ValueError or TypeError if it is invalid."""
        cursor = document.get("cursor")
        recent, after_gap = (
            {str(text): int(sum_) for text, sum_ in document.get(name, {}).items()} for name in ("recent", "beyond")
        )
        return cls(None if cursor is None else str(cursor), recent, after_gap)

    def recent_records(self) -> RecentRecords:
        """What a process knows at its start. It shares `after_gap`."""
        return RecentRecords(self.recent.items(), self.after_gap)

    def add(self, ids: Iterable[RecordId]) -> None:
        """Note that these records are durable, in this order, and all before them.

        They are new, or came after a gap. One that was passed before must not be added: the cursor would move back.
        """
        for one in ids:
            self.cursor = one.cursor
            short, checksum = one.identity
            self.recent[short] = checksum
            if self.after_gap.get(short) == checksum:
                del self.after_gap[short]
            # Records with a dedup key can come in another order than before, so after any number of others.
            self._added += one.dedup_key is None
        while len(self.recent) > RECENT:
            del self.recent[next(iter(self.recent))]
        if self._added >= FORGOTTEN_AFTER:
            self.after_gap.clear()


class CursorRecovery:
    """Updates a cursor state from the records of a channel, whose partitions are read in any order."""

    def __init__(self, state: CursorState, generation: int, last: int) -> None:
        self._state = state
        self._first = generation
        self._generations = {generation: _Generation(last + 1)}

    def add(self, epoch: int, seq: int, one: RecordId | None = None) -> None:
        """A number that the collector gave, and the id of the record; None if the record was shed."""
        if epoch >= self._first:
            self._generations.setdefault(epoch, _Generation(1)).add(seq, one)

    def finish(self) -> None:
        """Call after all records were added."""
        for _, generation in sorted(self._generations.items()):
            self._state.add(generation.before_gap)
            for one in generation.pending.values():
                if one is not None:
                    short, checksum = one.identity
                    self._state.after_gap[short] = checksum


@dataclass
class _Generation:
    """The numbers that one generation of the collector gave. They have no gaps, except those that its crash left."""

    next: int
    before_gap: list[RecordId] = field(default_factory=list)
    """The last ids before the first gap."""
    pending: dict[int, RecordId | None] = field(default_factory=dict)

    def add(self, seq: int, one: RecordId | None) -> None:
        if seq < self.next:
            return
        self.pending[seq] = one
        while self.next in self.pending:
            if (found := self.pending.pop(self.next)) is not None:
                self.before_gap.append(found)
            self.next += 1
        if len(self.before_gap) > 2 * RECENT:
            del self.before_gap[:-RECENT]


@dataclass
class Bookmark:
    """What is durable. Every record before `offsets` is in `numbers`, and every number in `numbers` is durable."""

    numbers: Numbers = field(default_factory=Numbers)
    offsets: Mapping[str, Offsets] = field(default_factory=dict)
    generation: int = 0
    """The last generation of the collector that may have numbered records."""
    last_received: Micros | None = None
    """When the last durable record arrived."""
    duplicates: int = 0
    """How many duplicates were dropped, in all generations of the collector."""
    last: int = 0
    """The last number of this generation that is durable, together with all before it."""
    cursors: CursorState = field(default_factory=CursorState)

    def resume_state(self) -> ResumeState:
        return ResumeState(self.numbers.contiguous(), self.cursors.cursor, self.numbers.highest())

    def add(self, source: str, origin: Origin) -> None:
        """Note that a record with this origin is durable. `source`: the sender name of the collector itself."""
        if origin.sender == source:
            if origin.epoch < 2**63 - 1:  # The next generation needs a number, too.
                self.generation = max(self.generation, origin.epoch)
            self.last_received = max(self.last_received or 0, origin.time)
        else:
            self.numbers.add(origin.sender, origin.epoch, origin.seq)

    def record(self, source: str) -> Record:
        """This bookmark as a record of the bookmarks channel."""
        runs: dict[str, dict[str, list[tuple[int, int]]]] = {}
        for sender, epoch, found in self.numbers:
            runs.setdefault(sender, {})[str(epoch)] = list(found)
        document = {
            "incarnation": self.generation,
            "heard": self.last_received,
            "duplicates": self.duplicates,
            "last": self.last,
            "cursor": self.cursors.cursor,
            "recent": self.cursors.recent,
            "beyond": self.cursors.after_gap,
            "positions": {
                channel: {str(partition): offset for partition, offset in offsets.items()}
                for channel, offsets in self.offsets.items()
            },
            "runs": runs,
        }
        return Record(_dumps(document), key=source.encode())

    @classmethod
    def of(cls, value: bytes) -> "Bookmark":
        """From the bookmarks channel. Raises Refused if it cannot be read."""
        try:
            document = _loads(value)
            numbers = Numbers()
            for sender, epochs in document["runs"].items():
                # Raises for half of a surrogate pair: not a valid sender name.
                sender.encode()
                for epoch, runs in epochs.items():
                    for first, last in runs:
                        numbers.add(sender, _int64(int(epoch)), _int64(first), _int64(last))
            offsets = {
                channel: {_int64(int(partition)): _int64(offset) for partition, offset in partitions.items()}
                for channel, partitions in document["positions"].items()
            }
            last_received = document["heard"]
            return cls(
                numbers,
                offsets,
                _int64(document["incarnation"]),
                None if last_received is None else _int64(last_received),
                _int64(document.get("duplicates", 0)),
                _int64(document.get("last", 0)),
                CursorState.of(document),
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise Refused("a bookmark", f"it cannot be read: {error!r}") from error


def _int64(value: object) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise ValueError(f"{value!r} is not a 64-bit integer")
    return value


def _dumps(document: Mapping[str, object]) -> bytes:
    try:
        return orjson.dumps(document)
    except TypeError:
        # A cursor can be any text, such as half of a surrogate pair.
        return json.dumps(document).encode()


def _loads(value: bytes) -> Any:
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return json.loads(value)


def recover(
    channels: Channels,
    bookmarks: str,
    source: str,
    watched: Sequence[str],
    heartbeats: str,
    spooled: Iterable[tuple[str, Record]] = (),
    dedup: SpoolDedup | None = None,
) -> Bookmark:
    """The last bookmark of the source, updated to the end of the channels that it fills. Blocks.

    `heartbeats`: the channel with the numbers that were shed before the first of the watched channels; they are not
    gaps. `spooled`: durable records that are not in their channel yet. `dedup` observes the records after the bookmark.

    A bookmark is ignored if it cannot be read, or claims more than a channel holds (the channel was recreated or
    truncated). Then the whole channels are read.
    """
    bookmark = _last(channels, bookmarks, source)
    bounds = {channel: channels.bounds(channel) for channel in watched}
    if not _fits(bookmark.offsets, bounds):
        log.warning("the bookmark of %s claims more than its channel holds: reading the whole channel", source)
        # The cursor stays: the source would not repeat what the channel lost.
        bookmark = replace(bookmark, numbers=Numbers(), offsets={}, last=0)
    recovery = CursorRecovery(bookmark.cursors, bookmark.generation, bookmark.last)

    def note(channel: str, origin: Origin | None, headers: Headers, value: bytes | None) -> None:
        if channel == heartbeats:
            for epoch, seq in shed_numbers(source, watched[0], value):
                bookmark.generation = max(bookmark.generation, epoch)
                recovery.add(epoch, seq)
        elif channel in watched and origin is not None:
            bookmark.add(source, origin)
            if origin.sender == source:
                recovery.add(origin.epoch, origin.seq, id_in_channel(headers, value))

    for channel in (*watched, heartbeats):
        bounds.setdefault(channel, channels.bounds(channel))
        for entry in scan(channels, channel, bookmark.offsets.get(channel), bounds[channel]):
            origin = Origin.read(entry.headers)
            note(channel, origin, entry.headers, entry.value)
            if origin is not None and dedup is not None:
                dedup.observe(channel, origin)
    for channel, record in spooled:
        note(channel, record.origin, record.extra, record.value)
    recovery.finish()
    bookmark.offsets = {channel: ends_of(partitions) for channel, partitions in bounds.items()}
    return bookmark


def ends_of(bounds: Bounds) -> Offsets:
    return {partition: end for partition, (_, end) in bounds.items()}


def _last(channels: Channels, bookmarks: str, source: str) -> Bookmark:
    value: bytes | None = None
    for entry in scan(channels, bookmarks):
        if entry.key == source.encode():
            value = entry.value
    if value is None:
        return Bookmark()
    try:
        return Bookmark.of(value)
    except Refused as refused:
        log.warning("the bookmark of %s is ignored, the whole channel is read: %s", source, refused)
        return Bookmark()


def _fits(offsets: Mapping[str, Offsets], bounds: Mapping[str, Bounds]) -> bool:
    return all(
        offset <= bounds[channel].get(partition, (0, 0))[1]
        for channel, partitions in offsets.items()
        if channel in bounds
        for partition, offset in partitions.items()
    )

"""Cursors: how the collector resumes a source whose records have no numbers. No I/O.

The cursor of a record is one of its headers. So the channel itself holds the point from which to resume, written
together with the records.
"""

import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import starmap
from typing import Any, NamedTuple

from penstock.core.record import Headers

CURSOR = "cursor"
"""The header."""
DEDUP_KEY = "mark"
"""The header with the dedup key of the record, where it has one."""
CHECKSUM = "checksum"
"""The header with the checksum of the whole payload, where a dead letter holds only its first bytes."""
RECENT = 100
"""How many of the last records a bookmark remembers: some sources resume with the record itself, not after it."""
MAX_RECENT = 1 << 16
"""How many a process remembers. More than can be in flight when a source reconnects and repeats them."""
FORGOTTEN_AFTER = 100_000
"""After this many records, a record after a gap is not expected to be repeated any more."""
MAX_LENGTH = 100
"""Characters. A longer cursor is remembered as a digest. Only the last one is kept in full, to resume after it."""


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
    """The last records that were received, and those that a former process left after a gap."""

    def __init__(self, ids: Iterable[RecordId] = (), after_gap: Iterable[RecordId] = ()) -> None:
        self._received = OrderedDict.fromkeys(one.identity for one in ids)
        self._after_gap = {one.identity for one in after_gap}
        self._remaining = FORGOTTEN_AFTER

    def received(self, one: RecordId) -> bool:
        """Whether this process received it, or it lies before the point at which this process resumed."""
        return one.identity in self._received

    def add(self, one: RecordId) -> bool:
        """Return whether it is new."""
        identity = one.identity
        if identity in self._received:
            return False
        self._received[identity] = None
        if len(self._received) > MAX_RECENT:
            self._received.popitem(last=False)
        new = identity not in self._after_gap
        # Records with a dedup key can come in another order than before, so after any number of others.
        if one.dedup_key is None:
            self._remaining -= 1
            if not self._remaining:
                self._after_gap.clear()
        return new


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
        return RecentRecords(starmap(RecordId, self.recent.items()), starmap(RecordId, self.after_gap.items()))

    def add(self, ids: Iterable[RecordId]) -> None:
        """Note that these records are durable, in this order, and all before them.

        They are new, or came after a gap. One that was passed before must not be added: the cursor would move back.
        """
        for one in ids:
            self.cursor = one.cursor
            short, checksum = one.identity
            self.recent[short] = checksum
            self.after_gap.pop(short, None)
            self._added += 1
        while len(self.recent) > RECENT:
            del self.recent[next(iter(self.recent))]
        if self._added > FORGOTTEN_AFTER:
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

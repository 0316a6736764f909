"""Cursors: how a collector knows where a source was whose records have no numbers, but a place of their own. No I/O.

A cursor lies in the headers of its record. So where to go on is known from the channel itself, together with what it
holds: there is no moment at which one is written and the other is not.
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
MARK = "mark"
"""The header beside it, where the record is known by something else."""
RECENT = 100
"""So many of the last records a bookmark remembers: some sources begin with the record that they go on after."""
KNOWN = 1 << 16
"""So many within a life: no more can be on their way when a source is opened again, which then gives them again."""
FORGOTTEN_AFTER = 100_000
"""After so many records, what lay beyond a gap has come again, or never will."""
CHECKSUM = "checksum"
"""The header with that of the whole payload, beside a cursor whose record holds only its beginning."""
LONGEST = 100
"""Characters: of a longer cursor, what is remembered is a digest. The last one is kept as it is, to go on after it."""


class Mark(NamedTuple):
    """A cursor, and the checksum of its payload: who uses a cursor twice for different payloads loses nothing by that.

    `own`: by what the record is known, where it is not the cursor.
    """

    cursor: str
    checksum: int
    own: str | None = None

    @property
    def known_by(self) -> tuple[str, int]:
        return remembered(self.cursor if self.own is None else self.own), self.checksum


def mark_of(cursor: str, value: bytes, own: str | None = None) -> Mark:
    return Mark(cursor, zlib.crc32(value), own)


def cursor_of(headers: Headers) -> str | None:
    return _text(headers, CURSOR)


def _text(headers: Headers, wanted: str) -> str | None:
    for name, value in headers:
        if name == wanted:
            try:
                return value.decode(errors="surrogatepass")
            except UnicodeDecodeError:
                # No source of ours has written it.
                return None
    return None


def mark_in(headers: Headers, value: bytes | None) -> Mark | None:
    """That of a record as it lies in a channel."""
    if (cursor := cursor_of(headers)) is None:
        return None
    own = _text(headers, MARK)
    for name, told in headers:
        if name == CHECKSUM and told.isdigit() and len(told) <= 10:
            return Mark(cursor, int(told), own)
    return mark_of(cursor, value or b"", own)


def remembered(cursor: str) -> str:
    """What stands for a cursor where many are kept."""
    if len(cursor) <= LONGEST:
        return cursor
    return "#" + blake2b(cursor.encode(errors="surrogatepass"), digest_size=16).hexdigest()


class Known:
    """The last marks that came, and those that a former life has left beyond a gap."""

    def __init__(self, marks: Iterable[Mark] = (), beyond: Iterable[Mark] = ()) -> None:
        self._marks = OrderedDict.fromkeys(mark.known_by for mark in marks)
        self._beyond = {mark.known_by for mark in beyond}
        self._left = FORGOTTEN_AFTER

    def came(self, mark: Mark) -> bool:
        """Whether it came in this life already, or before the place where this life began: a trail is behind it."""
        return mark.known_by in self._marks

    def add(self, mark: Mark) -> bool:
        """Whether it is new."""
        known_by = mark.known_by
        if known_by in self._marks:
            return False
        self._marks[known_by] = None
        if len(self._marks) > KNOWN:
            self._marks.popitem(last=False)
        new = known_by not in self._beyond
        # What has a mark of its own may come in another order than before, and so behind any number of others.
        if mark.own is None:
            self._left -= 1
            if not self._left:
                self._beyond.clear()
        return new


@dataclass
class Trail:
    """How far a source is. A crash can leave a record without one that came before it: then it lies beyond a gap."""

    cursor: str | None = None
    """All records up to the one that has it survive a crash."""
    recent: dict[str, int] = field(default_factory=dict)
    """The marks of the last of them."""
    beyond: dict[str, int] = field(default_factory=dict)
    """Marks of records that survive a crash and come after `cursor`."""
    _added: int = 0

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "Trail":
        """From a bookmark; ValueError or TypeError when it cannot be read."""
        cursor = document.get("cursor")
        recent, beyond = (
            {str(text): int(sum_) for text, sum_ in document.get(name, {}).items()} for name in ("recent", "beyond")
        )
        return cls(None if cursor is None else str(cursor), recent, beyond)

    def known(self) -> Known:
        return Known(starmap(Mark, self.recent.items()), starmap(Mark, self.beyond.items()))

    def add(self, marks: Iterable[Mark]) -> None:
        """These are safe now, in this order, and all before them: those that are new, and those that lay beyond a gap.

        One that has been passed already does not belong here: it would put the source back.
        """
        for mark in marks:
            self.cursor = mark.cursor
            short, checksum = mark.known_by
            self.recent[short] = checksum
            self.beyond.pop(short, None)
            self._added += 1
        while len(self.recent) > RECENT:
            del self.recent[next(iter(self.recent))]
        if self._added > FORGOTTEN_AFTER:
            self.beyond.clear()


class Finding:
    """Brings a trail up to what a channel holds, whose partitions are read in any order."""

    def __init__(self, trail: Trail, incarnation: int, last: int) -> None:
        self._trail = trail
        self._since = incarnation
        self._lives = {incarnation: _Life(last + 1)}

    def add(self, epoch: int, seq: int, mark: Mark | None = None) -> None:
        """A number that the collector has given itself, and its mark; none where it was dropped on purpose."""
        if epoch >= self._since:
            self._lives.setdefault(epoch, _Life(1)).add(seq, mark)

    def end(self) -> None:
        """All was read."""
        for _, generation in sorted(self._lives.items()):
            self._trail.add(generation.whole)
            for mark in generation.waiting.values():
                if mark is not None:
                    short, checksum = mark.known_by
                    self._trail.beyond[short] = checksum


@dataclass
class _Life:
    """The numbers that an incarnation has given: they have no gaps but those that its end has left."""

    next: int
    whole: list[Mark] = field(default_factory=list)
    """The last marks before the first gap."""
    waiting: dict[int, Mark | None] = field(default_factory=dict)

    def add(self, seq: int, mark: Mark | None) -> None:
        if seq < self.next:
            return
        self.waiting[seq] = mark
        while self.next in self.waiting:
            if (found := self.waiting.pop(self.next)) is not None:
                self.whole.append(found)
            self.next += 1
        if len(self.whole) > 2 * RECENT:
            del self.whole[:-RECENT]

"""How far a server that gives its records in pages was read, without I/O."""

import logging
import zlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import orjson

from penstock.collect.polling.pages import Page
from penstock.core.contracts import Arrival

log = logging.getLogger(__name__)

TOGETHER = 500
"""So many records go on together."""
FIRST_BYTES = 64 << 10
"""So much is kept of an answer that cannot be read."""
_SEEN = 1_000
"""So many cursors are remembered, to notice one that comes again."""


@dataclass(frozen=True, slots=True)
class Spot:
    """Up to where a page was taken: what the cursor of a record tells.

    `cursor` is the one by which the page was asked for. Of its records all up to `index` were taken, which have this
    `checksum` together; with a `tag`, all of it was. `once` tells apart what has the same place and is another record.
    """

    cursor: str | None = None
    index: int = -1
    checksum: int = 0
    tag: str | None = None
    once: str | None = None

    def text(self) -> str:
        told = (("cursor", self.cursor), ("etag", self.tag), ("once", self.once))
        shown: dict[str, object] = {name: value for name, value in told if value is not None}
        if self.index >= 0:
            shown |= {"index": self.index, "crc": self.checksum}
        return orjson.dumps(shown).decode()

    @classmethod
    def of(cls, text: str | None) -> "Spot":
        """The beginning, when it is not one that was written here."""
        try:
            told = orjson.loads(text or "{}")
        except orjson.JSONDecodeError:
            return cls()
        match told:
            case dict():
                index, checksum = told.get("index", -1), told.get("crc", 0)
                texts = [told.get(name) for name in ("cursor", "etag")]
                if (
                    isinstance(index, int)
                    and isinstance(checksum, int)
                    and all(isinstance(one, str | None) for one in texts)
                ):
                    return cls(texts[0], index, checksum, texts[1])
        return cls()

    def left(self, sums: Sequence[int]) -> int:
        """The index of the first record that was not taken; 0 when the page is not the one that it was."""
        return self.index + 1 if 0 <= self.index < len(sums) and sums[self.index] == self.checksum else 0


@dataclass(frozen=True, slots=True)
class New:
    """What is new in a page. `last` stands for the whole page: it may go on when the others are safe."""

    spot: Spot
    items: Sequence[bytes]
    sums: Sequence[int]
    chosen: Sequence[int]
    end: Spot

    def others(self) -> Iterator[list[Arrival]]:
        """All but the last, some at a time."""
        for start in range(0, len(self.chosen) - 1, TOGETHER):
            some = self.chosen[start : min(start + TOGETHER, len(self.chosen) - 1)]
            yield [Arrival(self.items[at], cursor=self._spot(at).text()) for at in some]

    def last(self) -> list[Arrival]:
        return [Arrival(self.items[at], cursor=self.end.text()) for at in self.chosen[-1:]]

    def _spot(self, at: int) -> Spot:
        return replace(self.spot, index=at, checksum=self.sums[at], tag=None, once=self.end.once)


class Paging:
    """From page to page. `spot` tells what to ask for.

    The last record of a page has a cursor that leads on, the others have one that leads back into their page. Some
    servers give more than before for an old cursor. A record that was on its way then would come again under another
    cursor, and be taken for another one. So the last goes on when the others are safe, and the next page is asked for
    when the last is.
    """

    def __init__(self, name: str, spot: Spot) -> None:
        self.spot = spot
        self._name = name
        self._before: Counter[int] | None = None
        """The checksums of what the answer before held, where it was one for the same cursor."""
        self._refused: int | None = None
        self._seen: deque[str | None] = deque(maxlen=_SEEN)
        self._warned = False

    def new(self, page: Page, tag: str | None, once: str | None) -> New:
        sums = list(accumulate(page.items, lambda checksum, item: zlib.crc32(item, checksum), initial=0))[1:]
        if self._leads_on(page):
            end = Spot(page.next, once=once)
        else:
            end = Spot(self.spot.cursor, len(sums) - 1, sums[-1] if sums else 0, tag, once)
        return New(self.spot, page.items, sums, self._chosen(page.items, sums), end)

    def _chosen(self, items: Sequence[bytes], sums: Sequence[int]) -> Sequence[int]:
        """The indexes of what lies behind what was taken, or was not in the answer before."""
        if self._before is None:
            return range(self.spot.left(sums), len(items))
        before, found = Counter(self._before), []
        for at, item in enumerate(items):
            checksum = zlib.crc32(item)
            if before[checksum] > 0:
                before[checksum] -= 1
            else:
                found.append(at)
        return found

    def turn(self, page: Page, new: New) -> bool:
        """All of a page is safe. Whether it leads on, to where we have not been."""
        self._refused = None
        before, self.spot = self.spot.cursor, new.end
        if new.end.cursor == before:
            self._before = Counter(map(zlib.crc32, page.items))
            return False
        self._before = None
        self._seen.append(before)
        back = new.end.cursor in self._seen or _smaller(new.end.cursor, before)
        if back and not self._warned:
            self._warned = True
            log.warning("%s: its cursor goes back, from %r to %r", self._name, before, new.end.cursor)
        return not back

    def dead(self, body: bytes, reason: str) -> list[Arrival]:
        """A dead letter for an answer that cannot be read; none, if the one before was the same."""
        checksum = zlib.crc32(body)
        if checksum == self._refused:
            return []
        self._refused = checksum
        spot = replace(self.spot, once=f"refused-{checksum:08x}")
        return [Arrival(body[:FIRST_BYTES], cursor=spot.text(), refused=reason)]

    def _leads_on(self, page: Page) -> bool:
        return page.next is not None and page.next != self.spot.cursor


def _smaller(cursor: str | None, before: str | None) -> bool:
    """Whether both are numbers, and the first is smaller."""
    one, other = cursor or "", before or ""
    return one.isascii() and one.isdecimal() and other.isascii() and other.isdecimal() and int(one) < int(other)

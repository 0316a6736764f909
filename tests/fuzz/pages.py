"""Answers in pages: which records they hold, and how far they were read."""

import json
from collections import Counter
from typing import Any

from tests.fuzz.target import Given, part, raw, small, target, tried

from penstock.collect.polling import New, Paging, Spot
from penstock.collect.polling import pages as page_module
from penstock.collect.polling.pages import HEADER, LONGEST_CURSOR, Answer, Page, read
from penstock.core.contracts import Arrival
from penstock.core.errors import Refused

_WORDS = ("data", "items", "next", "a", "\\u0064ata", "\\ud800")
_ITEMS = 6


@target(
    b"\0\0\0" + raw(b' [1, {"a": "]"}, "x\\"", 1.0]'),
    b"\x01\x02\x02" + raw(b'{"data": {"items": [1, 2], "next": "b"}, "next": 7}'),
    b"\x02\0\0" + raw(b"1\n2\r\n\n{}\n"),
    b"\x01\x01\0" + raw(b'{"data": [1, 2], "data": [3]}'),
    b"\x01\x01\x03" + raw(b'\xef\xbb\xbf{"data": [null, [1]]}') + part(b"next"),
)
def pages(data: bytes) -> None:
    """The records of an answer are parts of its bytes, and read as what they are in the whole."""
    given = Given(data)
    kind = given.among(("", "application/json", "application/x-ndjson", "text/plain"))
    items = given.among((None, "data", "data.items"))
    cursor = given.among((None, "next", "data.next", f"{HEADER}x"))
    body = given.json(_WORDS)
    told = given.text() if cursor == f"{HEADER}x" else None
    with small(page_module, MOST_ITEMS=_ITEMS):
        page = tried(lambda: read(Answer(body, kind, told), items, cursor), Refused)
    if isinstance(page, Refused):
        page.reason.encode(errors="replace")
        return
    assert len(page.items) <= _ITEMS
    assert page.next is None or 0 < len(page.next.encode()) <= 4 * LONGEST_CURSOR
    at = 0
    for item in page.items:
        at = body.index(item, at) + len(item)
    if items is None and cursor in (None, f"{HEADER}x"):
        assert page.next == (told or None)
        if page.items == [body] or kind == "application/x-ndjson":
            return
    if not body.removeprefix(b"\xef\xbb\xbf").strip():
        assert page == Page([], None if cursor != f"{HEADER}x" else told or None)
        return
    document = _loaded(body)
    listed = document if items is None else _found(document, items)
    assert [_loaded(item) for item in page.items] == (listed if isinstance(listed, list) else [document])
    if cursor in ("next", "data.next"):
        assert page.next == (_found(document, cursor) or None)


def _loaded(text: bytes) -> Any:
    """Numbers are compared as they are written."""
    text = text.removeprefix(b"\xef\xbb\xbf")
    return json.loads(text.decode(errors="surrogateescape"), parse_int=str, parse_float=str, parse_constant=str)


def _found(document: object, path: str) -> object:
    for step in path.split("."):
        document = document.get(step) if isinstance(document, dict) else None
    return document


@target(
    b"\x01\x03\x00\x01\x02\x02\x02\x00\x00\x00\x01\x02\x03\x01\x05\x00\x01\x02\x03\x04\x00\x00",
    b"\x00\x02\x00\x00\x01\x00\x00\x00\x03\x00\x00\x00\x00",
    b"\x00\x02\x00\x01\x00\x03\x00\x01\x02\x00\x03\x01\x01\x00\x00",
)
def paging(data: bytes) -> None:
    """Who goes on behind a record gets all that was new behind it, and of an ordered page nothing else."""
    given = Given(data)
    cursors = given.byte() % 2
    going = Paging("feed", Spot())
    spots, before = set[str](), Counter[bytes]()
    for turn in range(10):
        items = [b"%d" % (given.byte() % 6) for _ in range(given.byte() % 8)]
        page = Page(items, given.among((None, "1", "2", "3", "x")) if cursors else None)
        ordered = going._before is None
        new = going.new(page, given.among((None, '"tag"')), None if cursors else str(turn))
        arrivals = [one for some in (*new.others(), new.last()) for one in some]
        assert [one.value for one in arrivals] == [items[at] for at in new.chosen]
        assert list(new.chosen) == sorted(set(new.chosen))
        if not ordered:
            assert Counter(one.value for one in arrivals) == Counter(items) - before
        before = Counter(items)
        told = {one.cursor for one in arrivals if one.cursor is not None}
        assert len(told) == len(arrivals)
        if not cursors:
            # What comes again is another record.
            assert not told & spots
            spots |= told
        for number, arrival in enumerate(arrivals):
            _goes_on(arrival, page, new, new.chosen[number + 1 :], ordered)
        going.turn(page, new)
        if not given.left:
            return


def _goes_on(arrival: Arrival, page: Page, new: New, left: "Any", ordered: bool) -> None:
    spot = Spot.of(arrival.cursor)
    assert spot.cursor in (new.spot.cursor, page.next)
    if spot.index < 0:
        assert not left
        assert spot.cursor == page.next
        return
    again = Paging("feed", spot).new(page, None, None)
    assert set(again.chosen) >= set(left)
    assert not ordered or list(again.chosen) == list(left)

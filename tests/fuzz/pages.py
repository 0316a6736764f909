"""Pages of a polled API: their records, and the position after each."""

import json
from collections import Counter
from typing import Any

from tests.fuzz.target import Input, limits, part, raw, result_or_error, target

from penstock.collect import polling
from penstock.collect.polling import HEADER, MAX_CURSOR, Answer, New, Page, Paging, Spot, read
from penstock.core.contracts import Arrival
from penstock.core.errors import Refused

_NAMES = ("data", "items", "next", "a", "\\u0064ata", "\\ud800")
_ITEMS = 6


@target(
    b"\0\0\0" + raw(b' [1, {"a": "]"}, "x\\"", 1.0]'),
    b"\x01\x02\x02" + raw(b'{"data": {"items": [1, 2], "next": "b"}, "next": 7}'),
    b"\x02\0\0" + raw(b"1\n2\r\n\n{}\n"),
    b"\x01\x01\0" + raw(b'{"data": [1, 2], "data": [3]}'),
    b"\x01\x01\x03" + raw(b'\xef\xbb\xbf{"data": [null, [1]]}') + part(b"next"),
)
def pages(data: bytes) -> None:
    """The records of a page are parts of its bytes, with the same values as in the whole."""
    inputs = Input(data)
    kind = inputs.choose(("", "application/json", "application/x-ndjson", "text/plain"))
    items = inputs.choose((None, "data", "data.items"))
    cursor = inputs.choose((None, "next", "data.next", f"{HEADER}x"))
    body = inputs.json(_NAMES)
    header = inputs.text() if cursor == f"{HEADER}x" else None
    with limits(polling, MAX_ITEMS=_ITEMS):
        page = result_or_error(lambda: read(Answer(body, kind, header), items, cursor), Refused)
    if isinstance(page, Refused):
        page.reason.encode(errors="replace")
        return
    assert len(page.items) <= _ITEMS
    assert page.next is None or 0 < len(page.next.encode()) <= 4 * MAX_CURSOR
    at = 0
    for item in page.items:
        at = body.index(item, at) + len(item)
    if items is None and cursor in (None, f"{HEADER}x"):
        assert page.next == (header or None)
        if page.items == [body] or kind == "application/x-ndjson":
            return
    if not body.removeprefix(b"\xef\xbb\xbf").strip():
        assert page == Page([], None if cursor != f"{HEADER}x" else header or None)
        return
    document = _loaded(body)
    listed = document if items is None else _found(document, items)
    assert [_loaded(item) for item in page.items] == (listed if isinstance(listed, list) else [document])
    if cursor in ("next", "data.next"):
        assert page.next == (_found(document, cursor) or None)


def _loaded(text: bytes) -> Any:
    """JSON whose numbers stay text."""
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
    """Resuming after a record gives all new records after it, and only those if the page is ordered."""
    inputs = Input(data)
    cursors = inputs.byte() % 2
    going = Paging("feed", Spot())
    spots, before = set[str](), Counter[bytes]()
    for turn in range(10):
        items = [b"%d" % (inputs.byte() % 6) for _ in range(inputs.byte() % 8)]
        page = Page(items, inputs.choose((None, "1", "2", "3", "x")) if cursors else None)
        ordered = going._before is None
        new = going.new(page, inputs.choose((None, '"tag"')), None if cursors else str(turn))
        arrivals = [one for sized in (*new.all_but_last(), new.last()) for one in sized]
        assert [one.value for one in arrivals] == [items[at] for at in new.selected]
        assert list(new.selected) == sorted(set(new.selected))
        if not ordered:
            assert Counter(one.value for one in arrivals) == Counter(items) - before
        before = Counter(items)
        cursors_of_page = {one.cursor for one in arrivals if one.cursor is not None}
        assert len(cursors_of_page) == len(arrivals)
        if not cursors:
            # A repeated value is another record.
            assert not cursors_of_page & spots
            spots |= cursors_of_page
        for number, arrival in enumerate(arrivals):
            _check_resume(arrival, page, new, new.selected[number + 1 :], ordered)
        going.finish_page(page, new)
        if not inputs.left:
            return


def _check_resume(arrival: Arrival, page: Page, new: New, left: "Any", ordered: bool) -> None:
    spot = Spot.of(arrival.cursor)
    assert spot.cursor in (new.spot.cursor, page.next)
    if spot.index < 0:
        assert not left
        assert spot.cursor == page.next
        return
    again = Paging("feed", spot).new(page, None, None)
    assert set(again.selected) >= set(left)
    assert not ordered or list(again.selected) == list(left)

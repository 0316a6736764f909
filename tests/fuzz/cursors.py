"""Resume state of a collector with any content: cursors, bookmarks and origins."""

import re

import httpx
from tests.fuzz.target import Input, raw, result_or_error, target

from penstock.collect.bookmarks import Bookmark, CursorState
from penstock.collect.dedup import CHECKSUM, CURSOR, RecordId, cursor_of, id_in_channel, shortened
from penstock.collect.file_progress import File, FileStat, Progress, tail
from penstock.collect.polling import Spot
from penstock.collect.sse import last_id
from penstock.collect.websocket import MessageParser, position_of, with_parameter
from penstock.core.contracts import Arrival
from penstock.core.errors import Misconfigured, Refused
from penstock.core.record import Origin

_VALUE = re.compile(rb"[\x21-\xff]([\x20-\xff]*[\x21-\xff])?")


@target(
    b"41#0",
    b"%00#1",
    b"1725911162329308/0",
    b'{"cursor":"a","index":3,"crc":7,"etag":"\\"x\\""}',
    b'{"done":[1,"a"],"life":0,"files":[["a",1,0,null,"",7]]}',
    b"\xed\xa0\x80#0",
    b"\xff",
    b"9" * 20,
)
def cursors(data: bytes) -> None:
    """With any cursor in the header of a record, each source resumes, or rejects the cursor."""
    headers = [("other", b"\xff"), (CURSOR, data), (CHECKSUM, data)]
    cursor = cursor_of(headers)
    assert (id_in_channel(headers, b"a") or (None,))[0] == cursor
    after = last_id(cursor)
    assert after is None or _VALUE.fullmatch(after)
    spot = Spot.of(cursor)
    assert Spot.of(spot.text()).text() == spot.text()
    assert 0 <= spot.left([0, 7]) <= 2
    if spot.cursor is not None:
        httpx.URL("http://127.0.0.1/a").copy_merge_params({"cursor": spot.cursor})
    with_parameter("ws://127.0.0.1", "cursor", position_of(cursor)).encode("ascii")
    (arrival,) = MessageParser(None, "time", cursor, (), ())(b"{}")
    assert isinstance(arrival, Arrival)
    assert arrival.cursor is not None
    assert position_of(arrival.cursor) == position_of(cursor)
    _progress(cursor)
    cursors = CursorState()
    if cursor is not None:
        cursors.add([RecordId(cursor, 1)])
        again = Bookmark.of(Bookmark(cursors=cursors).record("rsvps").value or b"").cursors
        assert (again.cursor, again.recent) == (_joined(cursor), {_joined(shortened(cursor)): 1})


def _joined(text: str) -> str:
    """Two adjacent surrogates become one character; valid text has none."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def _progress(cursor: str | None) -> Progress | None:
    found = result_or_error(lambda: Progress("files", cursor, 1.0), Misconfigured)
    return None if isinstance(found, Misconfigured) else found


@target(
    b"\x05\x07" + raw(b'{"done":[1,"a"],"life":0,"files":[["a",1,0,null,"",7],["b",2,1,5,"skip",9]]}'),
    b"\x05\x07" + raw(b'{"done":null,"life":3,"files":[]}'),
    b"\x03\x01\x08\x03\0\x01\0\x01\x02\0\x02\x07\x01\x07\x06\x04\x04\x02\x01\x02\0\x02\x01\x06\x01x\x02\x03",
)
def progress(data: bytes) -> None:
    """The next cursor repeats the state of all files but the one that was read."""
    inputs = Input(data)
    check, location = inputs.byte(), inputs.byte()
    found = _progress(inputs.json(("done", "life", "files", "a", "skip", "bad")).decode(errors="replace"))
    if found is None:
        return
    for inode, file in found.files.items():
        assert file.offset >= 0
        assert "/" not in file.name
        assert "\0" not in file.name
        assert file.info.inode == inode
    now = 1e9
    list_files = [FileStat(file.name, inode, 1, 1, file.offset + 1) for inode, file in found.files.items()]
    list_files.append(FileStat("new", 12345, 2, 2, 5))
    news = found.update(list_files, now, lambda info, file: True)
    for file in news[:5]:
        expected = {
            inode: _state(one) for inode, one in found.files.items() if (one.offset or one.flag) and not one.forgotten
        }
        cursor = found.begin(file, now) + tail(check, "", location)
        again = Progress("files", cursor, 1.0)
        expected[file.info.inode] = file.name, file.generation, location, check, ""
        listed = {inode: _state(one) for inode, one in again.files.items()}
        # Files that were not read yet may be listed, too.
        assert expected.items() <= listed.items()
        assert all(listed[inode][2] == 0 and not listed[inode][4] for inode in listed.keys() - expected.keys())
        found.end(file)


def _state(file: File) -> tuple[object, ...]:
    return file.name, file.generation, file.offset, file.check, file.flag


@target(
    raw(b'{"runs": {"a": {"1": [[1, 5], [7, 7]]}}, "positions": {"a": {"0": 5}}, "incarnation": 3, "heard": null}'),
    raw(b'{"runs":{},"positions":{},"incarnation":3,"heard":7,"last":5,"duplicates":2,"cursor":"a","recent":{"a":1}}'),
    b"\x08\x04\0\x08\x01\x05\x08\x01\x06\x07\x02\x07\x02\x02\x01\x02\x01\x01\x08\0\x02\x02\x01\x03\x01\0",
)
def bookmarks(data: bytes) -> None:
    """A bookmark is read completely, or refused."""
    names = (
        "runs",
        "positions",
        "incarnation",
        "heard",
        "duplicates",
        "last",
        "cursor",
        "recent",
        "beyond",
        "a",
        "1",
    )
    found = result_or_error(lambda: Bookmark.of(Input(data).json(names, 6)), Refused)
    if isinstance(found, Refused):
        return
    again = Bookmark.of(found.record("rsvps").value or b"")
    assert _runs(again) == _runs(found)
    assert (again.offsets, again.generation, again.last_received) == (
        found.offsets,
        found.generation,
        found.last_received,
    )
    assert (again.duplicates, again.last, again.cursors) == (found.duplicates, found.last, found.cursors)
    for sender, (epoch, seq) in found.numbers.contiguous().items():
        assert Origin.of(Origin(sender, epoch, seq, 0).headers()) is not None
    assert Origin.of(Origin("rsvps", found.generation, 1, found.last_received or 0).headers()) is not None


def _runs(bookmark: Bookmark) -> list[tuple[str, int, list[tuple[int, int]]]]:
    return [(sender, epoch, list(iter(runs))) for sender, epoch, runs in bookmark.numbers]


@target(
    b"\x04\x00\x01\x01a\x01\x01\x0205\x02\x01\x02+7\x03\x01\x010",
    b"\x04\x00\x01\x01a\x01\x01\x015\x02\x01\x0217\x03\x01\x010",
    b"\x01\x00\x01\x00",
    b"\x02\x00\x00\x00\x02\x01b",
)
def origins(data: bytes) -> None:
    """Headers give an origin that gives the same headers, or none, or Refused."""
    inputs = Input(data)
    names = ("sender", "epoch", "seq", "time", "cursor")
    headers = list[tuple[str, bytes | str | None]]()
    for _ in range(inputs.byte() % 8):
        name, kind, value = inputs.choose(names), inputs.byte() % 3, inputs.sized()
        headers.append((name, None if kind == 0 else value if kind == 1 else value.decode(errors="replace")))
    found = result_or_error(lambda: Origin.of(headers), Refused)
    assert Origin.read(headers) == (None if isinstance(found, Refused) else found)
    if isinstance(found, Refused):
        return
    if found is None:
        assert not {name for name, _ in headers} - {"cursor"}
        return
    assert Origin.of(found.headers()) == found
    assert dict(found.headers()) == {name: _bytes(value) for name, value in headers if name != "cursor"}


def _bytes(value: bytes | str | None) -> bytes:
    return value.encode() if isinstance(value, str) else value or b""

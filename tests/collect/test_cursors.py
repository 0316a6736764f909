import random

import orjson
import pytest

from penstock.collect.bookmarks import FORGOTTEN_AFTER, RECENT, Bookmark, CursorRecovery, CursorState
from penstock.collect.dedup import (
    DEAD_BYTES,
    MAX_RECENT,
    Dedup,
    RecentRecords,
    RecordId,
    cursor_of,
    id_in_channel,
    record_id,
    shortened,
)
from penstock.collect.numbers import Numbering, Numbers
from penstock.core.contracts import Arrival, Intake
from penstock.core.record import Origin


def own(epoch: int, seq: int) -> Origin:
    return Origin("source", epoch, seq, 0)


def found(cursors: CursorState, generation: int, last: int, *held: tuple[int, int]) -> CursorState:
    """A trail after a channel was read that holds these (epoch, number); each has its number as cursor and value."""
    finding = CursorRecovery(cursors, generation, last)
    for epoch, seq in held:
        finding.add(epoch, seq, record_id(f"{epoch}.{seq}", b"%d" % seq))
    finding.finish()
    return cursors


def test_the_place_is_that_of_the_last_record_before_the_first_gap() -> None:
    cursors = found(CursorState(), 0, 0, (5, 3), (5, 1), (5, 2), (5, 5))
    assert cursors.cursor == "5.3"
    assert list(cursors.after_gap) == ["5.5"]


def test_a_gap_at_the_beginning_of_a_life_leaves_the_place_where_it_was() -> None:
    cursors = found(CursorState("before"), 4, 10, (5, 2), (5, 3))
    assert cursors.cursor == "before"
    assert list(cursors.after_gap) == ["5.2", "5.3"]


def test_a_bookmark_of_the_same_life_is_gone_on_from() -> None:
    assert found(CursorState("5.10"), 5, 10, (5, 9), (5, 12), (5, 11)).cursor == "5.12"


def test_the_last_life_that_left_a_whole_beginning_tells() -> None:
    cursors = found(CursorState(), 0, 0, (5, 1), (5, 3), (6, 1), (6, 2))
    assert cursors.cursor == "6.2"
    assert list(cursors.after_gap) == ["5.3"]


def test_what_lay_beyond_a_gap_and_comes_again_lies_there_no_longer() -> None:
    cursors = found(CursorState(), 0, 0, (5, 1), (5, 3), (5, 4))
    recent_records = cursors.recent_records()
    assert recent_records.add(RecordId("5.2", 0))
    assert not recent_records.add(record_id("5.3", b"3"))
    cursors.add([RecordId("5.2", 0), record_id("5.3", b"3")])
    assert (cursors.cursor, list(cursors.after_gap)) == ("5.3", ["5.4"])


def test_the_same_cursor_with_another_payload_is_another_record() -> None:
    recent_records = RecentRecords([record_id("1", b"a").identity])
    assert not recent_records.add(record_id("1", b"a"))
    assert recent_records.add(record_id("1", b"b"))


def test_what_has_a_mark_of_its_own_is_known_by_it_whatever_its_cursor_is() -> None:
    """It is told in the headers. Where to go on is told by the cursor with which it came last."""
    for headers in ((), (("checksum", b"2363233923"),)):
        mark = id_in_channel([("cursor", b"a:3 b:1"), ("mark", b"b:1"), *headers], b"z")
        assert mark == RecordId("a:3 b:1", 2363233923 if headers else record_id("", b"z").checksum, "b:1")
    finding = CursorRecovery(cursors := CursorState(), 0, 0)
    finding.add(5, 1, record_id("a:1", b"x", "a:1"))
    finding.add(5, 3, record_id("a:2 b:1", b"z", "b:1"))
    finding.finish()
    cursors = Bookmark.of(Bookmark(cursors=cursors).record("source").value or b"").cursors
    assert cursors.cursor == "a:1"
    recent_records = cursors.recent_records()
    assert recent_records.add(record_id("a:2", b"y", "a:2"))
    assert recent_records.add(record_id("a:3", b"z", "a:3"))
    again = record_id("a:3 b:1", b"z", "b:1")
    assert not recent_records.add(again)
    cursors.add([again])
    assert (cursors.cursor, cursors.after_gap) == ("a:3 b:1", {})


@pytest.mark.parametrize("own", [True, False])
def test_what_has_a_mark_of_its_own_may_come_again_behind_any_number_of_others(own: bool) -> None:
    """Those that are known by their cursors come in their order, and so before long or never."""
    cursors = CursorState(after_gap=dict([record_id("late", b"").identity]))
    recent_records = cursors.recent_records()
    for n in range(FORGOTTEN_AFTER):
        recent_records.add(one := RecordId(str(n), 0, str(n) if own else None))
        cursors.add([one])
    assert recent_records.add(record_id("late", b"", "late" if own else None)) is not own


def test_its_memory_is_bounded() -> None:
    recent_records = RecentRecords()
    assert all(recent_records.add(RecordId(str(n), 0)) for n in range(MAX_RECENT + 10))
    assert recent_records.add(RecordId("0", 0))
    cursors = CursorState()
    cursors.add(RecordId(str(n), 0) for n in range(1_000))
    assert len(cursors.recent) == RECENT


def test_what_came_in_this_life_was_passed_and_what_lies_beyond_a_gap_was_not() -> None:
    recent_records = CursorState("b", {"a": 1, "b": 2}, {"d": 4}).recent_records()
    b, c, d = RecordId("b", 2), RecordId("c", 3), RecordId("d", 4)
    assert (recent_records.received(b), recent_records.received(d), recent_records.received(c)) == (True, False, False)
    assert (recent_records.add(c), recent_records.add(d)) == (True, False)
    assert (recent_records.received(c), recent_records.received(d)) == (True, True)


def test_however_long_cursors_are_a_bookmark_is_small_and_knows_them() -> None:
    marks = [RecordId(f"{n}" * 8_000, n) for n in range(10)]
    cursors = CursorState()
    cursors.add(marks)
    cursors.after_gap = {shortened("x" * 8_000): 5}
    bookmark = Bookmark(cursors=cursors).record("source").value or b""
    assert len(bookmark) < 10_000
    again = Bookmark.of(bookmark).cursors
    assert again.cursor == "9" * 8_000
    assert all(again.recent_records().received(mark) for mark in marks)
    assert not again.recent_records().add(RecordId("x" * 8_000, 5))
    assert again.recent_records().add(RecordId("y" * 8_000, 5))


def test_a_dead_letter_is_known_though_it_holds_only_the_beginning() -> None:
    value = b"x" * (DEAD_BYTES + 1)
    process = Dedup("rsvps", Numbering("source", 9), Numbers(), None, 1_000)

    async def nobody(error: Exception | None) -> None:
        pass

    (dead,) = process.process(Intake([Arrival(value, cursor="c")], nobody), 0).dead
    assert id_in_channel(dead.headers(), dead.value) == record_id("c", value)


@pytest.mark.parametrize("cursor", ["", "a", "line\nfeed", "東京", "\ud800"])
def test_whatever_a_cursor_is_the_header_gives_it_back(cursor: str) -> None:
    assert cursor_of([("cursor", cursor.encode(errors="surrogatepass"))]) == cursor


def test_a_bookmark_keeps_it() -> None:
    bookmark = Bookmark(last=7, cursors=CursorState("c", {"b": 1, "c": 2}, {"e": 3}))
    again = Bookmark.of(bookmark.record("source").value or b"")
    assert (again.last, again.cursors) == (7, CursorState("c", {"b": 1, "c": 2}, {"e": 3}))


def test_a_bookmark_of_before_there_were_cursors_can_be_read() -> None:
    document = orjson.loads(Bookmark().record("source").value or b"")
    for name in ("last", "cursor", "recent", "beyond"):
        del document[name]
    assert Bookmark.of(orjson.dumps(document)).cursors == CursorState()


def test_lives_that_are_cut_anywhere_lose_and_double_nothing() -> None:
    """A source of 300 records; lives that leave any part of what was on its way, with bookmarks at any time."""
    for seed in range(200):
        draw = random.Random(seed)
        channel: list[tuple[Origin, int]] = []
        written = Bookmark().record("source").value or b""
        start = 0
        while start < 300:
            bookmark = recovered(channel, written, draw)
            recent_records, start, given = bookmark.cursors.recent_records(), int(bookmark.cursors.cursor or 0), 0
            upto = min(300, start + draw.randint(1, 40))
            settled = draw.randint(start, upto)
            for n in range(start + 1, upto + 1):
                if recent_records.add(record_id(str(n), b"%d" % n)):
                    given += 1
                    if n <= settled or draw.random() < 0.5:
                        channel.append((own(bookmark.generation, given), n))
                if n <= settled:
                    bookmark.last = given
                    bookmark.cursors.add([record_id(str(n), b"%d" % n)])
                    if draw.random() < 0.1:
                        written = bookmark.record("source").value or b""
        assert sorted(n for _, n in channel) == list(range(1, 301)), f"seed {seed}"


def recovered(channel: list[tuple[Origin, int]], written: bytes, draw: random.Random) -> Bookmark:
    bookmark = Bookmark.of(written)
    finding = CursorRecovery(bookmark.cursors, bookmark.generation, bookmark.last)
    for origin, n in draw.sample(channel, len(channel)):
        bookmark.add("source", origin)
        finding.add(origin.epoch, origin.seq, record_id(str(n), b"%d" % n))
    finding.finish()
    bookmark.generation, bookmark.last = bookmark.generation + 1, 0
    return bookmark

import random

import orjson
import pytest

from penstock.collect.bookmarks import Bookmark
from penstock.collect.cursors import (
    FORGOTTEN_AFTER,
    KNOWN,
    RECENT,
    Finding,
    Known,
    Mark,
    Trail,
    cursor_of,
    mark_in,
    mark_of,
    remembered,
)
from penstock.collect.numbering import Numbering
from penstock.collect.numbers import Numbers
from penstock.collect.sorting import DEAD_BYTES, Sorting
from penstock.core.contracts import Arrival, Intake
from penstock.core.record import Origin


def own(epoch: int, seq: int) -> Origin:
    return Origin("source", epoch, seq, 0)


def found(trail: Trail, incarnation: int, last: int, *held: tuple[int, int]) -> Trail:
    """A trail after a channel was read that holds these (epoch, number); each has its number as cursor and value."""
    finding = Finding(trail, incarnation, last)
    for epoch, seq in held:
        finding.add(epoch, seq, mark_of(f"{epoch}.{seq}", b"%d" % seq))
    finding.end()
    return trail


def test_the_place_is_that_of_the_last_record_before_the_first_gap() -> None:
    trail = found(Trail(), 0, 0, (5, 3), (5, 1), (5, 2), (5, 5))
    assert trail.cursor == "5.3"
    assert list(trail.beyond) == ["5.5"]


def test_a_gap_at_the_beginning_of_a_life_leaves_the_place_where_it_was() -> None:
    trail = found(Trail("before"), 4, 10, (5, 2), (5, 3))
    assert trail.cursor == "before"
    assert list(trail.beyond) == ["5.2", "5.3"]


def test_a_bookmark_of_the_same_life_is_gone_on_from() -> None:
    assert found(Trail("5.10"), 5, 10, (5, 9), (5, 12), (5, 11)).cursor == "5.12"


def test_the_last_life_that_left_a_whole_beginning_tells() -> None:
    trail = found(Trail(), 0, 0, (5, 1), (5, 3), (6, 1), (6, 2))
    assert trail.cursor == "6.2"
    assert list(trail.beyond) == ["5.3"]


def test_what_lay_beyond_a_gap_and_comes_again_lies_there_no_longer() -> None:
    trail = found(Trail(), 0, 0, (5, 1), (5, 3), (5, 4))
    known = trail.known()
    assert known.add(Mark("5.2", 0))
    assert not known.add(mark_of("5.3", b"3"))
    trail.add([Mark("5.2", 0), mark_of("5.3", b"3")])
    assert (trail.cursor, list(trail.beyond)) == ("5.3", ["5.4"])


def test_the_same_cursor_with_another_payload_is_another_record() -> None:
    known = Known([mark_of("1", b"a")])
    assert not known.add(mark_of("1", b"a"))
    assert known.add(mark_of("1", b"b"))


def test_what_has_a_mark_of_its_own_is_known_by_it_whatever_its_cursor_is() -> None:
    """It is told in the headers. Where to go on is told by the cursor with which it came last."""
    for headers in ((), (("checksum", b"2363233923"),)):
        mark = mark_in([("cursor", b"a:3 b:1"), ("mark", b"b:1"), *headers], b"z")
        assert mark == Mark("a:3 b:1", 2363233923 if headers else mark_of("", b"z").checksum, "b:1")
    finding = Finding(trail := Trail(), 0, 0)
    finding.add(5, 1, mark_of("a:1", b"x", "a:1"))
    finding.add(5, 3, mark_of("a:2 b:1", b"z", "b:1"))
    finding.end()
    trail = Bookmark.of(Bookmark(trail=trail).record("source").value or b"").trail
    assert trail.cursor == "a:1"
    known = trail.known()
    assert known.add(mark_of("a:2", b"y", "a:2"))
    assert known.add(mark_of("a:3", b"z", "a:3"))
    again = mark_of("a:3 b:1", b"z", "b:1")
    assert not known.add(again)
    trail.add([again])
    assert (trail.cursor, trail.beyond) == ("a:3 b:1", {})


@pytest.mark.parametrize("own", [True, False])
def test_what_has_a_mark_of_its_own_may_come_again_behind_any_number_of_others(own: bool) -> None:
    """Those that are known by their cursors come in their order, and so before long or never."""
    known = Known(beyond=[mark_of("late", b"")])
    for n in range(FORGOTTEN_AFTER):
        known.add(Mark(str(n), 0, str(n) if own else None))
    assert known.add(mark_of("late", b"", "late" if own else None)) is not own


def test_its_memory_is_bounded() -> None:
    known = Known()
    assert all(known.add(Mark(str(n), 0)) for n in range(KNOWN + 10))
    assert known.add(Mark("0", 0))
    trail = Trail()
    trail.add(Mark(str(n), 0) for n in range(1_000))
    assert len(trail.recent) == RECENT


def test_what_came_in_this_life_was_passed_and_what_lies_beyond_a_gap_was_not() -> None:
    known = Trail("b", {"a": 1, "b": 2}, {"d": 4}).known()
    b, c, d = Mark("b", 2), Mark("c", 3), Mark("d", 4)
    assert (known.came(b), known.came(d), known.came(c)) == (True, False, False)
    assert (known.add(c), known.add(d)) == (True, False)
    assert (known.came(c), known.came(d)) == (True, True)


def test_however_long_cursors_are_a_bookmark_is_small_and_knows_them() -> None:
    marks = [Mark(f"{n}" * 8_000, n) for n in range(10)]
    trail = Trail()
    trail.add(marks)
    trail.beyond = {remembered("x" * 8_000): 5}
    bookmark = Bookmark(trail=trail).record("source").value or b""
    assert len(bookmark) < 10_000
    again = Bookmark.of(bookmark).trail
    assert again.cursor == "9" * 8_000
    assert all(again.known().came(mark) for mark in marks)
    assert not again.known().add(Mark("x" * 8_000, 5))
    assert again.known().add(Mark("y" * 8_000, 5))


def test_a_dead_letter_is_known_though_it_holds_only_the_beginning() -> None:
    value = b"x" * (DEAD_BYTES + 1)
    sort = Sorting("rsvps", Numbering("source", 9), Numbers(), None, 1_000)

    async def nobody(error: Exception | None) -> None:
        pass

    (dead,) = sort.sort(Intake([Arrival(value, cursor="c")], nobody), 0).dead
    assert mark_in(dead.headers(), dead.value) == mark_of("c", value)


@pytest.mark.parametrize("cursor", ["", "a", "line\nfeed", "東京", "\ud800"])
def test_whatever_a_cursor_is_the_header_gives_it_back(cursor: str) -> None:
    assert cursor_of([("cursor", cursor.encode(errors="surrogatepass"))]) == cursor


def test_a_bookmark_keeps_it() -> None:
    bookmark = Bookmark(last=7, trail=Trail("c", {"b": 1, "c": 2}, {"e": 3}))
    again = Bookmark.of(bookmark.record("source").value or b"")
    assert (again.last, again.trail) == (7, Trail("c", {"b": 1, "c": 2}, {"e": 3}))


def test_a_bookmark_of_before_there_were_cursors_can_be_read() -> None:
    document = orjson.loads(Bookmark().record("source").value or b"")
    for name in ("last", "cursor", "recent", "beyond"):
        del document[name]
    assert Bookmark.of(orjson.dumps(document)).trail == Trail()


def test_lives_that_are_cut_anywhere_lose_and_double_nothing() -> None:
    """A source of 300 records; lives that leave any part of what was on its way, with bookmarks at any time."""
    for seed in range(200):
        draw = random.Random(seed)
        channel: list[tuple[Origin, int]] = []
        written = Bookmark().record("source").value or b""
        start = 0
        while start < 300:
            bookmark = recovered(channel, written, draw)
            known, start, given = bookmark.trail.known(), int(bookmark.trail.cursor or 0), 0
            upto = min(300, start + draw.randint(1, 40))
            settled = draw.randint(start, upto)
            for n in range(start + 1, upto + 1):
                if known.add(mark_of(str(n), b"%d" % n)):
                    given += 1
                    if n <= settled or draw.random() < 0.5:
                        channel.append((own(bookmark.incarnation, given), n))
                if n <= settled:
                    bookmark.last = given
                    bookmark.trail.add([mark_of(str(n), b"%d" % n)])
                    if draw.random() < 0.1:
                        written = bookmark.record("source").value or b""
        assert sorted(n for _, n in channel) == list(range(1, 301)), f"seed {seed}"


def recovered(channel: list[tuple[Origin, int]], written: bytes, draw: random.Random) -> Bookmark:
    bookmark = Bookmark.of(written)
    finding = Finding(bookmark.trail, bookmark.incarnation, bookmark.last)
    for origin, n in draw.sample(channel, len(channel)):
        bookmark.add("source", origin)
        finding.add(origin.epoch, origin.seq, mark_of(str(n), b"%d" % n))
    finding.end()
    bookmark.incarnation, bookmark.last = bookmark.incarnation + 1, 0
    return bookmark

"""Classes that keep state, tested as a user tests them: without Spark."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from penstock import Keyed, ListState, MapState, ValueState
from penstock.core.errors import Misconfigured
from penstock.testing.keyed import keyed


class Session(Keyed):
    """What a visitor did, told when nothing was heard for a minute."""

    pages = ListState("path STRING, at TIMESTAMP")
    counts = MapState("STRING", "INT")
    cookie = ValueState("STRING", ttl="10 minutes")
    schema = "visitor STRING, pages ARRAY<STRING>, known BOOLEAN"

    def process(self, key: str, row: Any) -> None:
        if row.path == "/broken":
            raise LookupError("a page that nobody has")
        self.pages.append(path=row.path, at=row.event_time)
        self.counts[row.path] = self.counts.get(row.path, 0) + 1
        self.delete_timer()
        self.set_timer(self.now + timedelta(minutes=1))

    def on_timer(self, key: str, at: datetime) -> Iterator[dict[str, Any]]:
        yield {"pages": [page.path for page in self.pages], "known": bool(self.cookie)}
        self.cookie.set("seen")
        self.pages.clear()


class Odd(Keyed):
    schema = "a INT, b INT"

    def process(self, key: Any, row: Any) -> Any:
        return row.given


def test_rows_come_when_a_timer_is_due() -> None:
    session = keyed(Session, key="visitor")
    assert session.feed("ann", {"path": "/"}, {"path": "/buy"}) == []
    assert session.move("59 seconds") == []
    assert session.feed("ann", {"path": "/thanks"}) == []
    assert session.move(1) == []
    assert session.move(59) == [{"visitor": "ann", "pages": ["/", "/buy", "/thanks"], "known": False}]
    assert session.move("1 hour") == []


def test_each_key_has_a_state_of_its_own() -> None:
    session = keyed(Session, key="visitor")
    session.feed("ann", {"path": "/a"})
    session.feed("bob", {"path": "/b"})
    assert [row["pages"] for row in session.move(60)] == [["/a"], ["/b"]]


def test_a_value_is_gone_when_its_time_to_live_is_over() -> None:
    session = keyed(Session)
    for seconds, known in ((60, False), (599, True), (601, False)):
        session.feed("ann", {"path": "/"})
        assert session.move(seconds)[0]["known"] is known


def test_what_a_class_raises_is_raised_as_it_is() -> None:
    with pytest.raises(LookupError, match="nobody has"):
        keyed(Session).feed("ann", {"path": "/broken"})


def test_a_row_may_be_a_mapping_a_tuple_or_several_or_none() -> None:
    odd = keyed(Odd, key="a")
    assert odd.feed(1, {"given": None}) == []
    assert odd.feed(1, {"given": {"b": 2}}) == [{"a": 1, "b": 2}]
    assert odd.feed(1, {"given": (3, 4)}) == [{"a": 3, "b": 4}]
    assert odd.feed(1, {"given": [{"a": 5}, (6, 7)]}) == [{"a": 5, "b": None}, {"a": 6, "b": 7}]


def test_a_row_of_other_columns_is_refused_with_those_it_may_have() -> None:
    odd = keyed(Odd)
    with pytest.raises(ValueError, match=r'Odd\.schema has no column "c"; it has a, b'):
        odd.feed(1, {"given": {"c": 2}})
    with pytest.raises(ValueError, match=r"Odd\.schema takes 2 columns \(a, b\), not \(1, 2, 3\)"):
        odd.feed(1, {"given": (1, 2, 3)})


def test_a_text_is_no_row() -> None:
    with pytest.raises(TypeError, match=r"'approved' is not a row: return a mapping, or a tuple of all columns"):
        keyed(Odd).feed(1, {"given": "approved"})


def test_the_columns_of_a_key_are_filled_in_whatever_their_case() -> None:
    class Cards(Keyed):
        schema = "Card STRING, at TIMESTAMP, n INT"

        def process(self, key: Any, row: Any) -> Any:
            return {"n": len(key)}

    at = datetime(2026, 1, 1, tzinfo=UTC)
    local = at.astimezone(timezone(timedelta(hours=5)))
    (row,) = keyed(Cards, key=("card", "AT")).feed(("a", local), {})
    assert row == {"Card": "a", "at": at, "n": 2}
    assert row["at"].tzinfo is UTC


@pytest.mark.parametrize(
    "name", ["process", "on_timer", "now", "set_timer", "delete_timer", "schema", "clock", "over", "timers"]
)
def test_a_variable_does_not_take_the_place_of_what_keyed_has(name: str) -> None:
    kind = type("Mine", (Odd,), {name: ValueState("INT")})
    with pytest.raises(Misconfigured, match=rf"Mine\.{name}: this name is reserved; choose another"):
        keyed(kind)


@pytest.mark.parametrize("name", ["origin", "Origin", "seen", "SEEN"])
def test_what_tells_rows_apart_is_not_given(name: str) -> None:
    with pytest.raises(Misconfigured, match=r"Mine\.schema: "):
        keyed(type("Mine", (Odd,), {"schema": f"a INT, {name} STRING"}))


def test_records_are_handled_in_the_order_of_their_places() -> None:
    odd = keyed(Odd)
    locations = [{"partition": 1, "offset": 0}, {"partition": 0, "offset": 9}, {"partition": 0, "offset": 2}]
    rows = odd.feed(
        "k", *({"given": (location["partition"], location["offset"]), "origin": location} for location in locations)
    )
    assert rows == [{"a": 0, "b": 2}, {"a": 0, "b": 9}, {"a": 1, "b": 0}]


def test_a_row_that_has_no_place_is_not_handled() -> None:
    problem = r"Odd for the key 'k': a row has no origin, so its order is unknown"
    with pytest.raises(Misconfigured, match=problem):
        keyed(Odd).feed("k", {"given": None}, {"given": None, "origin": None})


def test_a_key_of_several_columns_is_a_tuple() -> None:
    class Both(Keyed):
        schema = "a INT, b INT, key STRING"

        def process(self, key: Any, row: Any) -> Any:
            return {"key": str(key)}

    assert keyed(Both, key=("a", "b")).feed((1, 2), {}) == [{"a": 1, "b": 2, "key": "(1, 2)"}]


def test_timers_need_a_method_that_they_call_and_a_time_zone() -> None:
    class Hasty(Keyed):
        schema = "a INT"

        def process(self, key: Any, row: Any) -> Any:
            self.set_timer(datetime(2026, 1, 1))

    class Naive(Hasty):
        def on_timer(self, key: Any, at: datetime) -> None: ...

    with pytest.raises(AttributeError, match=r"Hasty has no timers: write def on_timer\(self, key, at\)"):
        keyed(Hasty).feed(1, {})
    with pytest.raises(ValueError, match="has no time zone"):
        keyed(Naive).feed(1, {})


def test_a_class_that_says_too_little_is_told_what() -> None:
    class Silent(Keyed):
        def process(self, key: Any, row: Any) -> None: ...

    class Idle(Keyed):
        schema = "a INT"

    class Hidden(Silent):
        schema = "a INT"
        _own = ValueState("INT")

    class Mortal(Silent):
        schema = "a INT"
        soon = ValueState("INT", ttl="soon")

    for kind, problem in (
        (Silent, "Silent: it has no schema"),
        (Idle, r"Idle: it has no process\(\)"),
        (Hidden, "Hidden._own: Spark does not support this name"),
        (Mortal, 'Mortal.soon: "soon" is not a duration'),
    ):
        with pytest.raises(Misconfigured, match=f"^{problem}"):
            keyed(kind)

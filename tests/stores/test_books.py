from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.audit.account import Account, Share
from penstock.core.contracts import Entry, Guarantee, Positions
from penstock.stores.books import Books
from penstock.testing.clock import ManualClock


@dataclass
class Counting:
    """A store that says what it is told to, and how often it was asked."""

    said: Share
    life: str = "one"
    asked: int = 0
    guarantee: Guarantee = Guarantee.EXACTLY_ONCE

    def share(self) -> Share:
        self.asked += 1
        return self.said

    def begin(self, start: Positions) -> None: ...

    def positions(self) -> Positions:
        return self.said.until

    def write(self, entries: Sequence[Entry], positions: Positions) -> int:
        self.said = replace(self.said, until=positions, taken=self.said.taken + len(entries))
        return len(entries)

    def close(self) -> None: ...


class Plain:
    """A store that keeps no totals."""

    guarantee = Guarantee.AT_LEAST_ONCE

    def positions(self) -> Positions:
        return {}

    def write(self, entries: Sequence[Entry], positions: Positions) -> int:
        return 0

    def close(self) -> None: ...


def test_an_account_is_what_the_store_said_last() -> None:
    clock = ManualClock(5)
    books, share = Books("rsvps", clock), Share({0: 0}, {0: 7}, 7)
    assert books.account("store:redis/rsvps") is None
    books.look(Counting(share))
    assert books.account("store:redis/rsvps") == Account("store:redis/rsvps", "one", 5, {"rsvps": share}, step=7)


def test_a_store_that_keeps_no_totals_has_no_account() -> None:
    books = Books("rsvps", ManualClock())
    books.look(Plain())
    assert books.account("store:x/rsvps") is None


def test_an_account_that_says_nothing_new_stays_as_it_is() -> None:
    """So that it is not told again."""
    clock, store = ManualClock(), Counting(Share({0: 0}, {0: 7}, 7))
    books = Books("rsvps", clock)
    books.look(store)
    first = books.account("s")
    clock.move(60)
    books.look(store)
    assert books.account("s") == first == Account("s", "one", ManualClock().now(), {"rsvps": store.said}, step=7)
    store.life = "two"
    books.look(store)
    assert books.account("s") == Account("s", "two", clock.now(), {"rsvps": store.said}, step=7)


def test_a_store_is_asked_once_in_a_second_and_after_the_last_row() -> None:
    clock, store = ManualClock(), Counting(Share({0: 0}, {0: 0}, 0))
    books = Books("rsvps", clock)
    books.look(store)
    for _ in range(30):
        store.write([], {0: 1})
        books.wrote()
        books.keep_up(store)
        clock.move(0.1)
    assert store.asked == 3
    clock.move(1)
    books.keep_up(store)
    books.keep_up(store)
    assert store.asked == 4

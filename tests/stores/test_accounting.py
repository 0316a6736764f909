"""The totals of a store, its account, and the figures of its loader."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.audit.account import Account, Outcome, Share
from penstock.core.contracts import Entry, Guarantee, Offsets
from penstock.stores.accounting import Figures, StoreAccounting, Totals
from penstock.testing import ManualClock

NONE = {Outcome.PASSED: 0, Outcome.DUPLICATE: 0, Outcome.REFUSED: 0}


def test_nothing_is_a_share_of_nothing() -> None:
    assert Totals().share({}) == Share({}, {}, 0, NONE)


def test_a_partition_of_which_nothing_was_loaded_is_counted_from_where_it_is_read() -> None:
    assert Totals({0: 0}).share({0: 5, 1: 7}) == Share({0: 5, 1: 7}, {0: 5, 1: 7}, 0, NONE)


def test_what_was_loaded_before_it_was_counted_is_not_counted() -> None:
    assert Totals({0: 40}).share({0: 40}) == Share({0: 40}, {0: 40}, 0, NONE)


def test_a_batch_adds_up() -> None:
    totals = Totals({0: 40}).after({0: 43, 1: 9}, {0: 40, 1: 7}, {Outcome.PASSED: 3, Outcome.REFUSED: 2})
    assert totals.since == {0: 40, 1: 7}
    totals = totals.after({0: 44, 1: 9}, {0: 43, 1: 9}, {Outcome.DUPLICATE: 1})
    outcomes = {Outcome.PASSED: 3, Outcome.DUPLICATE: 1, Outcome.REFUSED: 2}
    assert totals.share({}) == Share({0: 40, 1: 7}, {0: 44, 1: 9}, 6, outcomes)


def test_what_the_channel_lost_before_the_first_entry_was_loaded_is_not_due() -> None:
    """A partition stood at its beginning, was empty, and begins later now."""
    totals = Totals().after({0: 0}, {0: 0}, {}).after({0: 101}, {0: 100}, {Outcome.PASSED: 1})
    assert totals.share({}).since == {0: 100}


@dataclass
class Counting:
    """A store that says what it is told to, and how often it was asked."""

    said: Share
    generation: str = "one"
    asked: int = 0
    guarantee: Guarantee = Guarantee.EXACTLY_ONCE

    def share(self) -> Share:
        self.asked += 1
        return self.said

    def begin(self, start: Offsets) -> None: ...

    def positions(self) -> Offsets:
        return self.said.until

    def write(self, entries: Sequence[Entry], positions: Offsets) -> int:
        self.said = replace(self.said, until=positions, taken=self.said.taken + len(entries))
        return len(entries)

    def close(self) -> None: ...


class Plain:
    """A store that keeps no totals."""

    guarantee = Guarantee.AT_LEAST_ONCE

    def positions(self) -> Offsets:
        return {}

    def write(self, entries: Sequence[Entry], positions: Offsets) -> int:
        return 0

    def close(self) -> None: ...


def test_an_account_is_what_the_store_said_last() -> None:
    clock = ManualClock(5)
    accounting, share = StoreAccounting("rsvps", clock), Share({0: 0}, {0: 7}, 7)
    assert accounting.account("store:redis/rsvps") is None
    accounting.look(Counting(share))
    assert accounting.account("store:redis/rsvps") == Account("store:redis/rsvps", "one", 5, {"rsvps": share}, step=7)


def test_a_store_that_keeps_no_totals_has_no_account() -> None:
    accounting = StoreAccounting("rsvps", ManualClock())
    accounting.look(Plain())
    assert accounting.account("store:x/rsvps") is None


def test_an_account_that_says_nothing_new_stays_as_it_is() -> None:
    """So that it is not told again."""
    clock, store = ManualClock(), Counting(Share({0: 0}, {0: 7}, 7))
    accounting = StoreAccounting("rsvps", clock)
    accounting.look(store)
    first = accounting.account("s")
    clock.move(60)
    accounting.look(store)
    assert accounting.account("s") == first == Account("s", "one", ManualClock().now(), {"rsvps": store.said}, step=7)
    store.generation = "two"
    accounting.look(store)
    assert accounting.account("s") == Account("s", "two", clock.now(), {"rsvps": store.said}, step=7)


def test_a_store_is_asked_once_in_a_second_and_after_the_last_row() -> None:
    clock, store = ManualClock(), Counting(Share({0: 0}, {0: 0}, 0))
    accounting = StoreAccounting("rsvps", clock)
    accounting.look(store)
    for _ in range(30):
        store.write([], {0: 1})
        accounting.wrote()
        accounting.keep_up(store)
        clock.move(0.1)
    assert store.asked == 3
    clock.move(1)
    accounting.keep_up(store)
    accounting.keep_up(store)
    assert store.asked == 4


def entry(**headers: bytes) -> Entry:
    return Entry("rsvps", 0, 0, 0, None, b"", tuple(headers.items()))


def test_the_figures_are_told_as_json_can_hold_them() -> None:
    clock = ManualClock(now=1_000_000_000)
    figures = Figures(clock)
    figures.set_lag(10)
    clock.move(2)
    figures.wrote([entry(time=b"1001000000"), entry(time=b"?"), entry()], rows=2, refused=1)
    figures.set_state("waiting", "Redis is away")
    told = json.loads(json.dumps(figures.to_json()))
    assert (told["count"], told["rate"], told["refused"], told["lag"]) == (2, 1.0, 1, 7)
    assert (told["state"], told["why"]) == ("waiting", "Redis is away")
    assert (told["latency"]["count"], told["latency"]["max"]) == (1, 1_000)

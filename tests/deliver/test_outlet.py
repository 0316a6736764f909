from penstock.audit.account import Account, Outcome, Share
from penstock.core.contracts import Entry
from penstock.deliver.outlet import FeedSpec, Outlet
from penstock.testing.clock import ManualClock


def entry(offset: int, partition: int = 0, version: int = 0) -> Entry:
    return Entry("c", partition, offset, 0, b"[%d]" % partition, b"{}", (("version", b"%d" % (version or offset)),))


def outlet(clock: ManualClock | None = None) -> Outlet:
    return Outlet(FeedSpec("f", "c", "topic", start={0: 5}), clock or ManualClock())


def share(outlet: Outlet) -> Share:
    account = outlet.account()
    assert account is not None
    return account.shares["c"]


def test_before_reading_starts_there_is_no_account() -> None:
    assert outlet().account() is None


def test_an_account_says_where_reading_started_and_what_became_of_the_entries() -> None:
    clock = ManualClock(9)
    one = outlet(clock)
    one.begin({0: 5, 1: 0})
    one.take([entry(5), entry(6), entry(8, version=6)], {})
    told = one.account()
    assert told is not None
    outcomes = {Outcome.PASSED: 2, Outcome.DUPLICATE: 1, Outcome.REFUSED: 0}
    expected = Share({0: 5, 1: 0}, {0: 9, 1: 0}, 3, outcomes)
    assert told == Account("feed:f", told.generation, 9, {"c": expected}, step=3)


def test_what_is_read_again_is_not_taken_again() -> None:
    one = outlet()
    one.begin({0: 5})
    one.take([entry(5), entry(6)], {})
    one.take([entry(5), entry(6), entry(7)], {})
    assert (share(one).taken, share(one).until) == (3, {0: 8})


def test_a_partition_keeps_its_first_start_once_it_has_brought_something() -> None:
    """One that brought nothing yet starts where it is read the next time."""
    one = outlet()
    one.begin({0: 5, 1: 3})
    one.take([entry(5)], {})
    one.begin({0: 6, 1: 4})
    assert (share(one).since, share(one).until) == ({0: 5, 1: 4}, {0: 6, 1: 4})


def test_each_process_is_a_life_of_its_own() -> None:
    one, two = outlet(), outlet()
    one.begin({})
    two.begin({})
    first, second = one.account(), two.account()
    assert first
    assert second
    assert first.generation != second.generation


def test_an_account_is_not_half_of_a_batch() -> None:
    """What was asked for before a batch stays as it was."""
    one = outlet()
    one.begin({0: 0})
    before = share(one)
    one.take([entry(0), entry(1)], {})
    assert (before.taken, before.until) == (0, {0: 0})

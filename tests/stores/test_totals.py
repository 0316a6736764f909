from penstock.audit.account import Outcome, Share
from penstock.stores.totals import Totals

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

from penstock.collect import numbers
from penstock.collect.numbers import Numbers
from penstock.core.record import Origin
from penstock.core.runs import Runs


def taken(*origins: tuple[str, int, int]) -> Numbers:
    found = Numbers()
    for origin in origins:
        found.add(*origin)
    return found


def test_a_resume_goes_on_before_the_first_gap() -> None:
    assert taken(("a", 1, 1), ("a", 1, 2), ("a", 1, 4)).contiguous() == {"a": (1, 2)}


def test_a_missing_beginning_is_a_gap_too() -> None:
    assert taken(("a", 1, 5), ("a", 1, 6)).contiguous() == {"a": (1, 0)}


def test_the_newest_epoch_goes_on() -> None:
    assert taken(("a", 7, 1), ("a", 3, 1), ("a", 3, 2)).contiguous() == {"a": (7, 1)}


def test_the_two_newest_epochs_are_remembered() -> None:
    found = taken(("a", 1, 1), ("a", 3, 1), ("a", 2, 1))
    assert Origin("a", 1, 1, 0) not in found
    assert Origin("a", 2, 1, 0) in found
    assert Origin("a", 3, 1, 0) in found


def test_a_copy_goes_its_own_way() -> None:
    found = taken(("a", 1, 1))
    found.copy().add("a", 1, 2)
    assert Origin("a", 1, 2, 0) not in found


def test_a_sender_that_jumps_about_costs_bounded_memory_and_loses_nothing() -> None:
    found = Numbers()
    for seq in range(1, 2 * numbers.CHECK_EVERY + 1):
        found.add("mad", 1, 3 * seq)
    ((_, _, runs),) = found
    assert len(list(runs)) == numbers.RUNS
    assert runs.last == 6 * numbers.CHECK_EVERY
    assert runs.first == 3
    assert found.contiguous() == {"mad": (1, 0)}


def test_a_flood_of_senders_pushes_out_the_quiet_ones() -> None:
    found = taken(("busy", 1, 1))
    for flood in range(numbers.SENDERS + 10):
        found.add(f"made up {flood}", 1, 1)
        found.add("busy", 1, flood + 2)
    assert len(list(found)) == numbers.SENDERS
    assert {sender: runs for sender, _, runs in found}["busy"] == Runs([(1, numbers.SENDERS + 11)])

import random

import pytest

from penstock.core.runs import Runs


@pytest.mark.parametrize("seed", range(20))
def test_runs_are_a_set(seed: int) -> None:
    """Whatever is added in whatever order, the runs hold what a set would hold."""
    chance = random.Random(seed)
    runs, numbers = Runs(), set[int]()
    for _ in range(chance.randrange(1, 120)):
        first = chance.randrange(-50, 200)
        more = set(range(first, first + chance.choice([1, 1, 1, 2, 5, 30])))
        assert runs.add(min(more), max(more)) == len(more - numbers)
        numbers |= more
    assert {n for first, last in runs for n in range(first, last + 1)} == numbers
    assert runs.size == len(numbers)
    assert (runs.first, runs.last) == (min(numbers), max(numbers))
    assert {n for first, last in runs.missing() for n in range(first, last + 1)} == (
        set(range(min(numbers), max(numbers))) - numbers
    )
    assert all((n in runs) == (n in numbers) for n in range(-60, 260))
    assert all(after > before + 1 for (_, before), (after, _) in zip(list(runs), list(runs)[1:], strict=False))
    assert Runs(runs) == runs


def test_a_gap_is_named() -> None:
    runs = Runs([(1000, 1001), (1003, 1003)])
    assert runs.missing() == [(1002, 1002)]
    assert runs.whole_until == 1001


def test_a_number_that_comes_late_closes_its_gap() -> None:
    runs = Runs([(1, 3), (5, 9)])
    assert runs.add(4) == 1
    assert list(runs) == [(1, 9)]


def test_a_number_that_comes_again_is_not_new() -> None:
    runs = Runs([(1, 9)])
    assert runs.add(5) == 0
    assert runs.add(8, 11) == 2


def test_no_numbers_have_no_first_and_no_last() -> None:
    runs = Runs()
    assert (runs.first, runs.last, runs.whole_until, runs.missing(), runs.size) == (None, None, None, [], 0)


def test_a_run_that_ends_before_it_begins_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="ends before it begins: 5–4"):
        Runs().add(5, 4)


def test_a_list_of_runs_is_as_long_as_there_are_runs() -> None:
    """However many numbers they hold."""
    runs = Runs([(1, 10**18), (2 * 10**18, 3 * 10**18)])
    assert list(runs) == [(1, 10**18), (2 * 10**18, 3 * 10**18)]
    assert runs == Runs(list(runs))


def test_the_parts_of_runs_within_bounds() -> None:
    runs = Runs([(1, 5), (8, 9), (20, 30)])
    assert runs.between(4, 22) == [(4, 5), (8, 9), (20, 22)]
    assert runs.between(6, 7) == runs.between(31, 40) == []


@pytest.mark.parametrize("seed", range(50))
def test_one_set_without_another(seed: int) -> None:
    draw = random.Random(seed)
    some, others = (set(draw.choices(range(-20, 20), k=draw.randrange(30))) for _ in range(2))
    found = Runs((number, number) for number in some).without(Runs((number, number) for number in others))
    assert [number for first, last in found for number in range(first, last + 1)] == sorted(some - others)
    assert found == list(Runs(found))

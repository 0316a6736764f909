import pytest

from penstock.collect.numbers import Numbering, other_collectors
from penstock.core.record import Origin


def test_numbers_begin_with_one_and_have_no_gap() -> None:
    numbering = Numbering("rsvps", 9)
    assert [numbering.next(5), numbering.next(6)] == [Origin("rsvps", 9, 1, 5), Origin("rsvps", 9, 2, 6)]
    assert numbering.last == 2


@pytest.mark.parametrize(
    ("sender", "is_other"),
    [
        ("b", False),
        ("b.http", False),
        ("b.webhook", False),
        ("b.1", True),
        ("b.1.http", True),
        ("a", True),
        ("a.webhook", True),
        ("a.12", True),
        ("c+d", True),
        ("ccd", False),
        ("a.till-7", False),
        ("meter-7", False),
        ("aa", False),
        ("a.x.http", False),
    ],
)
def test_the_names_of_other_collectors_are_known(sender: str, is_other: bool) -> None:
    assert other_collectors("b", ["a", "b", "c+d"])(sender) is is_other


def test_another_worker_is_another_collector() -> None:
    found = other_collectors("b.1", ["b"])
    assert [found(one) for one in ("b", "b.1", "b.1.http", "b.2", "b.http")] == [True, False, False, True, True]

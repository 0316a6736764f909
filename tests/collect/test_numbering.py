from penstock.collect.numbering import Numbering
from penstock.record import Origin


def test_numbers_begin_with_one_and_have_no_gap() -> None:
    numbering = Numbering("rsvps", 9)
    assert [numbering.next(5), numbering.next(6)] == [Origin("rsvps", 9, 1, 5), Origin("rsvps", 9, 2, 6)]
    assert numbering.last == 2

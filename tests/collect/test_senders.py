"""How far each sender is, whatever numbers are given in its name."""

import pytest

from penstock.collect.listen import SenderStates
from penstock.collect.numbers import SENDERS
from penstock.core.contracts import ResumeState
from penstock.core.errors import Refused
from penstock.core.record import LARGEST_JUMP

HUGE = 2**62


def test_a_sender_goes_on_behind_what_is_safe() -> None:
    senders = SenderStates(ResumeState({"a": (7, 41)}, highest={"a": (7, 41)}))
    assert senders.resume_after("a", 7, 1) == senders.resume_after("a", 7, 42) == 41
    assert senders.resume_after("a", 7, 100) == 99
    assert senders.resume_after("a", 8, 1) == 0
    senders.acknowledge("a", 7, 42, 50)
    assert senders.resume_after("a", 7, 3) == 50


def test_a_number_given_in_the_name_of_a_sender_makes_none_of_its_records_safe() -> None:
    """It was told `{"after": 2^62}`, and would have forgotten all that it had."""
    senders = SenderStates(ResumeState(), largest_jump=0)
    assert senders.resume_after("a", 7, HUGE) == HUGE - 1
    senders.acknowledge("a", 7, HUGE, HUGE + 3)
    assert senders.resume_after("a", 7, 1) == 0
    senders.acknowledge("a", 7, 1, 5)
    assert senders.resume_after("a", 7, 1) == 5


def test_what_is_safe_in_pieces_is_safe_as_a_whole() -> None:
    senders = SenderStates(ResumeState())
    for first, last in ((4, 6), (7, 9), (2, 3)):
        senders.acknowledge("a", 7, first, last)
    assert senders.resume_after("a", 7, 2) == 9
    assert senders.resume_after("a", 7, 1) == 0


@pytest.mark.parametrize("epoch", [7, 8])
def test_a_jump_is_refused_in_an_epoch_that_is_known(epoch: int) -> None:
    senders = SenderStates(ResumeState({"a": (7, 0)}, highest={"a": (7, 50)}))
    if epoch == 7:
        with pytest.raises(Refused):
            senders.resume_after("a", 7, HUGE)
        with pytest.raises(Refused):
            senders.admit("a", 7, HUGE, HUGE)
    else:
        assert senders.resume_after("a", epoch, HUGE) == HUGE - 1
    # Whatever was tried, the sender itself goes on.
    assert senders.resume_after("a", 7, 51) == 50


def test_the_limit_is_the_largest_that_is_taken() -> None:
    senders = SenderStates(ResumeState(highest={"a": (7, 50)}))
    with pytest.raises(Refused):
        senders.admit("a", 7, 50 + LARGEST_JUMP + 2, 50 + LARGEST_JUMP + 2)
    senders.admit("a", 7, 50 + LARGEST_JUMP + 1, 50 + LARGEST_JUMP + 1)
    # From there it goes on.
    senders.admit("a", 7, 50 + 2 * LARGEST_JUMP, 50 + 2 * LARGEST_JUMP)


def test_the_way_back_is_open() -> None:
    """A number that was made up as the first of an epoch must not keep its sender out."""
    senders = SenderStates(ResumeState())
    senders.admit("a", 7, HUGE, HUGE)
    senders.admit("a", 7, 1, 10)


def test_there_are_only_so_many() -> None:
    senders = SenderStates(ResumeState())
    for number in range(SENDERS + 10):
        senders.admit(f"s{number}", 1, 1, 5)
        senders.acknowledge(f"s{number}", 1, 1, 5)
    assert len(list(senders._durable)) == len(senders._highest) == SENDERS

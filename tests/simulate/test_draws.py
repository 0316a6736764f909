"""Chance that can be asked again."""

from collections import Counter

import pytest

from penstock.simulate.draws import SLOTS, drawn, mixed, slots


def test_a_draw_is_the_same_whenever_it_is_asked_for_and_another_one_is_another() -> None:
    assert drawn(7, 1, 2) == drawn(7, 1, 2)
    assert len({drawn(7, one, other) for one in range(100) for other in range(100)}) == 10_000


def test_every_bit_is_set_in_half_of_the_draws() -> None:
    draws = [mixed(number) for number in range(10_000)]
    assert all(0.47 < sum(draw >> bit & 1 for draw in draws) / 10_000 < 0.53 for bit in range(64))


def test_slots_follow_the_law_of_zipf() -> None:
    shares = Counter(slots(100, 1.0))
    assert len(slots(100, 1.0)) == SLOTS
    assert shares[0] == pytest.approx(2 * shares[1], rel=0.02)
    assert shares[0] == pytest.approx(10 * shares[9], rel=0.05)

from penstock.core.clock import Clock
from penstock.testing import ManualClock


def test_it_stands_still_until_it_is_moved() -> None:
    clock: Clock = ManualClock(now=5_000_000)
    assert (clock.now(), clock.elapsed()) == (clock.now(), clock.elapsed()) == (5_000_000, 0.0)


def test_both_its_times_move_together_and_exactly() -> None:
    clock = ManualClock(now=5_000_000)
    for _ in range(10):
        clock.move(0.1)
    clock.move(2)
    assert (clock.now(), clock.elapsed()) == (8_000_000, 3.0)

"""Rates."""

from penstock.deliver.outlet import Rate


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.at = 1_000.0

    def now(self) -> int:
        return int(self.at * 1_000_000)

    def elapsed(self) -> float:
        return self.at


def test_a_rate_is_the_mean_of_the_last_ten_seconds() -> None:
    clock = Hand()
    rate = Rate(clock)
    assert rate.per_second() == 0
    for _ in range(30):
        rate.add(50)
        clock.at += 0.5
    assert rate.per_second() == 100
    clock.at += 5
    assert 40 <= rate.per_second() <= 60
    clock.at += 10
    assert rate.per_second() == 0


def test_a_young_rate_is_not_thinned_by_time_that_never_was() -> None:
    clock = Hand()
    rate = Rate(clock)
    for _ in range(4):
        rate.add(50)
        clock.at += 0.5
    assert rate.per_second() == 100

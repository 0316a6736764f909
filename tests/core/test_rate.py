from penstock.core.rate import Rate
from penstock.testing.clock import ManualClock


def test_the_rate_is_that_of_the_last_five_seconds() -> None:
    clock = ManualClock()
    rate = Rate(clock)
    for _ in range(100):
        clock.move(0.1)
        rate.add(20)
    assert 190 <= rate.per_second() <= 210
    assert rate.count == 2_000


def test_silence_brings_the_rate_to_zero() -> None:
    clock = ManualClock()
    rate = Rate(clock)
    for _ in range(100):
        clock.move(0.1)
        rate.add(20)
    for _ in range(60):
        clock.move(0.1)
        rate.per_second()
    assert rate.per_second() == 0


def test_one_record_at_the_start_is_no_flood() -> None:
    rate = Rate(ManualClock())
    rate.add(1)
    assert rate.per_second() == 1


def test_a_total_that_is_looked_at_once_a_second_has_its_true_rate() -> None:
    clock = ManualClock()
    rate = Rate(clock)
    for second in range(1, 12):
        rate.reach(1_000_000 + 200 * second)
        clock.move(1)
    rate.reach(1_000_000 + 200 * 12)
    assert rate.per_second() == 200

import json
import math
import random

import pytest

from penstock.core.metrics import Rate, Sketch
from penstock.testing import ManualClock


def sketch_of(*values: float) -> Sketch:
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    return sketch


@pytest.mark.parametrize("q", [0.0, 0.01, 0.5, 0.95, 0.99, 0.999, 1.0])
def test_a_quantile_is_within_one_percent(q: float) -> None:
    chance = random.Random(7)
    values = sorted(chance.lognormvariate(3, 2) for _ in range(10_000))
    exact = values[max(0, math.ceil(q * len(values)) - 1)]
    assert sketch_of(*values).quantile(q) == pytest.approx(exact, rel=0.0101)


def test_an_empty_sketch_says_nothing() -> None:
    assert Sketch().quantile(0.5) is None
    assert Sketch().summary() is None
    assert Sketch.from_json(json.loads(json.dumps(Sketch().to_json()))).summary() is None


def test_a_negative_duration_counts_as_zero_and_as_skewed() -> None:
    sketch = sketch_of(-5, 10)
    assert sketch.skewed == 1
    assert sketch.summary() == {
        "count": 2,
        "min": 0,
        "mean": 5,
        "p50": 0,
        "p95": pytest.approx(10, rel=0.01),
        "p99": pytest.approx(10, rel=0.01),
        "max": 10,
    }


def test_merging_counts_what_both_have_counted() -> None:
    chance = random.Random(8)
    left, right = ([chance.expovariate(0.01) - 1 for _ in range(1_000)] for _ in range(2))
    merged = sketch_of(*left)
    merged.merge(sketch_of(*right))
    together = sketch_of(*left, *right)
    assert merged.skewed == together.skewed > 0
    assert merged.summary() == pytest.approx(together.summary())


def test_a_sketch_survives_json() -> None:
    sketch = sketch_of(-1, 0, 0.5, 20, 20, 3_000)
    again = Sketch.from_json(json.loads(json.dumps(sketch.to_json())))
    assert again.summary() == sketch.summary()
    assert again.to_json() == sketch.to_json()


def test_counting_many_times_at_once_is_counting_one_by_one() -> None:
    many = Sketch()
    many.add(12.5, times=3)
    many.add(99.0, times=0)
    assert many.to_json() == sketch_of(12.5, 12.5, 12.5).to_json()


def test_the_memory_is_bounded_whatever_comes() -> None:
    sketch = Sketch()
    for exponent in range(-320, 309):
        for digit in (1, 2, 5):
            sketch.add(digit * 10.0**exponent)
    sketch.add(math.inf)
    assert len(sketch.to_json()["buckets"]) < 1_900
    json.dumps(sketch.to_json(), allow_nan=False)


def test_what_is_no_number_is_not_counted() -> None:
    with pytest.raises(ValueError, match="cannot be counted"):
        Sketch().add(math.nan)
    with pytest.raises(ValueError, match="between 0 and 1"):
        sketch_of(1).quantile(1.5)


def test_what_was_counted_since_an_earlier_state_is_known() -> None:
    dice = random.Random(3)
    before, after = [dice.uniform(1, 1000) for _ in range(500)], [dice.uniform(5, 50) for _ in range(500)]
    earlier, whole, only = Sketch(), Sketch(), Sketch()
    for ms in before:
        earlier.add(ms)
        whole.add(ms)
    for ms in after:
        whole.add(ms)
        only.add(ms)
    rest, due = whole.without(earlier).summary(), only.summary()
    assert rest
    assert due
    assert rest == pytest.approx(due, rel=0.03)


def test_nothing_since_is_nothing() -> None:
    sketch = Sketch()
    sketch.add(5)
    assert sketch.without(sketch).summary() is None


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
        rate.set_total(1_000_000 + 200 * second)
        clock.move(1)
    rate.set_total(1_000_000 + 200 * 12)
    assert rate.per_second() == 200

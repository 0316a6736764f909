"""The random walk: no step is too long, and a seed tells all of it."""

import re
from itertools import islice, pairwise

from penstock.record import Origin, Record
from penstock.simulate.walk import STEEPEST, Walk, _written, positions, walk
from penstock.testing.clock import ManualClock


async def walked(wanted: Walk, clock: ManualClock) -> list[Record]:
    async def sleep(seconds: float) -> None:
        clock.move(seconds)

    return [record async for batch in walk(wanted, 7, clock, sleep=sleep) for record in batch]


def test_no_step_is_longer_than_the_steepest_and_both_ways_are_gone() -> None:
    path = list(islice(positions(1), 10_000))
    steps = [b - a for a, b in pairwise([0.0, *path])]
    assert max(steps) <= STEEPEST + 1e-9
    assert min(steps) >= -STEEPEST - 1e-9
    assert max(steps) > 0.7
    assert min(steps) < -0.7


def test_a_direction_is_drawn_around_the_last_one() -> None:
    steps = [b - a for a, b in pairwise(islice(positions(1), 10_000))]
    assert sum(a * b > 0 for a, b in pairwise(steps)) > 0.7 * len(steps)


def test_the_same_seed_walks_the_same_way() -> None:
    assert list(islice(positions(5), 100)) == list(islice(positions(5), 100))
    assert list(islice(positions(5), 100)) != list(islice(positions(6), 100))


async def test_a_step_a_second_with_four_decimals_a_key_and_a_number() -> None:
    clock = ManualClock(1_700_000_000_000_000)
    records = await walked(Walk(limit=5, seed=1), clock)
    assert clock.elapsed() == 4
    assert all(re.fullmatch(rb"-?\d+\.\d{4}", record.value or b"") for record in records)
    assert {record.key for record in records} == {b"walk"}
    assert [record.origin for record in records] == [
        Origin("random-walk", 7, n + 1, 1_700_000_000_000_000 + n * 1_000_000) for n in range(5)
    ]


async def test_a_walk_of_no_steps_ends_at_once() -> None:
    assert await walked(Walk(limit=0), ManualClock()) == []


def test_zero_has_no_sign() -> None:
    assert (_written(-0.00001), _written(-1.00004), _written(12.5)) == (b"0.0000", b"-1.0000", b"12.5000")

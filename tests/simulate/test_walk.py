"""The random walk: no step is too long, and a seed tells all of it."""

import re
from itertools import islice, pairwise
from statistics import fmean

import orjson
import pytest

from penstock.core.record import Origin, Record
from penstock.simulate.walk import STEEPEST, Walk, Walkers, _written, positions, walk
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


def documented(sender: int, first: int, last: int, seed: int = 7) -> list[float]:
    walkers = Walkers(seed)
    return [orjson.loads(walkers(sender, number, 0))["position"] for number in range(first, last + 1)]


@pytest.mark.parametrize("first", [1, 2**20 - 5_000, 2**31 - 5_000, 10**12])
def test_as_documents_no_step_is_too_long_either(first: int) -> None:
    steps = [b - a for a, b in pairwise(documented(3, first, first + 10_000))]
    assert max(map(abs, steps)) <= STEEPEST + 1e-4
    assert max(steps) > 0.5
    assert min(steps) < -0.5
    assert sum(a * b > 0 for a, b in pairwise(steps)) > 0.6 * len(steps)


def test_a_documented_walk_begins_at_0_and_goes_the_further_the_longer_it_lasts() -> None:
    walkers = Walkers(7)

    def spread(number: int) -> float:
        return fmean(abs(walkers._position(sender, number)) for sender in range(300))

    assert abs(documented(3, 1, 1)[0]) <= STEEPEST
    near, far = spread(100), spread(10_000)
    assert 5 < far / near < 20


def test_each_sender_walks_its_own_way() -> None:
    assert documented(1, 1, 50) != documented(2, 1, 50)
    assert orjson.loads(Walkers(7)(1, 5, 9_999)) == {
        "walk": "walker-01",
        "step": 5,
        "position": documented(1, 5, 5)[0],
        "at": 9,
    }

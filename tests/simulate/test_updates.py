"""Numbered updates are contiguous per sender and life; no step of a walk is too long; ticks do not drift."""

import json
import re
from datetime import timedelta
from itertools import pairwise
from statistics import fmean
from typing import Any

import orjson
import pytest

from penstock.core.errors import Misconfigured
from penstock.core.record import Origin, Record
from penstock.simulate.updates import STEEPEST, Counters, Updates, Walkers, new_epoch, ticks, updates, walk
from penstock.testing import ManualClock


async def made(wanted: Updates, clock: ManualClock, most: int = 100) -> list[list[Record]]:
    async def sleep(seconds: float) -> None:
        clock.move(seconds)

    found = []
    async for batch in updates(wanted, new_epoch(clock), clock, sleep=sleep):
        found.append(batch)
        if len(found) == most:
            break
    return found


def numbers(batches: list[list[Record]], sender: str) -> list[int]:
    origins = [record.origin for batch in batches for record in batch]
    return [origin.seq for origin in origins if origin and origin.sender == sender]


async def test_an_update_tells_its_identity_in_payload_and_headers() -> None:
    clock = ManualClock(1_700_000_000_000_000)
    ((record,),) = await made(Updates(count=1, limit=1), clock)
    assert json.loads(record.value or b"") == {"seq": 1, "sender": "sender", "time": 1_700_000_000_000_000}
    assert record.origin == Origin("sender", 1_700_000_000_000_000, 1, 1_700_000_000_000_000)
    assert record.key == b"sender"


async def test_each_sender_sends_so_many_a_tick_each_number_one_higher() -> None:
    clock = ManualClock()
    wanted = Updates(timedelta(milliseconds=100), count=10, senders=20)
    batches = await made(wanted, clock, most=5)
    assert [len(batch) for batch in batches] == [200] * 5
    assert clock.elapsed() == pytest.approx(0.4)
    assert wanted.names[0] == "sender-01"
    assert wanted.names[-1] == "sender-20"
    for name in wanted.names:
        assert numbers(batches, name) == list(range(1, 51))


@pytest.mark.parametrize("limit", [0, 1, 9, 10, 11, 25])
async def test_a_limit_is_met_exactly(limit: int) -> None:
    batches = await made(Updates(count=10, senders=2, limit=limit), ManualClock())
    assert numbers(batches, "sender-02") == list(range(1, limit + 1))


async def test_a_producer_that_starts_again_is_another_life() -> None:
    clock = ManualClock()
    before = await made(Updates(limit=1), clock)
    clock.move(0.000001)
    after = await made(Updates(limit=1), clock)
    first, second = before[0][0].origin, after[0][0].origin
    assert first
    assert second
    assert (first.seq, second.seq) == (1, 1)
    assert first.epoch < second.epoch


async def test_updates_that_are_given_up_leave_no_gap() -> None:
    clock, given_up, seen = ManualClock(), list[int](), list[list[Record]]()

    async def sleep(seconds: float) -> None:
        clock.move(seconds)

    async for batch in updates(Updates(count=2), 1, clock, given_up.append, sleep):
        seen.append(batch)
        if len(seen) == 3:
            clock.move(3600)
        if len(seen) == 200:
            break
    assert numbers(seen, "sender") == list(range(1, 401))
    assert sum(given_up) > 35_000


@pytest.mark.parametrize(
    ("wrong", "description"),
    [
        ({"count": 0}, "the count is 0"),
        ({"senders": 0}, "the number of senders is 0"),
        ({"count": 1000, "senders": 1000}, "too many for a tick"),
        ({"limit": -1}, "the limit is -1"),
        ({"every": timedelta(0)}, "more than 0 ms"),
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any], description: str) -> None:
    with pytest.raises(Misconfigured, match=description):
        Updates(**wrong)


def test_as_documents_they_are_the_same_with_a_value() -> None:
    made = Counters(7)
    assert list(json.loads(made(3, 42, 1_700_000_000_000_000))) == ["seq", "sender", "time", "value"]
    found = [json.loads(made(3, number, 5)) for number in range(1, 1_001)]
    assert [update["seq"] for update in found] == list(range(1, 1_001))
    assert {update["sender"] for update in found} == {"sender-03"}
    assert 0 <= min(update["value"] for update in found) < 10
    assert 990 <= max(update["value"] for update in found) < 1_000


async def walked(clock: ManualClock, limit: int, seed: int | None = 1) -> list[Record]:
    async def sleep(seconds: float) -> None:
        clock.move(seconds)

    batches = walk(timedelta(seconds=1), limit, seed, "walk", 7, clock, sleep=sleep)
    return [record async for batch in batches for record in batch]


async def test_the_same_seed_walks_the_same_way() -> None:
    one, same, other, unset, again = [
        [record.value for record in await walked(ManualClock(), 100, seed)] for seed in (5, 5, 6, None, None)
    ]
    assert one == same
    assert one != other
    assert unset != again


async def test_a_step_a_second_with_four_decimals_a_key_and_a_number() -> None:
    clock = ManualClock(1_700_000_000_000_000)
    records = await walked(clock, 5)
    assert clock.elapsed() == 4
    assert all(re.fullmatch(rb"-?\d+\.\d{4}", record.value or b"") for record in records)
    assert {record.key for record in records} == {b"walk"}
    assert [record.origin for record in records] == [
        Origin("random-walk", 7, n + 1, 1_700_000_000_000_000 + n * 1_000_000) for n in range(5)
    ]


async def test_a_walk_of_no_steps_ends_at_once() -> None:
    assert await walked(ManualClock(), 0) == []


def test_zero_has_no_sign() -> None:
    """After 2**32 steps a walk is at 0 again."""
    assert all(str(Walkers(seed).position(0, 1 << 32)) == "0.0" for seed in range(20))


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
        return fmean(abs(walkers.position(sender, number)) for sender in range(300))

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


TENTH = timedelta(milliseconds=100)


class Sleeper:
    """Sleeping moves the clock, a little too far or too short each time."""

    def __init__(self, clock: ManualClock, late: float = 0.0) -> None:
        self._clock, self._late = clock, late

    async def __call__(self, seconds: float) -> None:
        self._clock.move(max(0.0005, seconds + self._late))


async def test_ticks_do_not_drift_though_each_sleep_is_late() -> None:
    clock = ManualClock()
    async for tick in ticks(TENTH, clock, sleep=Sleeper(clock, late=0.03)):
        assert tick * 0.1 <= clock.elapsed() < tick * 0.1 + 0.04
        clock.move(0.02)
        if tick == 1000:
            return


async def test_the_clock_decides_when_a_sleep_was_short() -> None:
    clock = ManualClock()
    async for tick in ticks(TENTH, clock, sleep=Sleeper(clock, late=-0.001)):
        assert clock.elapsed() >= tick * 0.1 - 1e-9
        if tick == 3:
            return


async def test_who_falls_behind_catches_up_at_once() -> None:
    clock, given_up = ManualClock(), list[int]()
    when = []
    async for tick in ticks(TENTH, clock, given_up.append, Sleeper(clock)):
        when.append(round(clock.elapsed(), 6))
        if tick == 0:
            clock.move(0.5)
        if tick == 7:
            break
    assert when == [0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7]
    assert not given_up


async def test_beyond_the_burst_ticks_are_given_up_and_told() -> None:
    clock, given_up = ManualClock(), list[int]()
    when = []
    async for tick in ticks(TENTH, clock, given_up.append, Sleeper(clock), burst=2):
        when.append(round(clock.elapsed(), 6))
        if tick == 0:
            clock.move(1.0)
        if tick == 5:
            break
    assert when == [0, 1.0, 1.0, 1.0, 1.1, 1.2]
    assert sum(given_up) == 7


async def test_a_tick_that_takes_no_time_is_refused() -> None:
    with pytest.raises(Misconfigured, match="more than 0 ms"):
        await anext(ticks(timedelta(0), ManualClock()))

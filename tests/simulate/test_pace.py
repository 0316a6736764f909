"""The beat: absolute, without drift, and bounded when it has to catch up."""

from datetime import timedelta

import pytest

from penstock.core.errors import Misconfigured
from penstock.simulate.pace import ticks
from penstock.testing.clock import ManualClock

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
    with pytest.raises(Misconfigured, match="give more than 0 ms"):
        await anext(ticks(timedelta(0), ManualClock()))

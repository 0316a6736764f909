import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice, repeat

import pytest

from penstock.collect.bookmarks import Bookmark
from penstock.collect.ingest import reconnecting
from penstock.collect.numbers import number_runs
from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState, SenderNumbers
from penstock.core.errors import FIRST_PAUSE, LONGEST_PAUSE, Unavailable, backoff
from penstock.core.record import Heartbeat, Origin, OutageInterval
from penstock.testing import ManualClock


class Ticking(ManualClock):
    """A clock that moves on by one microsecond each time it is looked at."""

    def now(self) -> int:
        self.move(1e-6)
        return super().now()


@dataclass
class Scripted:
    """A source whose lives are lists of what arrives; in a life of None it does not answer. The last life ends."""

    generations: list[Sequence[Arrival | Heartbeat | OutageInterval] | None]
    guarantee: Guarantee = Guarantee.EXACTLY_ONCE
    name: str = "scripted"
    description: str = "of a test"
    opened: list[SenderNumbers] = field(default_factory=list)

    @asynccontextmanager
    async def open(self, taken: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        self.opened.append(dict(taken.numbers))
        generation = self.generations.pop(0)
        if generation is None:
            raise Unavailable(self.name, "away")
        yield self._intakes(generation)

    async def _intakes(self, generation: Sequence[Arrival | Heartbeat | OutageInterval]) -> AsyncIterator[Intake]:
        for arrival in generation:
            yield Intake([arrival], self._settle)
        if self.generations:
            raise Unavailable(self.name, "gone")

    async def _settle(self, error: Exception | None) -> None:
        await asyncio.sleep(0)


def record(seq: int, epoch: int = 1) -> Arrival:
    return Arrival(b"%d" % seq, Origin("a", epoch, seq, 0))


async def run(
    source: Scripted, numbers: SenderNumbers, heard: int | None = None, settle: bool = True
) -> tuple[list[Arrival | Heartbeat | OutageInterval], list[str | None]]:
    """What comes of a source, as the ingest loop hears it: what is settled is durable."""
    found: list[Arrival | Heartbeat | OutageInterval] = []
    watched: list[str | None] = []
    bookmark = Bookmark()
    for sender, (epoch, seq) in numbers.items():
        bookmark.numbers.add(sender, epoch, 1, seq)

    async def resume() -> ResumeState:
        return bookmark.resume_state()

    intakes = reconnecting(
        source,
        resume,
        Ticking(now=100),
        heard,
        lambda error: watched.append(error.reason if error else None),
        lambda: repeat(0.0),
    )
    async with aclosing(intakes):
        async for intake in intakes:
            found += intake.arrivals
            if settle:
                for run in number_runs(intake.arrivals):
                    bookmark.numbers.add(*run)
                await intake.settle(None)
    return found, watched


async def test_it_goes_on_after_what_was_settled() -> None:
    source = Scripted([[record(6), record(7)], [record(8)]])
    found, _ = await run(source, {"a": (1, 5)})
    assert found == [record(6), record(7), record(8)]
    assert source.opened == [{"a": (1, 5)}, {"a": (1, 7)}]


async def test_what_was_not_settled_is_asked_for_again() -> None:
    source = Scripted([[record(6), record(7)], []])
    await run(source, {"a": (1, 5)}, settle=False)
    assert source.opened == [{"a": (1, 5)}, {"a": (1, 5)}]


async def test_it_does_not_ask_beyond_a_gap() -> None:
    source = Scripted([[record(6), record(9)], []])
    await run(source, {"a": (1, 5)})
    assert source.opened[-1] == {"a": (1, 6)}


async def test_a_new_epoch_takes_over() -> None:
    source = Scripted([[record(6), record(1, epoch=2)], []])
    await run(source, {"a": (1, 5)})
    assert source.opened[-1] == {"a": (2, 1)}


async def test_it_tries_until_somebody_answers_and_tells_each_change() -> None:
    source = Scripted([None, None, [record(1)], []])
    found, watched = await run(source, {})
    assert found == [record(1)]
    assert watched == ["away", "away", None, "gone", None]


async def test_a_source_that_can_resume_is_never_blind() -> None:
    found, _ = await run(Scripted([[record(2)], None, [record(3)]]), {"a": (1, 1)}, heard=50)
    assert not [arrival for arrival in found if isinstance(arrival, OutageInterval)]


async def test_a_source_that_cannot_resume_says_when_it_was_blind() -> None:
    source = Scripted([[Arrival(b"x")], None, [Arrival(b"y")]], Guarantee.BEST_EFFORT)
    found, _ = await run(source, {})
    before, blind, after = found
    assert (before, after) == (Arrival(b"x"), Arrival(b"y"))
    assert blind == OutageInterval("scripted", 102, 103)


async def test_it_was_blind_since_its_former_life() -> None:
    found, _ = await run(Scripted([[Arrival(b"x")]], Guarantee.BEST_EFFORT), {}, heard=50)
    assert found == [OutageInterval("scripted", 50, 101), Arrival(b"x")]


async def test_it_was_blind_since_its_first_attempt() -> None:
    found, _ = await run(Scripted([None, [Arrival(b"x")]], Guarantee.BEST_EFFORT), {})
    assert found == [OutageInterval("scripted", 101, 102), Arrival(b"x")]


async def test_another_failure_is_not_swallowed() -> None:
    class Broken(Scripted):
        async def _intakes(self, generation: Sequence[Arrival | Heartbeat | OutageInterval]) -> AsyncIterator[Intake]:
            raise ZeroDivisionError
            yield

    with pytest.raises(ZeroDivisionError):
        await run(Broken([[], []]), {})


def test_the_waits_double_up_to_a_bound() -> None:
    waits = list(islice(backoff(), 12))
    assert FIRST_PAUSE / 2 <= waits[0] <= FIRST_PAUSE
    assert all(LONGEST_PAUSE / 2 <= wait <= LONGEST_PAUSE for wait in waits[-3:])


async def test_a_source_that_numbers_nothing_is_blind_though_it_promised_to_resume() -> None:
    source = Scripted([[Arrival(b"x"), Arrival(b"y")], [Arrival(b"z")]])
    found, _ = await run(source, {})
    assert [type(one) for one in found] == [Arrival, Arrival, OutageInterval, Arrival]


async def test_one_unreadable_record_does_not_make_a_numbered_source_blind() -> None:
    source = Scripted([[record(1), Arrival(b"?")], None, [record(2)]])
    found, _ = await run(source, {})
    assert not any(isinstance(one, OutageInterval) for one in found)


async def test_a_source_that_had_no_numbers_in_an_earlier_life_was_blind_since() -> None:
    found, _ = await run(Scripted([[Arrival(b"x")]]), {}, heard=1)
    assert isinstance(found[0], OutageInterval)

"""The contract of a source, as tests that every source passes: those of Penstock, and yours.

class TestMine(SourceContract):
    @pytest.fixture
    async def world(self) -> AsyncIterator[World]:
        async with my_outside() as outside:
            yield outside
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import repeat
from typing import Any, Protocol
from unittest import SkipTest

from penstock.channels.memory import MemoryChannels
from penstock.collect.ingest import IngestLoop
from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState, Source
from penstock.core.errors import Unavailable
from penstock.testing.documents import DOCUMENTS

PATIENCE = 30.0
"""Seconds until a test gives up."""
QUIET = 0.1
"""For so long nothing may happen that must not."""


class World(Protocol):
    """The outside of a source: somebody who has records to give, and goes on trying."""

    @property
    def source(self) -> Source:
        """The source that hears this outside; the same for the whole test."""

    def payloads(self, count: int) -> list[bytes]:
        """So many, all different, each as it will arrive; `plain` unless they have to hold something."""

    async def give(self, payloads: Sequence[bytes]) -> None:
        """From now on the outside has these, too. Returns at once: they are given while the source is open."""

    async def cut(self) -> None:
        """Break every connection that there is; new ones can be made at once."""

    def acknowledged(self) -> int | None:
        """How many of the values the outside was told are safe; None where nobody is told."""


class SourceContract:
    """What holds for every source, as far as its guarantee goes."""

    def carries(self, payload: bytes) -> bool:
        """Whether the source can bring this payload: `anything`, `text`, `lines`; none if all have their own form."""
        return False

    async def test_every_payload_arrives_byte_by_byte(self, world: World) -> None:
        """What is JSON and what is not: the judge is the channel, not the source."""
        if not (given := [one.payload for one in DOCUMENTS if self.carries(one.payload)]):
            raise SkipTest("its payloads have a form of their own")
        found: list[bytes] = []
        async with world.source.open(ResumeState()) as intakes:
            await world.give(given)
            async with asyncio.timeout(PATIENCE):
                async for intake in intakes:
                    found += [one.value for one in arrivals(intake)]
                    await intake.settle(None)
                    if len(found) >= len(given):
                        break
        assert Counter(found) == Counter(given)

    async def test_what_is_given_arrives_in_its_order(self, world: World) -> None:
        async with world.source.open(ResumeState()) as intakes:
            await world.give(given := world.payloads(50))
            found: list[bytes] = []
            async with asyncio.timeout(PATIENCE):
                async for intake in intakes:
                    found += [one.value for one in arrivals(intake)]
                    await intake.settle(None)
                    if len(found) >= len(given):
                        break
        assert found == given

    async def test_nothing_is_acknowledged_before_it_is_safe(self, world: World) -> None:
        async with world.source.open(ResumeState()) as intakes:
            await world.give(given := world.payloads(5))
            async with asyncio.timeout(PATIENCE):
                intake = await anext(intakes)
            first = len(arrivals(intake))
            await asyncio.sleep(QUIET)
            assert world.acknowledged() in (None, 0)
            await intake.settle(None)
            if world.acknowledged() is not None:
                await until(lambda: (world.acknowledged() or 0) >= first)
                assert (world.acknowledged() or 0) <= len(given)

    async def test_what_was_not_taken_is_not_acknowledged_and_comes_again(self, world: World) -> None:
        if world.source.guarantee is Guarantee.BEST_EFFORT:
            return
        await world.give(given := world.payloads(5))
        async with world.source.open(ResumeState()) as intakes:
            async with asyncio.timeout(PATIENCE):
                intake = await anext(intakes)
            await intake.settle(Unavailable("the channel", "it is away"))
            await asyncio.sleep(QUIET)
            assert world.acknowledged() in (None, 0)
        channels = MemoryChannels()
        async with Running(world.source, channels) as running:
            await running.until(lambda: running.values() >= Counter(given))

    async def test_a_cut_loses_nothing_that_can_be_had(self, world: World) -> None:
        channels, given = MemoryChannels(2), world.payloads(60)
        async with Running(world.source, channels) as running:
            for first in range(0, 60, 20):
                await world.give(given[first : first + 20])
                if world.source.guarantee is Guarantee.BEST_EFFORT:
                    # What it gave while nobody listened is gone; that it goes on is all that can be asked.
                    await running.until(lambda last=given[first + 19]: running.values()[last])  # type: ignore[misc]
                else:
                    await running.until(lambda first=first: running.count() > first)  # type: ignore[misc]
                await world.cut()
            if world.source.guarantee is Guarantee.BEST_EFFORT:
                return
            await running.until(lambda: running.values() >= Counter(given))
        self.judge(world, running.values(), given)

    async def test_a_collector_that_ends_anywhere_goes_on_where_it_was(self, world: World) -> None:
        if world.source.guarantee is Guarantee.BEST_EFFORT:
            return
        channels, given = MemoryChannels(2), world.payloads(120)
        for generation in range(6):
            await world.give(given[20 * generation : 20 * generation + 20])
            async with Running(world.source, channels) as running:
                await running.until(lambda: running.count() >= 15 * (generation + 1))  # noqa: B023 - it is over then
        async with Running(world.source, channels) as running:
            await running.until(lambda: running.values() >= Counter(given))
        self.judge(world, running.values(), given)

    async def test_a_clean_stop_and_another_start_give_each_once(self, world: World) -> None:
        if world.source.guarantee is Guarantee.BEST_EFFORT:
            return
        channels, given = MemoryChannels(2), world.payloads(40)
        for generation in range(2):
            await world.give(given[20 * generation : 20 * generation + 20])
            async with Running(world.source, channels) as running:
                await running.until(lambda: running.values() >= Counter(given[: 20 * (generation + 1)]))  # noqa: B023
                if world.acknowledged() is not None:
                    await running.until(lambda: world.acknowledged() == 20 * (generation + 1))  # noqa: B023
                await running.stop()
        assert running.values() == Counter(given)

    async def test_closing_it_leaves_nothing_behind(self, world: World) -> None:
        before = asyncio.all_tasks()
        for _ in range(2):
            async with world.source.open(ResumeState()):
                await asyncio.sleep(0)
        await until(lambda: not _beside(before))

    def judge(self, world: World, found: "Counter[bytes]", given: Sequence[bytes]) -> None:
        if world.source.guarantee is Guarantee.EXACTLY_ONCE:
            assert found == Counter(given)
        else:
            assert set(found) == set(given)

    def test_it_says_what_it_promises(self, world: World) -> None:
        source = world.source
        assert source.name
        assert source.guarantee in Guarantee
        assert source.description
        assert not source.description.endswith(".")


class Running:
    """A pump from a source into channels in memory, in a task. Left without `stop()`, it ends as by a crash."""

    def __init__(self, source: Source, channels: MemoryChannels) -> None:
        self._channels, self._stop = channels, asyncio.Event()
        self.pump = IngestLoop(
            source,
            "into",
            channels,
            heartbeats="heartbeats",
            bookmarks="bookmarks",
            bookmark_every=timedelta(milliseconds=20),
            delays=lambda: repeat(0.01),
        )
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Running":
        self._task = asyncio.create_task(self.pump.run(self._stop))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def stop(self) -> None:
        self._stop.set()
        task, self._task = self._task, None
        if task is not None:
            await task

    def values(self) -> "Counter[bytes]":
        return Counter(entry.value or b"" for entry in self._channels.entries("into"))

    def count(self) -> int:
        return len(self._channels.entries("into"))

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until something is true; raises what ended the pump meanwhile."""
        async with asyncio.timeout(PATIENCE):
            while not condition():
                if self._task is not None and self._task.done() and not condition():
                    await self._task
                    raise AssertionError("the source has ended, and not all is there")
                await asyncio.sleep(0.002)


async def until(condition: Callable[[], object]) -> None:
    """Wait until something is true."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.002)


def anything(payload: bytes) -> bool:
    """Any bytes, but some."""
    return bool(payload)


def text(payload: bytes) -> bool:
    """UTF-8."""
    try:
        return bool(payload.decode())
    except UnicodeDecodeError:
        return False


def lines(payload: bytes) -> bool:
    """One line that is not blank."""
    return bool(payload.strip()) and not {*b"\r\n"} & {*payload}


def plain(count: int) -> list[bytes]:
    return [b'{"n":%d}' % n for n in range(1, count + 1)]


def arrivals(intake: Intake) -> list[Arrival]:
    return [one for one in intake.arrivals if isinstance(one, Arrival)]


def _beside(before: "set[asyncio.Task[Any]]") -> "set[asyncio.Task[Any]]":
    return {task for task in asyncio.all_tasks() if task is not asyncio.current_task() and task not in before}

import asyncio

import pytest

from penstock.collect.ingest import ARRIVAL_OVERHEAD
from penstock.collect.listen import IngestQueue
from penstock.core.contracts import Arrival
from penstock.core.errors import Unavailable


def some(size: int) -> list[Arrival]:
    return [Arrival(b"x" * (size - ARRIVAL_OVERHEAD))]


async def turns() -> None:
    """Let everything run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_whoever_waits_for_room_comes_in_its_turn() -> None:
    queue = IngestQueue("source", max_bytes=1_000)
    intakes = queue.intakes()
    await queue.put(some(1_000))
    waiting = [asyncio.create_task(queue.put(some(1_000 + n))) for n in range(3)]
    await turns()
    assert not any(task.done() for task in waiting)
    found = [len((await anext(intakes)).arrivals[0].value) for _ in range(4)]  # type: ignore[union-attr]
    assert found == [800, 800, 801, 802]


async def test_a_taker_that_is_cancelled_anywhere_loses_nothing() -> None:
    """While others wait for room it has to wait for its turn among them: what it has in hand then is nobody's."""
    for steps in range(12):
        queue = IngestQueue("source", max_bytes=1_000)
        safe = await queue.put(some(1_000))
        waiting = [asyncio.create_task(queue.put(some(1_000))) for _ in range(4)]
        await turns()
        # Whoever waits for room is woken, and holds the line for a moment.
        async with queue._freed:
            queue._freed.notify_all()
            taking = asyncio.ensure_future(anext(queue.intakes()))
            for _ in range(steps):
                await asyncio.sleep(0)
            taking.cancel()
        (taken,) = await asyncio.gather(taking, return_exceptions=True)
        if isinstance(taken, BaseException):
            async with asyncio.timeout(1):
                await queue.close()
            assert safe.done(), f"cancelled after {steps} steps"
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_who_waits_for_room_is_told_that_it_is_closed() -> None:
    queue = IngestQueue("source", max_bytes=1_000)
    first = await queue.put(some(1_000))
    waiting = asyncio.create_task(queue.put(some(1_000)))
    await turns()
    await queue.close()
    with pytest.raises(Unavailable, match="source"):
        await waiting
    assert isinstance(first.exception(), Unavailable)

"""The source of the scenarios: each record once, in order, whenever it is stopped and started."""

import time
from typing import Any

import pytest
from cards import Cards
from scenario import Scenario, normals

from penstock.channels.memory import MemoryChannels
from penstock.core.contracts import Arrival, ResumeState
from penstock.core.errors import Misconfigured
from penstock.core.record import Origin
from penstock.simulate.documents import SLOTS
from penstock.testing.sources import Running


def origins(channels: MemoryChannels) -> list[Origin]:
    found = [Origin.read(entry.headers) for entry in channels.entries("into")]
    return [one for one in found if one is not None]


async def heard(source: Scenario, taken: ResumeState, count: int) -> list[Arrival]:
    found: list[Arrival] = []
    async with source.open(taken) as intakes:
        async for intake in intakes:
            found += [one for one in intake.arrivals if isinstance(one, Arrival)]
            if len(found) >= count:
                break
    return found


async def test_it_goes_on_after_the_last_number_and_leaves_none_out() -> None:
    channels, source = MemoryChannels(), Cards(rate=2_000, senders=3)
    for count in (100, 200, 300):
        async with Running(source, channels) as running:
            await running.until(lambda count=count: running.count() >= count)  # type: ignore[misc]
            await running.stop()
    found = origins(channels)
    assert {one.epoch for one in found} == {found[0].epoch}
    for sender in ("acquirer-00", "acquirer-01", "acquirer-02"):
        numbers = [one.seq for one in found if one.sender == sender]
        assert numbers == list(range(1, len(numbers) + 1))


async def test_a_record_is_its_document_at_the_time_when_it_is_due() -> None:
    source = Cards(rate=1_000, senders=4)
    found = await heard(source, ResumeState(), 50)
    start = found[0].origin
    assert start is not None
    for n, one in enumerate(found):
        assert one.origin is not None
        assert (int(one.origin.sender[-2:]), one.origin.seq) == (n % 4, n // 4 + 1)
        assert one.origin.time == start.time + n * 1_000 <= time.time() * 1e6
        assert one.value == source.document(n % 4, n // 4 + 1, one.origin.time)


async def test_after_a_day_it_goes_on_at_its_rate_and_sends_nothing_that_is_safe() -> None:
    epoch = int(time.time()) - 86_400
    safe = {"acquirer-00": (epoch, 40), "acquirer-01": (epoch, 10), "acquirer-02": (epoch - 5, 99)}
    began = time.time()
    numbers: dict[str, list[int]] = {}
    for one in await heard(Cards(rate=1_000, senders=3), ResumeState(safe), 200):
        assert one.origin is not None
        assert one.origin.epoch == epoch
        assert one.origin.time >= began * 1e6 - 1
        numbers.setdefault(one.origin.sender, []).append(one.origin.seq)
    first = {"acquirer-00": 41, "acquirer-01": 11, "acquirer-02": 1}
    assert numbers.keys() == first.keys()
    assert all(seqs == list(range(first[sender], first[sender] + len(seqs))) for sender, seqs in numbers.items())
    assert time.time() - began > 0.15


@pytest.mark.parametrize("options", [{"rate": 0}, {"rate": -1}, {"senders": 0}])
def test_what_cannot_be_is_misconfigured(options: dict[str, Any]) -> None:
    with pytest.raises(Misconfigured):
        Cards(**options)


def test_normals_have_the_mean_0_and_the_deviation_1() -> None:
    assert sum(normals()) / SLOTS == pytest.approx(0, abs=1e-9)
    assert sum(one * one for one in normals()) / SLOTS == pytest.approx(1, abs=0.01)
    assert max(normals()) < 3.7

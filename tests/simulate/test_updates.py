"""Numbered updates: contiguous per sender and life, N per tick."""

import json
from datetime import timedelta
from typing import Any

import pytest

from penstock.core.errors import Misconfigured
from penstock.core.record import Origin, Record
from penstock.simulate.updates import Counters, Updates, new_epoch, updates
from penstock.testing.clock import ManualClock


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
    ("wrong", "words"),
    [
        ({"count": 0}, "the count is 0"),
        ({"senders": 0}, "the number of senders is 0"),
        ({"count": 1000, "senders": 1000}, "too many for a tick"),
        ({"limit": -1}, "the limit is -1"),
        ({"every": timedelta(0)}, "give more than 0 ms"),
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(Misconfigured, match=words):
        Updates(**wrong)


def test_as_documents_they_are_the_same_with_a_value() -> None:
    made = Counters(7)
    assert list(json.loads(made(3, 42, 1_700_000_000_000_000))) == ["seq", "sender", "time", "value"]
    found = [json.loads(made(3, number, 5)) for number in range(1, 1_001)]
    assert [update["seq"] for update in found] == list(range(1, 1_001))
    assert {update["sender"] for update in found} == {"sender-03"}
    assert 0 <= min(update["value"] for update in found) < 10
    assert 990 <= max(update["value"] for update in found) < 1_000

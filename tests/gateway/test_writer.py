"""What is sent is numbered without gaps, and answered by what became of it."""

import asyncio
from collections.abc import Sequence

import pytest
from tests.gateway.conftest import until

from penstock.core.clock import SystemClock
from penstock.core.errors import Refused, Unavailable
from penstock.core.record import Record
from penstock.gateway.writer import ChannelWriter
from penstock.testing import ManualClock


class Scripted:
    """A sender that waits until it is let go, and fails when it is told to."""

    def __init__(self) -> None:
        self.batches: list[list[Record]] = []
        self.go = asyncio.Event()
        self.go.set()
        self.failure: Exception | None = None

    async def send(self, channel: str, records: Sequence[Record]) -> None:
        self.batches.append(list(records))
        await self.go.wait()
        if self.failure is not None:
            raise self.failure

    @property
    def numbers(self) -> list[list[tuple[int, int]]]:
        return [[(one.origin.epoch, one.origin.seq) for one in batch if one.origin] for batch in self.batches]


def record(value: bytes = b"x") -> Record:
    return Record(value)


async def test_what_comes_while_a_batch_is_on_its_way_goes_together() -> None:
    sender = Scripted()
    writer = ChannelWriter("c", sender, "gateway", ManualClock(7), 5)
    sender.go.clear()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(4):
            tasks.create_task(writer.write([record()]))
            await asyncio.sleep(0)
        await until(lambda: sender.batches)
        sender.go.set()
    assert [number for batch in sender.numbers for number in batch] == [(7, 1), (7, 2), (7, 3), (7, 4)]
    assert len(sender.batches) < 4


class Partitioned(Scripted):
    """A sender over partitions: what begins with a letter of `away` or `wrong` fails, and the others lie there."""

    def __init__(self) -> None:
        super().__init__()
        self.log: dict[tuple[int, int], bytes | None] = {}
        self.away: set[bytes] = set()
        self.wrong: set[bytes] = set()

    async def send(self, channel: str, records: Sequence[Record]) -> None:
        await super().send(channel, records)
        failing = {record.value for record in records} & (self.away | self.wrong)
        for one in records:
            if one.origin is not None and one.value not in failing:
                number = (one.origin.epoch, one.origin.seq)
                assert self.log.setdefault(number, one.value) == one.value, "one number, one record"
        if failing & self.wrong:
            raise Refused("a record", "it is wrong")
        if failing:
            raise Unavailable("a partition", "it has no leader")


async def test_what_was_not_acknowledged_is_sent_again_under_its_numbers_until_it_is() -> None:
    sender = Partitioned()
    writer = ChannelWriter("c", sender, "gateway", ManualClock(7), 5)
    sender.away = {b"b"}
    taking = asyncio.create_task(writer.write([record(b"a"), record(b"b"), record(b"c")]))
    await until(lambda: len(sender.batches) >= 2)
    assert not taking.done()
    assert sorted(sender.log) == [(7, 1), (7, 3)], "a gap, for as long as the partition is away"
    sender.away.clear()
    await taking
    await writer.write([record(b"d")])
    assert sender.log == {(7, 1): b"a", (7, 2): b"b", (7, 3): b"c", (7, 4): b"d"}


async def test_who_gives_up_hears_why_and_nothing_overtakes_what_may_be_there() -> None:
    sender = Partitioned()
    writer = ChannelWriter("c", sender, "gateway", SystemClock(), 0.1)
    sender.away = {b"b"}
    with pytest.raises(Unavailable, match=r"may be there.*\(a partition is unavailable: it has no leader"):
        await writer.write([record(b"a"), record(b"b")])
    with pytest.raises(Unavailable, match=r"were not sent \(a partition is unavailable"):
        await writer.write([record(b"c")])
    assert writer.in_flight_bytes == 2
    sender.away.clear()
    await until(lambda: writer.idle)
    await writer.write([record(b"d")])
    assert [value for _, value in sorted(sender.log.items())] == [b"a", b"b", b"d"]
    assert [seq for _, seq in sorted(sender.log)] == [1, 2, 3]
    assert writer.in_flight_bytes == 0


async def test_over_a_line_what_failed_is_the_end_of_an_epoch() -> None:
    sender, clock = Scripted(), ManualClock(7)
    writer = ChannelWriter("c", sender, "gateway", clock, 5, retry=False)
    await writer.write([record()])
    sender.failure = Unavailable("the middleware", "away")
    with pytest.raises(Unavailable, match="away"):
        await writer.write([record(), record()])
    sender.failure = None
    await writer.write([record()])
    assert sender.numbers == [[(7, 1)], [(7, 2), (7, 3)], [(8, 1)]]


async def test_a_record_that_is_refused_is_told_to_its_own_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    sender = Partitioned()
    writer = ChannelWriter("c", sender, "gateway", ManualClock(7), 5)
    sender.wrong = {b"wrong"}
    sender.go.clear()
    calls = []
    for value in (b"first", b"a", b"wrong", b"b"):
        calls.append(asyncio.create_task(writer.write([record(value)])))
        await asyncio.sleep(0)
    await until(lambda: sender.batches)
    sender.go.set()
    heard = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(one) for one in heard] == [type(None), type(None), Refused, type(None)]
    await writer.write([record(b"c")])
    assert sender.log == {(7, 1): b"first", (7, 2): b"a", (7, 4): b"b", (8, 1): b"c"}
    assert "channel c did not acknowledge all of gateway/7: 3–3" in caplog.text


async def test_who_waits_too_long_hears_whether_its_records_may_be_there() -> None:
    sender, clock = Scripted(), SystemClock()
    writer = ChannelWriter("c", sender, "gateway", clock, 0.05)
    sender.go.clear()
    first = asyncio.create_task(writer.write([record(b"first")]))
    await until(lambda: sender.batches)
    second = asyncio.create_task(writer.write([record(b"second")]))
    with pytest.raises(Unavailable, match="may be there"):
        await first
    with pytest.raises(Unavailable, match="were not sent"):
        await second
    with pytest.raises(Unavailable, match="were not sent"):
        await writer.write([record(b"third")])  # At once: the batch before it is stuck.
    sender.go.set()
    await until(lambda: writer.idle)
    await writer.write([record(b"fourth")])
    assert [one.value for batch in sender.batches for one in batch] == [b"first", b"fourth"]
    assert [seq for batch in sender.numbers for _, seq in batch] == [1, 2]


async def test_a_fault_of_the_sender_leaves_nobody_waiting() -> None:
    sender = Scripted()
    writer = ChannelWriter("c", sender, "gateway", SystemClock(), 5)
    sender.failure = ZeroDivisionError()
    heard: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context))
    with pytest.raises(Unavailable, match="cancelled"):
        await writer.write([record()])
    sender.failure = None
    await writer.write([record()])
    assert sender.numbers[1][0][1] == 1


async def test_closing_waits_for_what_is_on_its_way() -> None:
    sender = Scripted()
    writer = ChannelWriter("c", sender, "gateway", SystemClock(), 5)
    sender.go.clear()
    taking = asyncio.create_task(writer.write([record()]))
    await until(lambda: sender.batches)
    closing = asyncio.create_task(writer.close(5))
    await asyncio.sleep(0)
    sender.go.set()
    await closing
    await taking


async def test_closing_gives_up_on_what_does_not_arrive() -> None:
    sender = Scripted()
    writer = ChannelWriter("c", sender, "gateway", SystemClock(), 5)
    sender.go.clear()
    taking = asyncio.create_task(writer.write([record()]))
    await until(lambda: sender.batches)
    await writer.close(0.01)
    with pytest.raises(Unavailable, match="cancelled"):
        await taking

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import pytest

from penstock.collect.bookmarks import Bookmark
from penstock.collect.dedup import DedupResult
from penstock.collect.ingest import MAX_BYTES, ChannelNames, InFlight
from penstock.core.contracts import Intake
from penstock.core.errors import Unavailable
from penstock.core.record import Origin, Record


class Held:
    """A sender that keeps each send open until the test ends it."""

    def __init__(self) -> None:
        self.sends: list[tuple[str, asyncio.Future[None]]] = []

    async def send(self, channel: str, records: Sequence[Record]) -> None:
        self.sends.append((channel, asyncio.get_running_loop().create_future()))
        await self.sends[-1][1]


class Settled:
    """What was settled, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[int, Exception | None]] = []

    def intake(self, which: int) -> Intake:
        async def settle(error: Exception | None) -> None:
            self.told.append((which, error))

        return Intake((), settle)


async def turns() -> None:
    """Let everything run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


def window_of(sender: Held) -> InFlight:
    return InFlight(
        lambda channel, records: asyncio.ensure_future(sender.send(channel, records)),
        ChannelNames("into", "dead", "heartbeats", "bookmarks"),
        Bookmark(),
    )


def one(seq: int, notices: bool = False) -> DedupResult:
    origin = Origin("a", 1, seq, 0)
    return DedupResult(
        [Record(b"", origin)], runs=[("a", 1, seq, seq)], notices=[Record(b"")] if notices else [], last=seq
    )


async def test_intakes_are_sent_side_by_side_and_settled_in_order() -> None:
    sender, settled = Held(), Settled()
    window = window_of(sender)
    settling = asyncio.create_task(window.settle())
    for seq in (1, 2, 3):
        window.send(settled.intake(seq), one(seq), received=seq, size=1)
    await turns()
    assert len(sender.sends) == 3
    sender.sends[2][1].set_result(None)
    sender.sends[1][1].set_result(None)
    await turns()
    assert settled.told == []
    assert window.bookmark.numbers.contiguous() == {}
    sender.sends[0][1].set_result(None)
    await window.settled()
    assert settled.told == [(1, None), (2, None), (3, None)]
    assert (window.bookmark.numbers.contiguous(), window.bookmark.last_received, window.bookmark.last) == (
        {"a": (1, 3)},
        3,
        3,
    )
    settling.cancel()


async def test_a_notice_waits_for_the_records_before_it() -> None:
    sender, settled = Held(), Settled()
    window = window_of(sender)
    settling = asyncio.create_task(window.settle())
    window.send(settled.intake(1), one(1), received=1, size=1)
    window.send(settled.intake(2), DedupResult(notices=[Record(b"")]), received=2, size=0)
    await turns()
    assert [channel for channel, _ in sender.sends] == ["into"]
    sender.sends[0][1].set_result(None)
    await turns()
    assert [channel for channel, _ in sender.sends] == ["into", "heartbeats"]
    settling.cancel()


async def test_a_failure_is_told_to_all_that_wait() -> None:
    sender, settled = Held(), Settled()
    window = window_of(sender)
    settling = asyncio.create_task(window.settle())
    for seq in (1, 2):
        window.send(settled.intake(seq), one(seq), received=seq, size=1)
    await turns()
    failure = OSError("the disk is full")
    sender.sends[0][1].set_exception(failure)
    with pytest.raises(OSError, match="the disk is full"):
        await settling
    assert settled.told == [(1, failure), (2, failure)]
    assert window.bookmark.numbers.contiguous() == {}


async def test_too_many_bytes_wait_but_one_intake_alone_never_does() -> None:
    sender, settled = Held(), Settled()
    window = window_of(sender)
    settling = asyncio.create_task(window.settle())
    await window.wait_for_space(10 * MAX_BYTES)
    window.send(settled.intake(1), one(1), received=1, size=10 * MAX_BYTES)
    waiting = asyncio.create_task(window.wait_for_space(1))
    await turns()
    assert not waiting.done()
    sender.sends[0][1].set_result(None)
    await waiting
    settling.cancel()
    with suppress(asyncio.CancelledError):
        await settling


async def test_who_is_cut_off_in_the_middle_is_told_too() -> None:
    sender, settled = Held(), Settled()
    window = window_of(sender)
    settling = asyncio.create_task(window.settle())
    for seq in (1, 2):
        window.send(settled.intake(seq), one(seq), received=seq, size=1)
    await turns()
    settling.cancel()
    with suppress(asyncio.CancelledError):
        await settling
    assert [(which, type(error)) for which, error in settled.told] == [(1, Unavailable), (2, Unavailable)]


async def test_nothing_sets_out_any_more_once_something_has_failed() -> None:
    """Nobody would wait for it, and it could arrive when another life has looked already."""
    sender, settled = Held(), Settled()
    window = window_of(sender)
    settling = asyncio.create_task(window.settle())
    window.send(settled.intake(1), one(1), received=1, size=1)
    await turns()
    sender.sends[0][1].set_exception(ConnectionError("gone"))
    await asyncio.wait((settling,))
    assert isinstance(settling.exception(), ConnectionError)
    with pytest.raises(ConnectionError, match="gone"):
        await window.wait_for_space(1)

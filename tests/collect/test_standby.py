"""A seat that one process has at a time."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from tests.collect.waiting import until

from penstock.channels.memory import MemoryChannels
from penstock.channels.sqlite import SqliteChannels
from penstock.collect.standby import LeaderLease, run_as_leader
from penstock.core.contracts import Channels, Entry, Member, RebalanceListener, Topic
from penstock.core.errors import Misconfigured, Unavailable

LEASE = timedelta(seconds=2)
SILENCE = timedelta(seconds=1)


@pytest.fixture(params=["memory", "files"])
def channels(request: pytest.FixtureRequest, tmp_path: Path) -> Channels:
    binder: Channels = (
        MemoryChannels(lease=LEASE) if request.param == "memory" else SqliteChannels(tmp_path, lease=LEASE)
    )
    binder.ensure([Topic("seats")])
    return binder


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert not [one for one in set(threading.enumerate()) - before if one.name.startswith("seat-")]


def seat(channels: Channels) -> LeaderLease:
    return LeaderLease(channels, "rsvps.seat", "seats", SILENCE)


class Holder:
    """Waits for the seat, and has it until it is told to leave or has lost it."""

    def __init__(self, channels: Channels, holding: "list[Holder]") -> None:
        self._seat, self._holding = seat(channels), holding
        self.leave = asyncio.Event()
        self.most = 0
        self.task = asyncio.create_task(self._run())

    @property
    def has_it(self) -> bool:
        return self in self._holding

    async def _run(self) -> None:
        async with self._seat.held() as lost:
            self._holding.append(self)
            self.most = len(self._holding)
            try:
                ends = [asyncio.create_task(lost.wait()), asyncio.create_task(self.leave.wait())]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for one in ends:
                    one.cancel()
            finally:
                self._holding.remove(self)


@asynccontextmanager
async def holders(*binders: Channels) -> AsyncIterator[tuple[Holder, Holder]]:
    """Two of them, the first of which has the seat."""
    holding: list[Holder] = []
    first = Holder(binders[0], holding)
    await until(lambda: first.has_it)
    second = Holder(binders[-1], holding)
    try:
        yield first, second
    finally:
        for one in (first, second):
            one.task.cancel()
        await asyncio.gather(first.task, second.task, return_exceptions=True)
        assert max(first.most, second.most) == 1


async def test_one_has_it_and_when_it_leaves_the_other_gets_it(channels: Channels) -> None:
    async with holders(channels) as (first, second):
        # For longer than a lease nothing changes.
        await asyncio.sleep(1.2 * LEASE.total_seconds())
        assert first.has_it
        assert not second.has_it
        first.leave.set()
        await until(lambda: second.has_it)


async def test_one_that_is_cancelled_has_left_it(channels: Channels) -> None:
    async with holders(channels) as (first, second):
        first.task.cancel()
        await until(lambda: second.has_it)


async def test_who_waits_can_be_cancelled_and_the_holder_does_not_notice(channels: Channels) -> None:
    async with holders(channels) as (first, second):
        second.task.cancel()
        await asyncio.gather(second.task, return_exceptions=True)
        assert first.has_it


class Faulty:
    """Channels whose members can be made to hang, or to find the binder away."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.away = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._channels, name)

    @contextmanager
    def join(
        self, group: str, channels: Sequence[str], listener: RebalanceListener, *, beginning: bool = True
    ) -> Iterator["FaultyMember"]:
        with self._channels.join(group, channels, listener, beginning=beginning) as member:
            yield FaultyMember(member, self)


class FaultyMember:
    def __init__(self, member: Member, faults: Faulty) -> None:
        self._member, self._faults = member, faults

    def read(self, most: int, wait: float) -> Sequence[Entry]:
        self._faults.goes_on.wait()
        if self._faults.away:
            raise Unavailable("the binder", "away")
        return self._member.read(most, wait)


async def test_a_holder_whose_thread_hangs_gives_it_up_before_the_other_gets_it(channels: Channels) -> None:
    faulty = Faulty(channels)
    async with holders(faulty, channels) as (first, second):  # type: ignore[arg-type]
        faulty.goes_on.clear()
        await until(lambda: not first.has_it)
        assert not second.has_it
        await until(lambda: second.has_it)
        faulty.goes_on.set()


async def test_a_holder_without_its_binder_gives_it_up_before_the_other_gets_it(channels: Channels) -> None:
    faulty = Faulty(channels)
    async with holders(faulty, channels) as (first, second):  # type: ignore[arg-type]
        faulty.away = True
        await until(lambda: not first.has_it or second.has_it)
        assert not first.has_it
        await until(lambda: second.has_it)


async def test_a_short_absence_of_the_binder_changes_nothing(channels: Channels) -> None:
    faulty = Faulty(channels)
    async with holders(faulty, channels) as (first, second):  # type: ignore[arg-type]
        faulty.away = True
        await asyncio.sleep(SILENCE.total_seconds() / 4)
        faulty.away = False
        await asyncio.sleep(LEASE.total_seconds())
        assert first.has_it
        assert not second.has_it


async def test_a_seat_in_a_channel_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="seats"):
        async with LeaderLease(MemoryChannels(None), "rsvps.seat", "seats").held():
            pass


def test_a_silence_that_is_no_time_is_misconfigured() -> None:
    with pytest.raises(Misconfigured, match="silence"):
        LeaderLease(MemoryChannels(), "rsvps.seat", "seats", timedelta(0))


# --- work that is done by who has the seat


class Shift:
    """Work that says when it is done, and by whom."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.working: set[str] = set()
        self.most = 0
        self.done = asyncio.Event()

    def by(self, who: str) -> "Callable[[], asyncio.Future[None]]":
        async def work() -> None:
            self.begun.append(who)
            self.working.add(who)
            self.most = max(self.most, len(self.working))
            try:
                await self.done.wait()
            finally:
                self.working.discard(who)

        return lambda: asyncio.ensure_future(work())


async def test_work_goes_from_one_to_the_other_and_back(channels: Channels) -> None:
    shift, first, second = Shift(), Faulty(channels), Faulty(channels)
    tasks = [asyncio.create_task(run_as_leader(seat(first), shift.by("a")))]  # type: ignore[arg-type]
    await until(lambda: shift.working == {"a"})
    tasks.append(asyncio.create_task(run_as_leader(seat(second), shift.by("b"))))  # type: ignore[arg-type]
    first.goes_on.clear()
    await until(lambda: shift.working == {"b"})
    first.goes_on.set()
    second.goes_on.clear()
    await until(lambda: shift.working == {"a"})
    second.goes_on.set()
    shift.done.set()
    await asyncio.gather(*tasks)
    assert shift.most == 1
    assert shift.begun[:3] == ["a", "b", "a"]


async def test_work_that_fails_leaves_the_seat(channels: Channels) -> None:
    async def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run_as_leader(seat(channels), fails)
    async with asyncio.timeout(5), seat(channels).held() as lost:
        assert not lost.is_set()

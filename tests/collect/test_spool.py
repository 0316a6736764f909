"""The spool, in real files; the channel before it is a double that can go away in every way."""

import asyncio
import random
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from subprocess import PIPE

import pytest
from tests.collect.waiting import until

from penstock.channels.sqlite import SqliteChannels
from penstock.collect.spool import Spool, SpoolDedup
from penstock.core.contracts import Sender, Topic
from penstock.core.errors import Misconfigured, Refused, Unavailable
from penstock.core.record import Origin, Record


class Moody:
    """A channel that takes records, or raises, or does not answer."""

    def __init__(self) -> None:
        self.mood = "takes"
        self.held: list[tuple[str, Record]] = []
        self.calls = 0
        self.again = asyncio.Event()

    async def send(self, channel: str, records: Sequence[Record]) -> None:
        self.calls += 1
        await asyncio.sleep(0)
        if self.mood == "pauses":
            await self.again.wait()
        if self.mood == "raises":
            raise Unavailable("the double", "it is away")
        if self.mood == "refuses":
            raise Refused("a record", "it is too large")
        if self.mood == "hangs":
            await asyncio.Event().wait()
        if self.mood == "takes and raises":
            # As a broker whose acknowledgement is lost.
            self.held += [(channel, record) for record in records]
            raise Unavailable("the double", "it hung up")
        self.held += [(channel, record) for record in records]

    def numbers(self, channel: str = "things") -> list[int]:
        return [record.origin.seq for name, record in self.held if name == channel and record.origin]


def record(n: int, size: int = 1) -> Record:
    return Record(b"x" * size, Origin("sender", 1, n, n), b"key", [("kind", b"test")])


@pytest.fixture
def moody() -> Moody:
    return Moody()


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(SqliteChannels(tmp_path), "source", timeout=0.05)


def taken(folder: Path) -> int:
    """Bytes of disk."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


async def test_while_the_channel_takes_records_the_disk_is_left_alone(spool: Spool, moody: Moody) -> None:
    async with spool.open(moody) as sender:
        for n in range(1, 11):
            await sender.send("things", [record(n)])
    assert moody.numbers() == list(range(1, 11))
    assert list(spool.records()) == []
    assert spool.disk.bounds("source") == {0: (0, 0)}


@pytest.mark.parametrize("mood", ["raises", "hangs"])
async def test_what_the_channel_does_not_take_is_safe_on_disk_and_goes_on_in_order(
    spool: Spool, moody: Moody, mood: str
) -> None:
    async with spool.open(moody) as sender:
        await sender.send("things", [record(1)])
        moody.mood = mood
        async with asyncio.timeout(20):
            await asyncio.gather(*(sender.send("things", [record(n)]) for n in range(2, 50)))
        assert sender.spooling
        assert [one.origin and one.origin.seq for _, one in spool.records()] == list(range(2, 50))
        assert sender.depth.records == 48
        moody.mood = "takes"
        await sender.send("things", [record(50)])
        if mood == "hangs":
            # The call that hangs is in the double's hands; a broker ends it by an error of its own.
            return
        await until(lambda: not sender.spooling)
        await sender.send("things", [record(51)])
    assert moody.numbers() == list(range(1, 52))
    assert (sender.depth.records, sender.depth.bytes) == (0, 0)


async def test_a_record_comes_out_as_it_went_in(spool: Spool, moody: Moody) -> None:
    sent = [
        record(1),
        Record(None, Origin("other", 2, 7, 9), b"gone"),
        Record(b"bare"),
        Record(b"", None, b"", [("a", b"")]),
    ]
    moody.mood = "raises"
    async with spool.open(moody) as sender:
        await sender.send("things", sent)
        await sender.send("notices", [record(2)])
        moody.mood = "takes"
        await until(lambda: not sender.spooling)
    assert [one.headers() for _, one in moody.held] == [one.headers() for one in [*sent, record(2)]]
    assert [(one.value, one.key, one.origin) for _, one in moody.held] == [
        (one.value, one.key, one.origin) for one in [*sent, record(2)]
    ]
    assert [name for name, _ in moody.held] == ["things"] * 4 + ["notices"]


async def test_another_life_finds_what_waits_and_sends_it_before_its_own(spool: Spool, moody: Moody) -> None:
    moody.mood = "raises"
    async with spool.open(moody) as sender:
        for n in range(1, 6):
            await sender.send("things", [record(n)])
    moody.mood = "takes"
    async with spool.open(moody) as again:
        assert again.spooling
        await again.send("things", [record(6)])
        await until(lambda: not again.spooling)
        await again.send("things", [record(7)])
    assert moody.numbers() == list(range(1, 8))


async def test_what_was_brought_into_the_channel_is_not_brought_again_and_leaves_the_disk(
    spool: Spool, moody: Moody, tmp_path: Path
) -> None:
    moody.mood = "raises"
    async with spool.open(moody) as sender:
        for n in range(1, 101):
            await sender.send("things", [record(n, size=200)])
        full = taken(tmp_path)
        moody.mood = "takes"
        await until(lambda: not sender.spooling)
    assert taken(tmp_path) < full / 2
    async with spool.open(moody):
        pass
    assert moody.numbers() == list(range(1, 101))


async def test_a_full_disk_makes_the_sender_wait_and_loses_nothing(tmp_path: Path, moody: Moody) -> None:
    spool = Spool(SqliteChannels(tmp_path), "source", max_bytes=1_000, timeout=0.05)
    moody.mood = "raises"
    async with spool.open(moody) as sender:
        sending = [asyncio.create_task(sender.send("things", [record(n, size=100)])) for n in range(1, 31)]
        await until(lambda: sender.full)
        await asyncio.sleep(0.1)
        done = [task for task in sending if task.done()]
        assert 0 < len(done) < 30
        assert len(list(spool.records())) == len(done)
        moody.mood = "takes"
        async with asyncio.timeout(20):
            await asyncio.gather(*sending)
        await until(lambda: not sender.spooling)
    assert moody.numbers() == list(range(1, 31))


async def test_a_disk_that_others_have_filled_makes_the_sender_wait_until_there_is_room(
    tmp_path: Path, moody: Moody
) -> None:
    free = 0
    moody.mood = "raises"
    async with Spool(SqliteChannels(tmp_path), "source", timeout=0.05, free=lambda: free).open(moody) as sender:
        sending = asyncio.create_task(sender.send("things", [record(1)]))
        await until(lambda: sender.spooling)
        await asyncio.sleep(0.05)
        assert not sending.done()
        free = 1 << 30
        await asyncio.wait_for(sending, 20)
        moody.mood = "takes"
        await asyncio.wait_for(sender.forwarded(), 20)
    assert moody.numbers() == [1]


async def test_a_disk_with_an_io_error_acknowledges_nothing_more(
    tmp_path: Path, moody: Moody, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operating system reports an error of a sync once: a second try would succeed without the records."""
    broken = False

    class Connection(sqlite3.Connection):
        def execute(self, sql: str, *args: object) -> sqlite3.Cursor:
            if broken and sql == "COMMIT":
                error = sqlite3.OperationalError("disk I/O error")
                error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
                raise error
            return super().execute(sql, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Connection))
    moody.mood = "raises"
    async with Spool(SqliteChannels(tmp_path), "source", timeout=0.05).open(moody) as sender:
        await sender.send("things", [record(1)])
        broken = True
        with pytest.raises(Unavailable, match="final"):
            await sender.send("things", [record(2)])
        broken = False
        with pytest.raises(Unavailable, match="final"):
            await sender.send("things", [record(3)])


async def test_one_that_gives_up_while_it_waits_for_room_is_forgotten(tmp_path: Path, moody: Moody) -> None:
    spool = Spool(SqliteChannels(tmp_path), "source", max_bytes=100, timeout=0.05)
    moody.mood = "raises"
    async with spool.open(moody) as sender:
        await sender.send("things", [record(1, size=100)])
        late = asyncio.create_task(sender.send("things", [record(2)]))
        await until(lambda: sender.depth.records == 2)
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        moody.mood = "takes"
        await until(lambda: not sender.spooling)
        await sender.send("things", [record(3)])
    assert moody.numbers() == [1, 3]


async def test_what_was_on_its_way_when_the_channel_fell_silent_is_there_once_and_first(
    spool: Spool, moody: Moody
) -> None:
    async with spool.open(moody) as sender:
        moody.mood = "pauses"
        async with asyncio.timeout(20):
            await asyncio.gather(*(sender.send("things", [record(n), record(n + 1)]) for n in range(1, 21, 2)))
        assert sender.spooling
        await sender.send("things", [record(21)])
        assert len(list(spool.records())) == 21
        assert moody.numbers() == []
        moody.mood = "takes"
        moody.again.set()
        await until(lambda: not sender.spooling)
        await sender.send("things", [record(22)])
    assert moody.numbers() == list(range(1, 23))
    assert (sender.depth.records, sender.depth.bytes) == (0, 0)


async def test_what_fails_after_the_channel_fell_silent_is_sent_again(spool: Spool, moody: Moody) -> None:
    async with spool.open(moody) as sender:
        moody.mood = "pauses"
        await asyncio.gather(*(sender.send("things", [record(n)]) for n in range(1, 6)))
        moody.mood, calls = "raises", moody.calls
        moody.again.set()
        await until(lambda: moody.calls > calls)
        moody.mood = "takes"
        await until(lambda: not sender.spooling)
    assert moody.numbers() == list(range(1, 6))


async def test_who_waits_for_a_silent_channel_is_free_when_it_takes_the_records_while_the_disk_is_full(
    tmp_path: Path, moody: Moody
) -> None:
    spool = Spool(SqliteChannels(tmp_path), "source", timeout=0.05, free=lambda: 0)
    async with spool.open(moody) as sender:
        moody.mood = "pauses"
        sending = asyncio.create_task(sender.send("things", [record(1)]))
        await until(lambda: sender.spooling)
        moody.again.set()
        await asyncio.wait_for(sending, 20)
        await until(lambda: not sender.spooling)
        assert (sender.depth.records, sender.depth.bytes) == (0, 0)
    assert moody.numbers() == [1]


class Full(SqliteChannels):
    """A disk that has no room for what is written while it is told so, and says it late."""

    full: asyncio.Event | None = None

    @asynccontextmanager
    async def sender(self) -> AsyncIterator[Sender]:  # type: ignore[override]  # it has the shape of one
        async with super().sender() as inner:
            disk = self

            class Writing:
                async def send(self, channel: str, records: Sequence[Record]) -> None:
                    if disk.full is not None:
                        await disk.full.wait()
                        raise Unavailable("the disk", "there is no room")
                    await inner.send(channel, records)

            yield Writing()


async def test_a_disk_that_fails_after_the_channel_took_the_record_is_forgiven(tmp_path: Path, moody: Moody) -> None:
    disk = Full(tmp_path)
    async with Spool(disk, "source", timeout=0.05).open(moody) as sender:
        moody.mood, disk.full = "pauses", asyncio.Event()
        sending = asyncio.create_task(sender.send("things", [record(1)]))
        await until(lambda: sender.spooling)
        await asyncio.sleep(0.02)
        moody.again.set()
        await sending
        disk.full.set()
        await until(lambda: not sender.spooling)
        disk.full = None
        await sender.send("things", [record(2)])
        assert (sender.depth.records, sender.depth.bytes) == (0, 0)
    assert moody.numbers() == [1, 2]


async def test_one_that_gives_up_takes_its_call_to_the_channel_with_it(tmp_path: Path, moody: Moody) -> None:
    spool = Spool(SqliteChannels(tmp_path), "source", timeout=0.05, free=lambda: 0)
    async with spool.open(moody) as sender:
        moody.mood = "pauses"
        sending = asyncio.create_task(sender.send("things", [record(1)]))
        await until(lambda: sender.spooling)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await until(lambda: not sender.spooling)
        moody.again.set()
        await asyncio.wait_for(sender.forwarded(), 20)
        await asyncio.sleep(0.02)
    assert moody.numbers() == []


async def test_a_channel_that_fails_leaves_what_is_on_its_way_into_another(spool: Spool, moody: Moody) -> None:
    class Two(Moody):
        async def send(self, channel: str, records: Sequence[Record]) -> None:
            if channel == "broken" and self.mood == "pauses":
                raise Unavailable(channel, "it is not there")
            # As a broker: what was handed over comes, whoever waits for it.
            await asyncio.shield(super().send(channel, records))

    both = Two()
    async with spool.open(both) as sender:
        both.mood = "pauses"
        sending = [asyncio.create_task(sender.send("things", [record(n)])) for n in range(1, 4)]
        sending.append(asyncio.create_task(sender.send("broken", [record(9)])))
        await until(lambda: sender.spooling)
        both.mood = "takes"
        both.again.set()
        await asyncio.gather(*sending)
        await until(lambda: not sender.spooling)
    assert both.numbers() == [1, 2, 3]
    assert both.numbers("broken") == [9]


async def test_what_the_channel_holds_of_an_earlier_life_is_not_sent_again(spool: Spool, moody: Moody) -> None:
    moody.mood = "raises"
    async with spool.open(moody) as sender:
        for n in range(1, 6):
            await sender.send("things", [record(n)])
        await sender.send("others", [record(2)])
    moody.mood = "takes"
    dedup = SpoolDedup(spool.records())
    for n in (2, 3):
        dedup.observe("things", Origin("sender", 1, n, n))
    async with spool.open(moody, dedup) as again:
        await until(lambda: not again.spooling)
        assert (again.depth.records, again.depth.bytes) == (0, 0)
    assert moody.numbers() == [1, 4, 5]
    assert moody.numbers("others") == [2]
    assert list(spool.records()) == []


async def test_an_acknowledgement_that_was_lost_makes_a_record_come_twice_and_never_less(
    spool: Spool, moody: Moody
) -> None:
    async with spool.open(moody) as sender:
        moody.mood = "takes and raises"
        await sender.send("things", [record(1)])
        moody.mood = "takes"
        await until(lambda: not sender.spooling)
    assert len(moody.numbers()) >= 2
    assert set(moody.numbers()) == {1}


async def test_what_the_channel_will_never_take_is_told_to_who_sent_it(spool: Spool, moody: Moody) -> None:
    moody.mood = "refuses"
    async with spool.open(moody) as sender:
        with pytest.raises(Refused, match="too large"):
            await sender.send("things", [record(1)])
        assert not sender.spooling


async def test_what_stays_on_disk_for_good_is_told_to_everybody(spool: Spool, moody: Moody) -> None:
    moody.mood = "raises"
    async with spool.open(moody) as sender:
        await sender.send("things", [record(1)])
        moody.mood = "refuses"
        with pytest.raises(Refused, match="too large"):
            await asyncio.wait_for(sender.forwarded(), 20)
        with pytest.raises(Refused, match="too large"):
            await sender.send("things", [record(2)])
    assert len(list(spool.records())) == 1


async def test_two_of_them_may_lie_in_the_same_place(tmp_path: Path, moody: Moody) -> None:
    moody.mood = "raises"
    one, other = (Spool(SqliteChannels(tmp_path), name, timeout=0.05) for name in ("one", "other"))
    async with one.open(moody) as first, other.open(moody) as second:
        await first.send("things", [record(1)])
        await second.send("things", [record(2)])
        moody.mood = "takes"
        await first.forwarded()
        await second.forwarded()
    assert sorted(moody.numbers()) == [1, 2]
    assert [*one.records(), *other.records()] == []


async def test_while_it_is_open_nobody_else_can_open_it(spool: Spool, moody: Moody) -> None:
    """A second one would bring the records of the first into the channel, and forget them."""
    moody.mood = "raises"
    async with spool.open(moody) as sender:
        await sender.send("things", [record(1)])
        with pytest.raises(Misconfigured, match="in use by another process"):
            async with spool.open(moody):
                pass
        assert len(list(spool.records())) == 1
        moody.mood = "takes"
        await sender.forwarded()
    async with spool.open(moody):
        assert moody.numbers() == [1]


@contextmanager
def held_elsewhere(folder: Path) -> Iterator[None]:
    """By a process, until it is killed."""
    holding = (
        "import pathlib, sys\n"
        "from penstock.channels.sqlite import SqliteChannels\n"
        f"with SqliteChannels(pathlib.Path({str(folder)!r})).hold('source'):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", holding], stdin=PIPE, stdout=PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        try:
            yield
        finally:
            holder.kill()


async def test_a_process_that_was_killed_holds_it_no_longer(tmp_path: Path, moody: Moody) -> None:
    spool = Spool(SqliteChannels(tmp_path), "source", timeout=0.05)
    spool.disk.ensure([Topic("source")])
    with held_elsewhere(tmp_path), pytest.raises(Misconfigured, match="in use by another process"):
        async with spool.open(moody):
            pass
    async with spool.open(moody) as sender:
        await sender.send("things", [record(1)])
    assert moody.numbers() == [1]


async def test_order_and_wholeness_hold_whatever_the_channel_does(tmp_path: Path) -> None:
    """By seeded moods: each number is there, and first copies are in order."""
    for seed in range(8):
        chosen, moody = random.Random(seed), Moody()
        spool = Spool(SqliteChannels(tmp_path / str(seed), sync=False), "source", timeout=0.02)
        number = 0
        for _ in range(3):
            async with spool.open(moody) as sender:
                number = await _some(chosen, moody, sender, number)
        moody.mood = "takes"
        async with spool.open(moody) as sender:
            await until(lambda: not sender.spooling)
        firsts = list(dict.fromkeys(moody.numbers()))
        assert firsts == list(range(1, number + 1)), f"seed {seed}"


async def _some(chosen: random.Random, moody: Moody, sender: Sender, number: int) -> int:
    sending = []
    for _ in range(chosen.randrange(5, 15)):
        moody.mood = chosen.choice(["takes", "takes", "raises"])
        following = range(number + 1, number + chosen.randrange(2, 9))
        sending += [asyncio.create_task(sender.send("things", [record(n)])) for n in following]
        number = following[-1]
        await asyncio.sleep(chosen.choice([0, 0, 0.001, 0.03]))
    async with asyncio.timeout(20):
        await asyncio.gather(*sending)
    return number

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.servers import RedisServer
from tests.stores.lakes import LoadedLake, ahead_of

from penstock.audit.account import Account, Outcome, Share
from penstock.audit.writers import Writer, Writers
from penstock.core.contracts import Entry, Offsets, Reader, Topic
from penstock.core.errors import Misconfigured, Unaccounted, Unavailable
from penstock.core.record import Origin
from penstock.stores.base import furthest
from penstock.stores.lake import LakeStore
from penstock.stores.loader import Loader
from penstock.stores.redis import RedisStore
from penstock.testing import ManualClock, MemoryChannels

Eventually = Callable[[Callable[[], object]], None]


@dataclass
class ListStore:
    """A store in a list, that can be away, fail after it has applied a batch, and forget."""

    every: timedelta = timedelta(0)
    rows: list[Entry] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    stands: dict[int, int] = field(default_factory=dict)
    away: bool = False
    fails_after_writing: int = 0
    opened: int = 0
    generation: str = "one"

    def open(self) -> "ListStore":
        self.opened += 1
        return self

    def begin(self, start: Offsets) -> None: ...

    def share(self) -> Share:
        return Share({}, dict(self.stands), len(self.rows))

    def positions(self) -> Offsets:
        self._answer()
        return dict(self.stands)

    def write(self, entries: Sequence[Entry], positions: Offsets) -> int:
        self._answer()
        fresh = ahead_of(self.stands, entries)
        self.rows += fresh
        self.batches.append(len(entries))
        self.stands = furthest(self.stands, positions)
        if self.fails_after_writing:
            self.fails_after_writing -= 1
            raise Unavailable("the list", "the answer was lost", retry_after=0)
        return len(fresh)

    def close(self) -> None: ...

    def _answer(self) -> None:
        if self.away:
            raise Unavailable("the list", "it is away", retry_after=0.01)


@pytest.fixture
def channels() -> MemoryChannels:
    return MemoryChannels(partitions=2)


def fill(channels: MemoryChannels, numbers: Sequence[int]) -> None:
    for number in numbers:
        channels.append("rsvps", b'{"n": %d}' % number, b"%d" % number, Origin("a", 1, number, 0).headers())


@contextmanager
def running(loader: Loader) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=loader.run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(10)
        assert not thread.is_alive()


def test_everything_is_loaded_in_order(channels: MemoryChannels, eventually: Eventually) -> None:
    store = ListStore()
    fill(channels, range(100))
    with running(Loader(channels, "rsvps", store, most=7)):
        eventually(lambda: len(store.rows) == 100)
        fill(channels, range(100, 110))
        eventually(lambda: len(store.rows) == 110)
    for partition in (0, 1):
        offsets = [entry.offset for entry in store.rows if entry.partition == partition]
        assert offsets == list(range(len(offsets)))
    assert max(store.batches) <= 7


def test_it_goes_on_where_the_store_stands(channels: MemoryChannels, eventually: Eventually) -> None:
    fill(channels, range(50))
    store = ListStore(stands={0: 10, 1: 5})
    with running(Loader(channels, "rsvps", store)):
        eventually(lambda: len(store.rows) == 35)


def test_a_store_that_is_away_is_waited_for(channels: MemoryChannels, eventually: Eventually) -> None:
    store = ListStore()
    loader = Loader(channels, "rsvps", store)
    with running(loader):
        fill(channels, range(10))
        eventually(lambda: len(store.rows) == 10)
        store.away = True
        fill(channels, range(10, 20))
        eventually(lambda: loader.figures()["state"] == "waiting")
        assert loader.figures()["why"].startswith("the list is unavailable: it is away")
        store.away = False
        eventually(lambda: len(store.rows) == 20)
        eventually(lambda: loader.figures()["state"] == "loading")
    assert loader.figures()["state"] == "stopped"


def test_a_lost_answer_doubles_nothing(channels: MemoryChannels, eventually: Eventually) -> None:
    store = ListStore(fails_after_writing=5)
    fill(channels, range(100))
    with running(Loader(channels, "rsvps", store, most=7)):
        eventually(lambda: len(store.rows) >= 100)
    assert len(store.rows) == 100
    assert store.opened == 6


def test_entries_gather_until_there_are_enough(channels: MemoryChannels, eventually: Eventually) -> None:
    store = ListStore(every=timedelta(hours=1))
    with running(Loader(channels, "rsvps", store, most=50)):
        fill(channels, range(20))
        fill(channels, range(20, 50))
        eventually(lambda: store.batches)
    assert store.batches == [50]


def test_large_entries_are_written_in_small_batches(channels: MemoryChannels, eventually: Eventually) -> None:
    store = ListStore(every=timedelta(hours=1))
    for number in range(300):
        channels.append("rsvps", b"x" * 1_000_000, b"%d" % number)
    with running(Loader(channels, "rsvps", store)):
        eventually(lambda: sum(store.batches) == 300)
    assert max(store.batches) <= 250


class Followed(MemoryChannels):
    """Channels that tell how many entries were read from them."""

    @contextmanager
    def reader(self, start: Mapping[str, Offsets], only: Any = None) -> Iterator[Any]:
        with super().reader(start, only) as reader:
            self._last: Reader = reader
            yield reader

    def read(self) -> int:
        return sum(self._last.positions("rsvps").values()) if hasattr(self, "_last") else 0


def test_what_was_read_is_written_at_the_stop(eventually: Eventually) -> None:
    channels, store = Followed(), ListStore(every=timedelta(hours=1))
    fill(channels, range(10))
    with running(Loader(channels, "rsvps", store)):
        eventually(lambda: channels.read() == 10)
    assert store.batches == [10]


def test_the_figures_add_up(channels: MemoryChannels, eventually: Eventually) -> None:
    store = ListStore()
    loader = Loader(channels, "rsvps", store)
    assert loader.figures() == {
        "count": 0,
        "rate": 0,
        "lag": 0,
        "refused": 0,
        "latency": None,
        "state": "starting",
        "why": "",
    }
    fill(channels, range(20))
    channels.append("rsvps", b"", None, [("time", b"?")])
    with running(loader):
        eventually(lambda: loader.figures()["count"] == 21)
        told = loader.figures()
    assert told["rate"] > 0
    assert told["lag"] == 0
    assert told["latency"]["count"] == 20


def test_another_channel_of_the_same_name_is_told(channels: MemoryChannels) -> None:
    fill(channels, range(3))
    with pytest.raises(Misconfigured, match="another channel of the same name; empty the store"):
        Loader(channels, "rsvps", ListStore(stands={0: 50})).run(threading.Event())


def test_refused_records_are_counted(tmp_path: Path, channels: MemoryChannels, eventually: Eventually) -> None:
    fill(channels, range(5))
    channels.append("rsvps", b'{"n": "?"}')
    loader = Loader(channels, "rsvps", LoadedLake(LakeStore(str(tmp_path / "lake"), "rsvps"), typed=True))
    with running(loader):
        eventually(lambda: loader.figures()["count"] == 5 and _taken(loader) == 6)
    account = loader.account("s")
    assert account is not None
    assert account.shares["rsvps"].outcomes[Outcome.REFUSED] == 1


def test_the_account_of_a_store_adds_up(tmp_path: Path, channels: MemoryChannels, eventually: Eventually) -> None:
    fill(channels, [*range(20), 3, 4])
    channels.append("rsvps", b'{"n": "?"}')
    lake = LoadedLake(LakeStore(str(tmp_path / "lake"), "rsvps"), typed=True)
    loader = Loader(channels, "rsvps", lake)
    assert loader.account("store:delta/rsvps") is None
    with running(loader):
        eventually(lambda: _taken(loader) == 23)
        fill(channels, [20])
        eventually(lambda: loader.figures()["count"] == 21)
    until = {partition: end for partition, (_, end) in channels.bounds("rsvps").items()}
    outcomes = {Outcome.PASSED: 21, Outcome.DUPLICATE: 2, Outcome.REFUSED: 1}
    account = loader.account("store:delta/rsvps")
    assert account is not None
    share = Share(dict.fromkeys(until, 0), until, 24, outcomes)
    assert account == Account(
        "store:delta/rsvps",
        lake.open().generation,
        account.at,
        {"rsvps": share},
        step=24,
        latency=loader.figures()["latency"],
    )


def _taken(loader: Loader) -> int:
    account = loader.account("s")
    return account.shares["rsvps"].taken if account else 0


class Trimmed(MemoryChannels):
    """Channels that no longer hold their first entries."""

    first = 5

    @contextmanager
    def reader(self, start: Mapping[str, Offsets], only: Any = None) -> Iterator[Any]:
        with super().reader({name: {0: at.get(0) or self.first} for name, at in start.items()}, only) as reader:
            yield reader

    def bounds(self, channel: str) -> Mapping[int, tuple[int, int]]:
        return {0: (self.first, super().bounds(channel)[0][1])}


def test_what_the_channel_held_no_more_is_not_in_the_account(redis_server: RedisServer, eventually: Eventually) -> None:
    channels = Trimmed()
    fill(channels, range(20))
    for _ in range(2):
        loader = Loader(channels, "rsvps", RedisStore(redis_server.url, "rsvps"))
        with running(loader):
            eventually(lambda loader=loader: _taken(loader) == 15)  # type: ignore[misc]  # bound now
        channels.first = 12
    account = loader.account("s")
    assert account is not None
    assert (account.shares["rsvps"].since, account.shares["rsvps"].until) == ({0: 5}, {0: 20})


def test_a_redis_that_is_killed_and_comes_back_misses_nothing(
    own_redis: RedisServer, channels: MemoryChannels, eventually: Eventually
) -> None:
    loader = Loader(channels, "rsvps", RedisStore(own_redis.url, "rsvps"), most=50)
    with running(loader):
        fill(channels, range(500))
        eventually(lambda: loader.figures()["count"] > 0)
        own_redis.kill()
        fill(channels, range(500, 1_000))
        eventually(lambda: loader.figures()["state"] == "waiting")
        own_redis.start()
        with own_redis.client() as client:
            eventually(lambda: client.zcard("penstock:rsvps:index") == 1_000)
    assert _taken(loader) == 1_000


def test_a_redis_that_comes_back_empty_is_filled_again(
    own_redis: RedisServer, channels: MemoryChannels, eventually: Eventually
) -> None:
    fill(channels, range(100))
    with running(Loader(channels, "rsvps", RedisStore(own_redis.url, "rsvps"))), own_redis.client() as client:
        eventually(lambda: client.zcard("penstock:rsvps:index") == 100)
        client.flushall()
        fill(channels, [100])
        eventually(lambda: client.zcard("penstock:rsvps:index") == 101)


def test_what_retention_took_unread_ends_a_loader_or_is_skipped(eventually: Eventually) -> None:
    clock = ManualClock()
    channels, store = MemoryChannels(None, clock), ListStore()
    channels.ensure([Topic("rsvps", retention=timedelta(hours=5))])

    def hours(first: int, count: int) -> None:
        for number in range(first, first + count):
            fill(channels, [number])
            clock.move(3_600)

    hours(0, 3)
    with running(Loader(channels, "rsvps", store)):
        eventually(lambda: len(store.rows) == 3)
    hours(3, 20)
    low = channels.bounds("rsvps")[0][0]
    assert low > 3
    with pytest.raises(Unaccounted, match="rsvps"):
        Loader(channels, "rsvps", store).run(threading.Event())
    assert len(store.rows) == 3
    with running(Loader(channels, "rsvps", store, skip_lost=True)):
        eventually(lambda: len(store.rows) == 3 + 23 - low)
    assert [entry.offset for entry in store.rows] == [0, 1, 2, *range(low, 23)]


def test_rows_that_the_query_has_not_written_are_not_loaded(channels: MemoryChannels, eventually: Eventually) -> None:
    writer = Writer("rsvps", "a1", "q", 0, "", {})
    channels.append("marks", writer.dumps(), writer.key)
    for token in (b"a1", b"b2", b"", b"a1"):
        channels.append("rsvps", token, b"k", [("writer", token)] if token else [])
    store = ListStore()
    with running(Loader(channels, "rsvps", store, writers=Writers(channels, ["marks"]))):
        eventually(lambda: len(store.rows) == 2)
        eventually(lambda: sum(store.stands.values()) == 4)
    assert [entry.value for entry in store.rows] == [b"a1", b"a1"]

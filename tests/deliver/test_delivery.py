"""The delivery without HTTP: it continues after an outage, and raises other errors."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.audit.odd import Marked

from penstock.audit.account import Account, Outcome, Share
from penstock.audit.writers import Writer
from penstock.core.clock import SystemClock
from penstock.core.contracts import Entry, Offsets, Reader
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.settings import load
from penstock.deliver.app import build, serve
from penstock.deliver.delivery import DeliverSettings, Delivery, FeedSpec, LiveFeed
from penstock.testing import ManualClock, MemoryChannels


class Shaky(MemoryChannels):
    """Channels whose reader raises each of `failures`, after a batch."""

    def __init__(self, *failures: Exception) -> None:
        super().__init__(partitions=2)
        self.failures = list(failures)
        self.starts: list[Mapping[str, Offsets]] = []

    @contextmanager
    def reader(self, start: Mapping[str, Offsets], *how: Any, **more: Any) -> Iterator[Any]:
        self.starts.append(start)
        with super().reader(start, *how, **more) as steady:
            yield _ShakyReader(self, steady)


class _ShakyReader:
    def __init__(self, channels: Shaky, steady: Reader) -> None:
        self._channels, self._steady = channels, steady

    def read(self, most: int, wait: float) -> Sequence[Entry]:
        entries = self._steady.read(2, wait)
        if not entries and self._channels.failures:
            raise self._channels.failures.pop(0)
        return entries

    def positions(self, channel: str) -> Offsets:
        return self._steady.positions(channel)

    def age(self) -> float:
        return self._steady.age()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 # what is waited for has no event
            await asyncio.sleep(0.01)


def delivery_of(channels: MemoryChannels) -> Delivery:
    return Delivery(channels, [FeedSpec("f", "f", "id")], "status", SystemClock())


async def test_reading_continues_after_an_outage() -> None:
    channels = Shaky(Unavailable("kafka", "no answer", 0.01), Unavailable("kafka", "no answer", 0.01))
    for n in range(5):
        channels.append("f", b'{"n": 1}', b"[%d]" % n)
    delivery = delivery_of(channels)
    async with delivery.running():
        await until(lambda: len(channels.starts) == 3)
        channels.append("f", b'{"n": 1}', b"[99]")
        await until(lambda: len(delivery.feeds["f"].feed) == 6)
    assert sum(channels.starts[-1]["f"].values()) == 5
    assert delivery.feeds["f"].count == 6


async def test_the_account_of_a_feed_counts_each_entry_once() -> None:
    channels = Shaky(*(Unavailable("kafka", "no answer", 0.01) for _ in range(3)))
    for n in range(5):
        channels.append("f", b'{"n": 1}', b"[%d]" % n)
    channels.append("f", b"?", b"[0]")
    delivery = delivery_of(channels)
    assert delivery.accounts() == []
    async with delivery.running():
        await until(lambda: len(channels.starts) == 4)
        channels.append("f", b'{"n": 2}', b"[99]")
        await until(lambda: delivery.feeds["f"].count == 7)
        [account] = delivery.accounts()
    share = account.shares["f"]
    assert (account.stage, account.step, share.taken) == ("feed:f", 7, 7)
    assert share.outcomes == {Outcome.PASSED: 6, Outcome.DUPLICATE: 0, Outcome.REFUSED: 1}
    assert share.since == {0: 0, 1: 0}
    assert share.until == {partition: end for partition, (_, end) in channels.bounds("f").items()}


async def test_an_outage_is_in_the_status_until_it_ends() -> None:
    channels = Shaky(Unavailable("kafka", "no answer", 0.3))
    delivery = delivery_of(channels)
    async with delivery.running():
        await until(lambda: delivery.trouble is not None)
        page = delivery.figures()["page"]
        assert isinstance(page, dict)
        assert page["state"] == "reading"
        assert page["note"] == "kafka is unavailable: no answer; trying again in 0.3 s"
        await until(lambda: delivery.trouble is None)


async def test_serving_ends_with_the_error_of_the_reader() -> None:
    app = build(Shaky(ZeroDivisionError("a fault")), [FeedSpec("f", "f")], [], {}, "status", "title")
    async with asyncio.timeout(20):
        with pytest.raises(ZeroDivisionError, match="a fault"):
            await serve(app, "127.0.0.1", 0, asyncio.Event())


async def test_a_used_port_is_misconfigured() -> None:
    stop, address = asyncio.Event(), asyncio.get_running_loop().create_future()
    first = asyncio.create_task(
        serve(build(MemoryChannels(), [], [], {}, "status", "title"), "127.0.0.1", 0, stop, address.set_result)
    )
    port = int((await address).rpartition(":")[2])
    with pytest.raises(Misconfigured, match=f"127.0.0.1:{port}: .*in use.*choose another port"):
        await serve(build(MemoryChannels(), [], [], {}, "status", "title"), "127.0.0.1", port, asyncio.Event())
    stop.set()
    await first


async def test_offsets_without_a_record_at_the_end_do_not_block_it() -> None:
    channels = Marked()
    channels.append("f", b'{"n": 1}', b"[1]")
    delivery = delivery_of(channels)
    async with delivery.running(), asyncio.timeout(4):
        await delivery.ready.wait()
    assert delivery.feeds["f"].count == 1


async def test_rows_of_other_writers_are_not_shown() -> None:
    channels = MemoryChannels()
    writer = Writer("f", "a1", "q", 0, "", {})
    channels.append("marks", writer.dumps(), writer.key)
    channels.append("f", b'{"n": 1}', b"[1]", [("writer", b"a1"), ("version", b"1")])
    channels.append("f", b'{"n": 2}', b"[1]", [("version", b"999999")])
    channels.append("f", b'{"n": 3}', b"[1]", [("writer", b"a1"), ("version", b"3")])
    delivery = Delivery(channels, [FeedSpec("f", "f", "id")], "status", SystemClock(), "marks")
    async with delivery.running():
        await until(lambda: delivery.feeds["f"].feed.received == 2)
    assert delivery.feeds["f"].feed.passed == 2


# --- one feed ---


def entry(offset: int, partition: int = 0, version: int = 0) -> Entry:
    return Entry("c", partition, offset, 0, b"[%d]" % partition, b"{}", (("version", b"%d" % (version or offset)),))


def live_feed(clock: ManualClock | None = None) -> LiveFeed:
    return LiveFeed(FeedSpec("f", "c", "topic", start={0: 5}), clock or ManualClock())


def share(live_feed: LiveFeed) -> Share:
    account = live_feed.account
    assert account is not None
    return account.shares["c"]


def test_before_reading_starts_there_is_no_account() -> None:
    assert live_feed().account is None


def test_an_account_has_the_start_and_the_outcomes() -> None:
    clock = ManualClock(9)
    one = live_feed(clock)
    one.begin({0: 5, 1: 0})
    one.apply([entry(5), entry(6), entry(8, version=6)], {})
    account = one.account
    assert account is not None
    outcomes = {Outcome.PASSED: 2, Outcome.DUPLICATE: 1, Outcome.REFUSED: 0}
    expected = Share({0: 5, 1: 0}, {0: 9, 1: 0}, 3, outcomes)
    assert account == Account("feed:f", account.generation, 9, {"c": expected}, step=3)


def test_entries_that_are_read_again_are_counted_once() -> None:
    one = live_feed()
    one.begin({0: 5})
    one.apply([entry(5), entry(6)], {})
    one.apply([entry(5), entry(6), entry(7)], {})
    assert (share(one).taken, share(one).until) == (3, {0: 8})


def test_a_partition_with_entries_keeps_its_first_start() -> None:
    """One that brought nothing yet starts where it is read the next time."""
    one = live_feed()
    one.begin({0: 5, 1: 3})
    one.apply([entry(5)], {})
    one.begin({0: 6, 1: 4})
    assert (share(one).since, share(one).until) == ({0: 5, 1: 4}, {0: 6, 1: 4})


def test_each_process_is_a_generation() -> None:
    one, two = live_feed(), live_feed()
    one.begin({})
    two.begin({})
    first, second = one.account, two.account
    assert first
    assert second
    assert first.generation != second.generation


def test_an_account_is_not_half_of_a_batch() -> None:
    """What was asked for before a batch stays as it was."""
    one = live_feed()
    one.begin({0: 0})
    before = share(one)
    one.apply([entry(0), entry(1)], {})
    assert (before.taken, before.until) == (0, {0: 0})


# --- settings ---


def test_sites_are_listed_in_the_environment_with_commas(tmp_path: Path) -> None:
    environ = {
        "PENSTOCK_DELIVER_ORIGINS": "https://a.example, https://b.example",
        "PENSTOCK_DELIVER_IDLE_TIMEOUT": "2 s",
    }
    section = load({"deliver": DeliverSettings}, tmp_path, environ=environ)["deliver"]
    assert isinstance(section, DeliverSettings)
    assert section.origins == ("https://a.example", "https://b.example")
    assert section.idle_timeout.total_seconds() == 2

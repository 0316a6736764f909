"""What every store promises, with real servers. A new store passes this or is not done."""

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest
from deltalake import DeltaTable
from tests.servers import RedisServer
from tests.stores import filling
from tests.stores.lakes import LoadedLake
from tests.stores.tampering import LakeTampering, RedisTampering

from penstock.audit.account import Outcome, Share
from penstock.audit.judge import Discrepancy
from penstock.audit.reconcile import Check, RecordCheck, TableCheck
from penstock.core.clock import SystemClock
from penstock.core.contracts import Channels, Entry
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.record import Origin
from penstock.stores.base import Loadable, Store
from penstock.stores.lake import LakeStore
from penstock.stores.lake_rows import LakeRows
from penstock.stores.loader import Loader
from penstock.stores.redis import RedisStore
from penstock.testing import MemoryChannels


class Kin(Protocol):
    """A store under test, and a look at it that does not go through it."""

    name: str
    location: str

    def describe(self, topic_id: str = "one") -> Loadable: ...

    def content(self) -> object: ...

    def expected(self, numbers: Sequence[int]) -> object:
        """What has to be there after the records with these numbers, in this order."""

    def outcomes(self, some: Sequence[Entry]) -> list[int]:
        """What has to become of these entries: passed, duplicate, refused."""

    def check(self, channels: Channels) -> Check:
        """Its comparison with the channel."""

    def tampering(self) -> LakeTampering | RedisTampering:
        """What changes its rows behind the back of the loader."""


class RedisKin:
    name = "redis"

    def __init__(self, server: RedisServer) -> None:
        self.location = server.url
        self._client = server.client()

    def describe(self, topic_id: str = "one") -> Loadable:
        return RedisStore(self.location, filling.CHANNEL, topic_id=topic_id)

    def content(self) -> object:
        start = f"penstock:{filling.CHANNEL}:"
        keys: Any = self._client.zrange(f"{start}index", 0, -1)
        return {key.decode(): json.loads(self._client.hget(f"{start}row:{key.decode()}", "row") or "") for key in keys}

    def expected(self, numbers: Sequence[int]) -> object:
        newest: dict[str, int] = {}
        for number in numbers:
            key = f"k{number % filling.KEYS}"
            newest[key] = max(number, newest.get(key, -1))
        return {key: {"n": number} for key, number in newest.items()}

    def outcomes(self, some: Sequence[Entry]) -> list[int]:
        newest: dict[bytes | None, int] = {}
        passed = 0
        for entry in some:
            version = int(dict(entry.headers)["version"])
            if version > newest.get(entry.key, -1):
                newest[entry.key] = version
                passed += 1
        return [passed, len(some) - passed, 0]

    def check(self, channels: Channels) -> Check:
        store = RedisStore(self.location, filling.CHANNEL).open()
        return TableCheck("store:redis/rsvps", filling.CHANNEL, store, channels, SystemClock())

    def tampering(self) -> LakeTampering | RedisTampering:
        return RedisTampering(self._client, filling.CHANNEL)


class LakeKin:
    name = "lake"

    def __init__(self, folder: Path) -> None:
        self.location = str(folder / "lake")

    def describe(self, topic_id: str = "one") -> Loadable:
        return LoadedLake(LakeStore(self.location, filling.CHANNEL, topic_id), typed=True)

    def content(self) -> object:
        rows = DeltaTable(self.location).to_pyarrow_table().to_pylist()
        assert all(row["_seq"] == row["n"] // 5 for row in rows)
        return sorted(row["n"] for row in rows)

    def expected(self, numbers: Sequence[int]) -> object:
        return sorted(set(numbers))

    def outcomes(self, some: Sequence[Entry]) -> list[int]:
        numbers = [json.loads(entry.value or b"")["n"] for entry in some]
        refused = numbers.count("?")
        passed = len(set(numbers) - {"?"})
        return [passed, len(numbers) - passed - refused, refused]

    def check(self, channels: Channels) -> Check:
        return RecordCheck("store:delta/rsvps", filling.CHANNEL, LakeRows(self.location, filling.CHANNEL), channels)

    def tampering(self) -> LakeTampering | RedisTampering:
        return LakeTampering(self.location)


@pytest.fixture(params=["redis", "lake"])
def kin(request: pytest.FixtureRequest, tmp_path: Path) -> Kin:
    if request.param == "redis":
        return RedisKin(request.getfixturevalue("redis_server"))
    return LakeKin(tmp_path)


def entries(*numbers: int, start: int = 0, partition: int = 0) -> list[Entry]:
    return [
        Entry(
            filling.CHANNEL,
            partition,
            start + index,
            1_700_000_000_000_000,
            b"k%d" % (number % filling.KEYS),
            b'{"n": %d}' % number,
            (*Origin(f"s{number % 5}", 1, number // 5, number).headers(), ("version", b"%d" % number)),
        )
        for index, number in enumerate(numbers)
    ]


def totals(store: Store) -> tuple[int, ...]:
    """Taken, passed, duplicate, refused."""
    told = store.share()
    return (told.taken, *(told.outcomes[one] for one in (Outcome.PASSED, Outcome.DUPLICATE, Outcome.REFUSED)))


def test_a_new_store_stands_nowhere(kin: Kin) -> None:
    store = kin.describe().open()
    assert store.positions() == {}
    store.close()


def test_a_batch_is_applied_with_its_positions(kin: Kin) -> None:
    store = kin.describe().open()
    assert store.write(entries(1, 2, 3), {0: 3, 1: 0}) == 3
    assert kin.content() == kin.expected([1, 2, 3])
    assert store.positions() == {0: 3, **({1: 0} if 1 in store.positions() else {})}
    store.close()


def test_writing_a_batch_again_changes_nothing(kin: Kin) -> None:
    store = kin.describe().open()
    store.write(entries(1, 2, 3), {0: 3})
    assert store.write(entries(1, 2, 3), {0: 3}) == 0
    store.close()
    again = kin.describe().open()
    assert again.write(entries(1, 2, 3), {0: 3}) == 0
    assert again.positions() == {0: 3}
    assert kin.content() == kin.expected([1, 2, 3])
    again.close()


def test_a_batch_that_overlaps_is_applied_once(kin: Kin) -> None:
    store = kin.describe().open()
    store.write(entries(1, 2, 3), {0: 3})
    assert store.write(entries(2, 3, 4, 5, start=1), {0: 5}) == 2
    assert store.positions() == {0: 5}
    assert kin.content() == kin.expected([1, 2, 3, 4, 5])
    store.close()


def test_an_old_batch_does_not_move_the_positions_back(kin: Kin) -> None:
    store = kin.describe().open()
    store.write(entries(1, 2, 3), {0: 3})
    assert store.write(entries(1), {0: 1}) == 0
    assert store.positions() == {0: 3}
    store.close()


def test_a_record_that_the_channel_holds_twice_is_there_once(kin: Kin) -> None:
    store = kin.describe().open()
    assert store.write(entries(1, 1, 2), {0: 3}) == 2
    assert store.write(entries(1, 2, start=3), {0: 5}) == 0
    assert store.positions() == {0: 5}
    assert kin.content() == kin.expected([1, 2])
    store.close()


def test_partitions_are_kept_apart(kin: Kin) -> None:
    store = kin.describe().open()
    store.write([*entries(1, 2), *entries(3, 4, 5, partition=7)], {0: 2, 7: 3})
    assert store.write([*entries(1, 2, 6), *entries(3, partition=7)], {0: 3, 7: 1}) == 1
    assert store.positions() == {0: 3, 7: 3}
    assert kin.content() == kin.expected([1, 2, 3, 4, 5, 6])
    store.close()


def test_positions_may_move_without_entries(kin: Kin) -> None:
    """Transaction markers use offsets, too."""
    store = kin.describe().open()
    assert store.write([], {0: 5}) == 0
    store.close()
    assert kin.describe().open().positions() == {0: 5}


def test_what_was_written_is_there_after_opening_again(kin: Kin) -> None:
    store = kin.describe().open()
    store.write(entries(1, 2, 3), {0: 3})
    store.close()
    again = kin.describe().open()
    assert again.positions() == {0: 3}
    assert again.write(entries(3, 4, start=3), {0: 5}) == 1
    assert kin.content() == kin.expected([1, 2, 3, 4])
    again.close()


def test_two_loaders_by_mistake_apply_nothing_twice(kin: Kin) -> None:
    one, two = kin.describe().open(), kin.describe().open()
    assert one.positions() == two.positions() == {}
    assert one.write(entries(1, 2, 3), {0: 3}) == 3
    try:
        assert two.write(entries(1, 2, 3, 4), {0: 4}) == 1
    except Unavailable:
        # The loader opens it anew then.
        two = kin.describe().open()
        assert two.write(entries(4, start=3), {0: 4}) == 1
    assert kin.content() == kin.expected([1, 2, 3, 4])
    one.close()
    two.close()


def test_what_was_taken_is_counted_with_what_became_of_it(kin: Kin) -> None:
    store = kin.describe().open()
    assert totals(store) == (0, 0, 0, 0)
    store.write([*entries(1, 2, 2), *entries(3, partition=2)], {0: 3, 2: 1})
    assert store.share() == Share({0: 0, 2: 0}, {0: 3, 2: 1}, 4, store.share().outcomes)
    assert totals(store) == (4, 3, 1, 0)
    store.close()


def test_a_batch_of_nothing_new_is_counted_too(kin: Kin) -> None:
    store = kin.describe().open()
    store.write(entries(1, 2), {0: 2})
    assert store.write(entries(1, 2, 1, start=2), {0: 5}) == 0
    store.close()
    assert totals(kin.describe().open()) == (5, 2, 3, 0)


def test_an_entry_is_counted_once(kin: Kin) -> None:
    """However often it is written, and whatever lies around it in the batch."""
    store = kin.describe().open()
    store.write(entries(1, 2, 3), {0: 3})
    store.write(entries(1, 2, 3), {0: 3})
    store.write(entries(2, 3, 4, 5, start=1), {0: 5})
    store.write([], {0: 7})
    assert totals(store) == (5, 5, 0, 0)
    store.close()
    again = kin.describe().open()
    again.write(entries(1, 2, 3, 4, 5), {0: 5})
    assert (again.share().since, again.share().until, *totals(again)) == ({0: 0}, {0: 7}, 5, 5, 0, 0)
    again.close()


def test_two_loaders_by_mistake_count_once(kin: Kin) -> None:
    one, two = kin.describe().open(), kin.describe().open()
    one.positions()
    two.positions()
    one.write(entries(1, 2, 2), {0: 3})
    try:
        two.write(entries(1, 2, 2, 4), {0: 4})
    except Unavailable:
        two = kin.describe().open()
        two.write(entries(1, 2, 2, 4), {0: 4})
    assert totals(one) == totals(two) == (4, 3, 1, 0)
    assert one.generation == two.generation
    # What the other one wrote is known, too.
    assert one.write(entries(4, 5, start=4), {0: 6}) == 1
    assert totals(two) == (6, 4, 2, 0)
    one.close()
    two.close()


def test_counting_begins_where_reading_did(kin: Kin) -> None:
    """A channel that has lost its oldest entries; those of a partition that stands are counted from its first."""
    store = kin.describe().open()
    store.begin({0: 50, 1: 7})
    assert (store.share().since, store.share().until) == ({0: 50, 1: 7}, {0: 50, 1: 7})
    store.write(entries(1, 2, start=50), {0: 52, 1: 7})
    store.close()
    again = kin.describe().open()
    again.begin({0: 52, 1: 7})
    again.write(entries(3, start=52), {0: 53})
    assert (again.share().since, again.share().until) == ({0: 50, 1: 7}, {0: 53, 1: 7})
    assert totals(again) == (3, 3, 0, 0)
    again.close()


def test_a_store_keeps_its_life(kin: Kin) -> None:
    store = kin.describe().open()
    first = store.generation
    store.write(entries(1), {0: 1})
    assert store.generation == first
    store.close()
    again = kin.describe().open()
    again.positions()
    assert again.generation == first
    again.close()


def test_a_store_of_another_topic_is_refused(kin: Kin) -> None:
    store = kin.describe("one").open()
    store.write(entries(1), {0: 1})
    store.close()

    def stands(topic_id: str) -> object:
        return kin.describe(topic_id).open().positions()

    with pytest.raises(Misconfigured, match=r"it was filled from another topic named rsvps \(one, now two\); \w+"):
        stands("two")
    assert stands("one") == stands("") == {0: 1}


def test_odd_entries_do_no_harm(kin: Kin) -> None:
    good, *odd = entries(1, 2, 3, 4, 5)
    odd = [
        replace(odd[0], value=None),
        replace(odd[1], key=None, headers=(("version", b"?"), ("seq", b"?"))),
        replace(odd[2], value=b"\xff", key=b"\xff\x00{}"),
        replace(odd[3], appended=-1, headers=(("version", b"9" * 30),)),
    ]
    store: Store = kin.describe().open()
    store.write([good, *odd], {0: 5})
    assert store.positions() == {0: 5}
    assert store.write([good, *odd], {0: 5}) == 0
    taken, *became = totals(store)
    assert taken == 5 == sum(became)
    store.close()


def test_a_writer_killed_at_any_moment_leaves_an_exact_store(
    kin: Kin, eventually: Callable[[Callable[[], object]], None]
) -> None:
    """kill -9 of the loader's process, again and again; then content and totals are what they have to be."""
    channels = filling.filled()
    done = {partition: end for partition, (_, end) in channels.bounds(filling.CHANNEL).items()}
    command = [sys.executable, "-m", filling.__name__, kin.name, kin.location]
    chance, kills = random.Random(5), 0
    watched = kin.describe().open()

    def loaded() -> int:
        return sum(watched.positions().values())

    while True:
        before, child = loaded(), subprocess.Popen(command, cwd=Path(filling.__file__).parents[2])
        due = before + chance.randrange(1, sum(done.values()) // 5)
        eventually(lambda due=due, child=child: loaded() >= due or child.poll() is not None)  # type: ignore[misc]  # bound now
        if child.poll() is not None:
            break
        child.send_signal(signal.SIGKILL)
        child.wait()
        kills += 1
    assert child.returncode == 0
    assert kills >= 3
    assert watched.positions() == done
    numbers = [json.loads(entry.value or b"")["n"] for entry in channels.entries(filling.CHANNEL)]
    assert kin.content() == kin.expected([number for number in numbers if number != "?"])
    taken, *became = totals(watched)
    assert taken == len(numbers) == sum(became)
    assert became == kin.outcomes(channels.entries(filling.CHANNEL))
    assert watched.share().since == dict.fromkeys(done, 0)
    watched.close()


def loaded(kin: Kin) -> MemoryChannels:
    """The store, filled from a channel by its loader."""
    channels, stop = filling.filled(), threading.Event()
    store = kin.describe().open()
    done = {partition: end for partition, (_, end) in channels.bounds(filling.CHANNEL).items()}
    loader = threading.Thread(target=Loader(channels, filling.CHANNEL, kin.describe(), most=5_000).run, args=(stop,))
    loader.start()
    until = time.monotonic() + 60
    while store.positions() != done:
        assert time.monotonic() < until
        time.sleep(0.05)
    stop.set()
    loader.join()
    store.close()
    return channels


def compared(check: Check, times: int = 4) -> tuple[Discrepancy, ...]:
    for _ in range(times):
        check.turn()
    assert check.complete
    return check.discrepancies()


def test_a_row_that_is_removed_doubled_or_changed_is_named(kin: Kin) -> None:
    channels, chance = loaded(kin), random.Random(3)
    check, tampering = kin.check(channels), kin.tampering()
    assert compared(check) == ()
    for kind in tampering.KINDS:
        harm = tampering.harm(kind, chance)
        found = {one.kind: one for one in compared(check)}
        assert harm.kind in found, kind
        assert found[harm.kind].count == harm.count
        assert any(name.startswith((f"{harm.name}", f"key {harm.name}")) for name in found[harm.kind].examples)
        harm.heal()
        assert compared(check) == ()
    check.close()


def test_what_is_still_to_be_loaded_is_not_missing(kin: Kin) -> None:
    channels, store = filling.filled(), kin.describe().open()
    check = kin.check(channels)
    assert compared(check) == ()
    some = [entry for entry in channels.entries(filling.CHANNEL) if entry.offset < 1_000]
    store.write(some, dict.fromkeys({entry.partition for entry in some}, 1_000))
    assert compared(check) == ()
    store.close()
    check.close()

"""What every store promises, with real servers. A new store passes this or is not done."""

import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest
from deltalake import DeltaTable
from tests.stores import filling
from tests.stores.conftest import RedisServer

from penstock.contracts import Entry, Guarantee, Store
from penstock.errors import Misconfigured, Unavailable
from penstock.record import Origin
from penstock.stores.lake import LakeStore
from penstock.stores.loading import Loadable
from penstock.stores.redis import RedisStore


class Kin(Protocol):
    """A store under test, and a look at it that does not go through it."""

    name: str
    place: str

    def describe(self, topic_id: str = "one") -> Loadable: ...

    def content(self) -> object: ...

    def expected(self, numbers: Sequence[int]) -> object:
        """What has to be there after the records with these numbers, in this order."""


class RedisKin:
    name = "redis"

    def __init__(self, server: RedisServer) -> None:
        self.place = server.url
        self._client = server.client()

    def describe(self, topic_id: str = "one") -> Loadable:
        return RedisStore(self.place, filling.CHANNEL, topic_id=topic_id)

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


class LakeKin:
    name = "lake"

    def __init__(self, folder: Path) -> None:
        self.place = str(folder / "lake")

    def describe(self, topic_id: str = "one") -> Loadable:
        return LakeStore(self.place, filling.CHANNEL, filling.SCHEMA, topic_id=topic_id)

    def content(self) -> object:
        rows = DeltaTable(self.place).to_pyarrow_table().to_pylist()
        assert all(row["_seq"] == row["n"] // 5 for row in rows)
        return sorted(row["n"] for row in rows)

    def expected(self, numbers: Sequence[int]) -> object:
        return sorted(set(numbers))


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


def test_a_new_store_stands_nowhere(kin: Kin) -> None:
    store = kin.describe().open()
    assert store.positions() == {}
    assert store.guarantee is Guarantee.EXACTLY_ONCE
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
    store.close()


def test_a_writer_killed_at_any_moment_leaves_an_exact_store(
    kin: Kin, eventually: Callable[[Callable[[], object]], None]
) -> None:
    """kill -9 of the loader's process, again and again; then the content is what it has to be."""
    channels = filling.filled()
    done = {partition: end for partition, (_, end) in channels.bounds(filling.CHANNEL).items()}
    command = [sys.executable, filling.__file__, kin.name, kin.place]
    chance, kills = random.Random(5), 0
    watched = kin.describe().open()

    def loaded() -> int:
        return sum(watched.positions().values())

    while True:
        before, child = loaded(), subprocess.Popen(command)
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
    watched.close()

"""What is Redis' own about channels there; what it shares with the other binders is in the contract suite."""

import asyncio
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import overload
from zlib import crc32

import pytest
from tests.channels.traffic import send
from tests.servers import RedisServer

from penstock.channels.common import unpack
from penstock.channels.leases import GroupState
from penstock.channels.redis import RedisChannels, at
from penstock.channels.redis.client import Address, Arguments, Server, written
from penstock.channels.redis.sender import LIMIT, RedisSender, encode
from penstock.core.clock import duration
from penstock.core.contracts import ChannelPartition, Entry, Topic
from penstock.core.errors import Misconfigured, Refused, Unaccounted, Unavailable
from penstock.core.record import Origin, Record

Fresh = Callable[[str], str]
Eventually = Callable[..., None]


@pytest.fixture
def channels(shared_redis: RedisServer) -> RedisChannels:
    return RedisChannels(shared_redis.url)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """Starts servers that are otherwise than they should be."""
    running: list[RedisServer] = []

    def start(**options: str) -> RedisServer:
        folder = tmp_path / str(len(running))
        folder.mkdir()
        running.append(RedisServer(folder, **options))
        running[-1].start()
        return running[-1]

    yield start
    for server in running:
        server.kill()


def numbered(count: int, keys: int = 7, first: int = 1) -> list[Record]:
    return [Record(b"%d" % n, Origin("s", 1, n, n), b"k%d" % (n % keys)) for n in range(first, first + count)]


def everything(channels: RedisChannels, channel: str, start: dict[int, int] | None = None) -> list[Entry]:
    found: list[Entry] = []
    with channels.reader({channel: start or {}}) as reader:
        while some := reader.read(1_000, 0):
            found += some
    return found


def values(entries: Sequence[Entry]) -> list[int]:
    return [int(entry.value or b"0") for entry in entries]


# --- the address


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("redis://", "it has no host"),
        ("redis://host:many/0", "Port could not be cast"),
        ("redis://host/first", '"first" is not the number'),
        ("redis://host?volatile=perhaps", 'volatile is "perhaps"; write yes or no'),
        ("redis://host?retries=9", '"retries" is not a setting'),
        (
            "rediss://host?ssl_foo=1",
            '"ssl_foo" is not a setting; .*ssl_ca_certs',
        ),
        ("redis://host?ssl_ca_certs=/x", "ssl_ca_certs is a setting of TLS; write rediss://"),
        ("rediss://host?ssl_cert_reqs=maybe", 'ssl_cert_reqs is "maybe"; write none or optional or required'),
        ("redis://a..b:1/0", "label empty or too long"),
    ],
)
def test_a_wrong_address_is_told_with_the_fix(address: str, problem: str) -> None:
    with pytest.raises(Misconfigured, match=problem):
        at(address)


def test_an_address_is_shown_without_its_password() -> None:
    channels = at("rediss://me:secret@host:6380/2?volatile=yes")
    assert channels.where == "rediss://host:6380/2"
    assert "secret" not in repr(channels)


def test_a_description_travels_between_processes(shared_redis: RedisServer, fresh: Fresh) -> None:
    channel = fresh("pickled")
    channels = RedisChannels(shared_redis.url)
    channels.ensure([Topic(channel)])
    assert channel in pickle.loads(pickle.dumps(channels)).names()


def test_a_wrong_password_is_told_without_it(started: Callable[..., RedisServer]) -> None:
    server = started()
    channels = RedisChannels(server.url.replace("//", "//:wrong-one@"))
    with pytest.raises(Misconfigured, match="check user and password") as told:
        channels.names()
    assert "wrong-one" not in str(told.value)


def test_a_user_who_may_not_ask_how_it_stands_is_told(started: Callable[..., RedisServer]) -> None:
    server = started()
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "me", "on", ">secret", "~*", "+@all", "-info")
    RedisChannels(server.url).ensure([Topic("a")])
    channels = RedisChannels(server.url.replace("//", "//me:secret@"))
    with pytest.raises(Misconfigured, match="login failed"):
        send(channels, "a", numbered(1))


# --- what the server has to be


def test_a_server_that_would_drop_records_is_refused(started: Callable[..., RedisServer]) -> None:
    channels = RedisChannels(started(maxmemory_policy="allkeys-lru").url)
    with pytest.raises(Misconfigured, match=r"its maxmemory-policy is allkeys-lru.*set maxmemory-policy noeviction"):
        channels.ensure([Topic("a")])
    assert channels.names() == []


def test_a_server_that_forgets_is_refused_unless_the_address_allows_it(started: Callable[..., RedisServer]) -> None:
    url = started(appendonly="no").url
    with pytest.raises(Misconfigured, match=r"appendonly is off.*\?volatile=yes"):
        RedisChannels(url).ensure([Topic("a")])
    allowed = RedisChannels(f"{url}?volatile=yes")
    assert not allowed.promise.durable
    allowed.ensure([Topic("a")])
    send(allowed, "a", numbered(3))
    assert values(everything(allowed, "a")) == [1, 2, 3]


def test_a_server_that_begins_to_forget_gets_no_acknowledgement(started: Callable[..., RedisServer]) -> None:
    server = started()
    channels = RedisChannels(server.url)
    channels.ensure([Topic("a")])
    send(channels, "a", numbered(1))
    with server.client() as client:
        client.config_set("appendonly", "no")
    with pytest.raises(Misconfigured, match="appendonly is off"):
        send(channels, "a", numbered(1, first=2))


@pytest.mark.parametrize(("fsyncs", "waiting", "safe"), [(0, 0, True), (0, 500, True), (1, 0, True), (1, 500, False)])
def test_what_waits_behind_an_fsync_is_not_written_yet(fsyncs: int, waiting: int, safe: bool) -> None:
    assert written({"aof_pending_bio_fsync": fsyncs, "aof_buffer_length": waiting}) is safe


def test_a_server_whose_memory_is_full_is_unavailable_and_keeps_what_it_has(
    started: Callable[..., RedisServer],
) -> None:
    server = started()
    channels = RedisChannels(server.url)
    channels.ensure([Topic("a")])
    send(channels, "a", numbered(3))
    with server.client() as client:
        client.config_set("maxmemory", "1mb")
        client.config_set("maxmemory-policy", "noeviction")
        with pytest.raises(Unavailable, match="memory"):
            send(channels, "a", [Record(b"x" * 500_000)] * 4)
        client.config_set("maxmemory", "0")
    send(channels, "a", numbered(1, first=9))
    assert values([entry for entry in everything(channels, "a") if len(entry.value or b"") < 10]) == [1, 2, 3, 9]


def test_a_server_that_is_full_of_what_need_not_be_kept_takes_records_again(
    started: Callable[..., RedisServer], eventually: Eventually
) -> None:
    server = started()
    channels = RedisChannels(server.url)
    config = {"compaction.lag": "200 ms"}
    topics = [Topic("kept", retention=timedelta(milliseconds=200)), Topic("compacted", compacted=True, config=config)]
    channels.ensure([*topics, Topic("for ever")])
    for topic in topics:
        send(channels, topic.name, [Record(b"x" * 100_000, None, b"k")] * 40)
    with server.client() as client:

        def used() -> int:
            return int(client.info("memory")["used_memory"])

        def taken(channel: str) -> bool:
            try:
                send(channels, channel, [Record(b"new", None, b"new")])
            except Unavailable:
                return False
            return True

        for topic in topics:
            client.config_set("maxmemory", used() - 300_000)
            assert not taken("for ever")
            eventually(lambda name=topic.name: taken(name) and taken("for ever"))


def test_a_server_that_is_away_is_unavailable(started: Callable[..., RedisServer]) -> None:
    server = started()
    channels = RedisChannels(server.url)
    server.kill()
    with pytest.raises(Unavailable, match=rf"Redis at 127\.0\.0\.1:{server.port} is unavailable"):
        channels.names()
    with pytest.raises(Unavailable, match=rf"Redis at 127\.0\.0\.1:{server.port} is unavailable"):
        send(channels, "a", numbered(1))
    with channels.poster() as post:
        post("a", b"k", b"nobody hears this")


# --- what a channel may be


def test_copies_that_are_not_to_be_had_are_told(channels: RedisChannels, fresh: Fresh) -> None:
    name = fresh("replicas")
    done = channels.ensure([Topic(name, replicas=3)])
    assert done.made == (name,)
    assert done.differences == (f"channel {name} has 1 copy, and 3 replicas are declared",)


def test_settings_that_redis_does_not_know_are_differences(channels: RedisChannels, fresh: Fresh) -> None:
    topic = Topic(fresh("settings"), compacted=True, config={"segment.ms": "50", "compaction.lag": "2 minutes"})
    assert len(channels.ensure([topic]).differences) == 1
    (difference,) = channels.ensure([topic]).differences
    assert "has no segment.ms, which is declared: Redis knows compaction.lag and deletions.keep" in difference
    assert channels.topic(topic.name).config == {"compaction.lag": "2 minutes", "deletions.keep": "1 days"}


@pytest.mark.parametrize("span", ["1 ms", "0.0005 s", "1.5 s", "90 minutes", "30 days", "100000 days"])
def test_a_duration_is_told_as_it_can_be_declared(channels: RedisChannels, fresh: Fresh, span: str) -> None:
    topic = Topic(fresh("span"), compacted=True, config={"compaction.lag": span}, retention=duration(span))
    assert channels.ensure([topic]).differences == ()
    told = channels.topic(topic.name)
    assert (told.retention, duration(told.config["compaction.lag"])) == (duration(span), duration(span))
    (kept,) = channels.ensure([replace(topic, retention=None)]).differences
    assert kept.startswith(f"channel {topic.name} keeps its records for ")


def test_a_duration_that_is_none_is_told(channels: RedisChannels, fresh: Fresh) -> None:
    topic = Topic(fresh("settings"), compacted=True, config={"compaction.lag": "soon"})
    with pytest.raises(Misconfigured, match=r'compaction\.lag: "soon" is not a duration'):
        channels.ensure([topic])


def test_a_channel_that_was_removed_is_in_no_group_any_more(channels: RedisChannels, fresh: Fresh) -> None:
    gone, stays, group = fresh("gone"), fresh("stays"), fresh("group")
    channels.ensure([Topic(gone), Topic(stays)])
    channels.move(group, {gone: {0: 5}, stays: {0: 7}})
    channels.remove(gone)
    assert channels.group(group).committed == {(stays, 0): 7}


def test_nothing_is_left_of_a_channel_that_was_removed(started: Callable[..., RedisServer]) -> None:
    server = started()
    channels = RedisChannels(server.url)
    channels.ensure([Topic("a", partitions=3, compacted=True, retention=timedelta(days=1))])
    send(channels, "a", [*numbered(20), *numbered(20), Record(None, None, b"k1")])
    channels.remove("a")
    with server.client() as client:
        assert client.keys() == []


# --- in


def test_what_is_acknowledged_survives_a_kill_in_the_middle_and_the_numbering_goes_on(
    own_redis: RedisServer, eventually: Eventually
) -> None:
    channels = RedisChannels(own_redis.url)
    channels.ensure([Topic("a", partitions=2)])
    acknowledged: list[int] = []
    failed: list[int] = []

    async def go() -> None:
        async with channels.sender() as sender:
            for n in count(1):
                try:
                    await sender.send("a", numbered(5, first=5 * n))
                    acknowledged.extend(range(5 * n, 5 * n + 5))
                except Unavailable:
                    failed.append(n)
                if len(failed) > 2 and len(acknowledged) > 1_000 and acknowledged[-1] > 5 * failed[-1] + 100:
                    return
                if failed:
                    await asyncio.sleep(0.005)

    sending = threading.Thread(target=asyncio.run, args=[go()])
    sending.start()
    eventually(lambda: len(acknowledged) > 1_000)
    own_redis.kill()
    eventually(lambda: len(failed) > 2)
    own_redis.start()
    sending.join(30)
    assert not sending.is_alive()
    entries = everything(channels, "a")
    assert set(acknowledged) <= set(values(entries))
    for partition, (low, end) in channels.bounds("a").items():
        offsets = [entry.offset for entry in entries if entry.partition == partition]
        assert offsets == list(range(low, end))


class Counted(Sequence[Record]):
    """Records of ten kilobytes, which tell how many of them were taken."""

    def __init__(self, count: int) -> None:
        self._count, self.taken = count, 0

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> Record: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Record]: ...
    def __getitem__(self, at: int | slice) -> Record | Sequence[Record]:
        assert isinstance(at, int)
        if at >= self._count:
            raise IndexError
        self.taken = at + 1
        return Record(b"%d" % at + b" " * 10_000)


async def test_a_server_that_stands_still_slows_the_sender_and_memory_stays_flat(own_redis: RedisServer) -> None:
    channels = RedisChannels(own_redis.url)
    channels.ensure([Topic("a")])
    records = Counted(4_000)
    async with channels.sender() as sender:
        with own_redis.paused():
            sending = asyncio.create_task(sender.send("a", records))
            behind = asyncio.create_task(sender.send("a", [Record(b"4000")]))
            before = -1
            while records.taken != before:
                before = records.taken
                await asyncio.sleep(0.1)
            assert records.taken * 10_000 < 3_000_000
            assert not sending.done()
        await asyncio.gather(sending, behind)
    assert values(everything(channels, "a")) == list(range(4_001))


async def test_what_waits_behind_a_batch_that_failed_does_not_overtake_it(
    channels: RedisChannels, shared_redis: RedisServer, fresh: Fresh
) -> None:
    name, going, go_on = fresh("overtaken"), threading.Event(), threading.Event()
    channels.ensure([Topic(name, 1)])

    class HangsUpOnce(Server):
        def run(self, calls: Sequence[tuple[Sequence[str], Arguments]]) -> list[object]:
            if not going.is_set():
                going.set()
                go_on.wait(20)
                raise Unavailable(self.server_name, "it hung up")
            return super().run(calls)

    sender = RedisSender(HangsUpOnce(Address(shared_redis.url)))
    try:
        first = asyncio.create_task(sender.send(name, numbered(1)))
        await asyncio.to_thread(going.wait, 20)
        behind = [asyncio.create_task(sender.send(name, numbered(1, first=n))) for n in (2, 3)]
        await asyncio.sleep(0.05)
        go_on.set()
        told = await asyncio.gather(first, *behind, return_exceptions=True)
        assert [type(one) for one in told] == [Unavailable] * 3
        await sender.send(name, numbered(3))
    finally:
        await sender.aclose()
    assert [entry.value for entry in everything(channels, name)] == [b"1", b"2", b"3"]


async def test_a_sender_learns_of_more_partitions_and_keeps_the_order_of_each_key(
    channels: RedisChannels, fresh: Fresh
) -> None:
    channel = fresh("more")
    channels.ensure([Topic(channel)])
    async with channels.sender() as sender:
        for turn in range(10):
            await sender.send(channel, numbered(100, first=100 * turn))
            if turn == 4:
                channels.ensure([Topic(channel, partitions=5)])
    entries = everything(channels, channel)
    assert sorted(values(entries)) == list(range(1_000))
    for entry in entries:
        late = int(entry.value or b"") >= 500
        assert entry.partition == (crc32(entry.key or b"") % 5 if late else 0)
    assert values(everything(channels, channel, {0: channels.bounds(channel)[0][1]})) == [
        value for value in values(entries) if value >= 500 and entries[values(entries).index(value)].partition != 0
    ]


async def test_a_sender_that_was_closed_takes_nothing(channels: RedisChannels, fresh: Fresh) -> None:
    channel = fresh("closed")
    channels.ensure([Topic(channel)])
    async with channels.sender() as sender:
        pass
    with pytest.raises(Unavailable, match="the sender was closed"):
        await sender.send(channel, numbered(1))


async def test_what_a_server_that_stands_still_has_not_answered_fails_when_the_sender_is_closed(
    own_redis: RedisServer,
) -> None:
    sender = RedisSender(Server(Address(own_redis.url)))
    with own_redis.paused():
        sending = asyncio.create_task(sender.send("a", numbered(3)))
        await asyncio.sleep(0.01)
        await sender.aclose(0.05)
        with pytest.raises(Unavailable, match="closed before it answered"):
            await sending


def test_records_without_a_key_go_round(channels: RedisChannels, fresh: Fresh) -> None:
    channel = fresh("round")
    channels.ensure([Topic(channel, partitions=3)])
    send(channels, channel, [Record(b"%d" % n) for n in range(30)])
    assert [end for _, end in channels.bounds(channel).values()] == [10, 10, 10]


def test_moments_never_go_back(channels: RedisChannels, shared_redis: RedisServer, fresh: Fresh) -> None:
    channel, late = fresh("late"), 4_000_000_000_000_000
    channels.ensure([Topic(channel)])
    with shared_redis.client() as client:
        client.hset(f"penstock:channel:{{{channel}}}", "time:0", str(late))
    send(channels, channel, numbered(1))
    assert [entry.appended for entry in everything(channels, channel)] == [late]


# --- what goes with time


def test_what_was_replaced_goes_and_deletions_go_later(
    channels: RedisChannels, shared_redis: RedisServer, fresh: Fresh, eventually: Eventually
) -> None:
    channel = fresh("compacted")
    config = {"compaction.lag": "50 ms", "deletions.keep": "100 ms"}
    channels.ensure([Topic(channel, compacted=True, config=config)])
    send(channels, channel, [*numbered(20, keys=2), Record(None, None, b"k1"), Record(b"0", None, b"k\x00 3")])

    def left() -> list[tuple[bytes | None, bytes | None]]:
        send(channels, channel, [Record(b"tick", None, b"tick")])
        return [(entry.key, entry.value) for entry in everything(channels, channel) if entry.key != b"tick"]

    eventually(lambda: left() == [(b"k0", b"20"), (b"k\x00 3", b"0")])
    assert channels.bounds(channel)[0][0] == 0
    with shared_redis.client() as client:
        known = client.hkeys(f"penstock:channel:{{{channel}}}:0:keys")
    assert set(known) == {b"k0", b"k\x00 3", b"tick"}


def test_a_record_that_was_replaced_stays_for_an_hour(channels: RedisChannels, fresh: Fresh) -> None:
    channel = fresh("compacted")
    channels.ensure([Topic(channel, compacted=True)])
    send(channels, channel, numbered(50, keys=1))
    send(channels, channel, numbered(50, keys=1, first=51))
    assert values(everything(channels, channel)) == list(range(1, 101))


def test_what_is_to_be_kept_for_no_time_goes_with_the_next_send(channels: RedisChannels, fresh: Fresh) -> None:
    channel = fresh("fleeting")
    channels.ensure([Topic(channel, retention=timedelta(0))])
    send(channels, channel, numbered(200))
    for first in (201, 202, 203):
        send(channels, channel, numbered(150, first=first))
    assert channels.bounds(channel) == {0: (500, 650)}
    assert values(everything(channels, channel)) == list(range(203, 353))


def test_a_compacted_channel_forgets_the_keys_of_what_retention_took(
    channels: RedisChannels, shared_redis: RedisServer, fresh: Fresh, eventually: Eventually
) -> None:
    channel = fresh("kept")
    channels.ensure([Topic(channel, compacted=True, retention=timedelta(milliseconds=50))])
    send(channels, channel, numbered(100, keys=50))

    def known() -> set[bytes | str]:
        send(channels, channel, [Record(b"tick", None, b"tick")])
        with shared_redis.client() as client:
            return set(client.hkeys(f"penstock:channel:{{{channel}}}:0:keys"))

    eventually(lambda: known() == {b"tick"})
    assert channels.bounds(channel)[0][0] >= 100
    with pytest.raises(Unaccounted, match="retention"):
        everything(channels, channel, {0: 1})


# --- out


def test_a_reader_that_begins_at_the_beginning_follows_it_until_it_has_read(
    channels: RedisChannels, fresh: Fresh
) -> None:
    channel = fresh("moving")
    channels.ensure([Topic(channel, retention=timedelta(0))])
    send(channels, channel, numbered(3))
    with channels.reader({channel: {}}) as reader, channels.reader({channel: {0: 0}}) as exact:
        send(channels, channel, numbered(3, first=4))
        assert values(reader.read(10, 0)) == [4, 5, 6]
        with pytest.raises(Unaccounted, match="retention"):
            exact.read(10, 0)
        for first in (7, 10):
            send(channels, channel, numbered(3, first=first))
        with pytest.raises(Unaccounted, match="retention"):
            reader.read(10, 0)


def test_a_fetch_is_as_large_as_one_record_more_than_its_limit(channels: RedisChannels, fresh: Fresh) -> None:
    channel = fresh("large")
    channels.ensure([Topic(channel, partitions=2)])
    sizes = [10, 900_000, 10, 10, 900_000, 900_000, 900_000, 20, 900_000, 5]
    send(channels, channel, [Record(b"x" * size, None, b"%d" % n) for n, size in enumerate(sizes)])
    found: list[Entry] = []
    with channels.reader({channel: {}}) as reader:
        while some := reader.read(1_000, 0):
            assert sum(len(entry.value or b"") for entry in some) < (1 << 20) + 900_000
            found += some
    assert sorted(len(entry.value or b"") for entry in found) == sorted(sizes)


def test_a_channel_that_was_made_anew_is_told_to_its_reader(channels: RedisChannels, fresh: Fresh) -> None:
    channel = fresh("anew")
    channels.ensure([Topic(channel)])
    send(channels, channel, numbered(3))
    with channels.reader({channel: {}}) as reader:
        assert len(reader.read(10, 5)) == 3
        channels.remove(channel)
        with pytest.raises(Unavailable, match=channel):
            reader.read(10, 0)
        channels.ensure([Topic(channel)])
        send(channels, channel, numbered(5))
        with pytest.raises(Unaccounted, match="created again"):
            reader.read(10, 5)


def test_a_reader_goes_on_when_the_server_is_back(own_redis: RedisServer) -> None:
    channels = RedisChannels(own_redis.url)
    channels.ensure([Topic("a")])
    send(channels, "a", numbered(3))
    with channels.reader({"a": {}}) as reader:
        assert len(reader.read(2, 5)) == 2
        assert len(reader.read(2, 5)) == 1
        own_redis.kill()
        with pytest.raises(Unavailable):
            reader.read(1, 5)
        own_redis.start()
        send(channels, "a", numbered(2, first=4))
        assert values(reader.read(10, 5)) == [4, 5]


def test_a_reader_that_waits_is_woken(channels: RedisChannels, fresh: Fresh) -> None:
    channel = fresh("woken")
    channels.ensure([Topic(channel, partitions=3)])
    sending = threading.Timer(0.05, send, [channels, channel, numbered(1)])
    with channels.reader({channel: {}}) as reader:
        sending.start()
        assert values(reader.read(10, 30)) == [1]
    sending.join()


# --- groups


def test_changes_of_a_group_at_once_are_all_made(channels: RedisChannels, fresh: Fresh) -> None:
    group = fresh("group")

    def change(partition: int) -> None:
        def one(state: GroupState, _: int) -> None:
            state.committed["a", partition] = state.committed.get(("a", partition), 0) + 1

        for _ in range(25):
            channels.change(group, one)

    threads = [threading.Thread(target=change, args=[partition]) for partition in (0, 0, 1, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert channels.group(group).committed == {("a", 0): 50, ("a", 1): 50}


class Quiet:
    """Wants to know nothing of how partitions are dealt."""

    def assigned(self, partitions: Sequence[ChannelPartition]) -> Mapping[ChannelPartition, int]:
        return {}

    def revoked(self, partitions: Sequence[ChannelPartition]) -> None: ...

    def lost(self, partitions: Sequence[ChannelPartition]) -> None: ...


def test_a_group_whose_members_are_silent_and_left_nothing_is_none(
    shared_redis: RedisServer, fresh: Fresh, eventually: Eventually
) -> None:
    channel, group = fresh("silent"), fresh("group")
    channels = RedisChannels(shared_redis.url, timedelta(milliseconds=200))
    channels.ensure([Topic(channel)])
    with channels.join(group, [channel], Quiet()) as member:
        member.read(1, 0)
        assert group in channels.groups()
        eventually(lambda: group not in channels.groups())
        with pytest.raises(Unavailable, match="no such"):
            channels.group(group)


# --- packing


@pytest.mark.parametrize(
    "record",
    [
        Record(b"value", Origin("sender-é", 3, 42, 1_700_000_000_000_000), b"key"),
        Record(None, None, b"gone"),
        Record(b"", None, b""),
        Record(b"\x00\xff", None, None, (("again", b"1"), ("again", b""), ("", b"\x00"))),
    ],
)
def test_a_record_comes_out_as_it_was_packed(record: Record) -> None:
    packed = b"before" + encode(record) + b"behind"
    key, value, headers, end = unpack(packed, 6)
    assert (key, value, list(headers)) == (record.key, record.value, record.headers())
    assert packed[end:] == b"behind"


async def test_what_can_never_be_carried_is_refused_and_the_sender_goes_on(
    channels: RedisChannels, fresh: Fresh
) -> None:
    channel = fresh("refused")
    channels.ensure([Topic(channel)])
    async with channels.sender() as sender:
        with pytest.raises(Refused, match="16,777,216"):
            await sender.send(channel, [Record(b"x" * LIMIT)])
        for wrong in (Record(b"", extra=(("\ud800", b""),)), Record(b"", Origin("\ud800", 1, 1, 1))):
            with pytest.raises(Refused, match="cannot be written as UTF-8"):
                await sender.send(channel, [wrong])
        await sender.send(channel, numbered(1))
    assert values(everything(channels, channel)) == [1]

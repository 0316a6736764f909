"""What every binder that can be replayed promises to the members of a group."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.channels.binders import DURABLE, REPLAYED, Bound, over
from tests.channels.traffic import PATIENCE, Noted, lines, numbered, numbers, process, send

from penstock.core.contracts import ChannelPartition, Channels, Entry, Member, Topic
from penstock.core.errors import Unavailable

Fresh = Callable[[str], str]
PARTITIONS = 4


def filled(channels: Channels, channel: str, count: int = 40) -> str:
    channels.ensure([Topic(channel, PARTITIONS)])
    send(channels, channel, numbered(count, keys=40))
    return channel


def partitions(channel: str, partitions: int = PARTITIONS) -> list[ChannelPartition]:
    return [(channel, partition) for partition in range(partitions)]


def drive(members: Sequence[Member], done: Callable[[Sequence[Entry]], object]) -> list[Entry]:
    """Read with all members in turn until it is done; no partition ever has two holders."""
    found: list[Entry] = []
    until = time.monotonic() + PATIENCE
    while not done(found):
        assert time.monotonic() < until, [dict(member.held()) for member in members]
        for member in members:
            found += member.read(100, 0.02)
            held = [location for one in members for location in one.held()]
            assert len(held) == len(set(held))
    return found


def holding(*counts: tuple[Member, int]) -> Callable[[Sequence[Entry]], bool]:
    return lambda _: all(len(member.held()) == count for member, count in counts)


def having(count: int) -> Callable[[Sequence[Entry]], bool]:
    return lambda found: len(found) >= count


@over(REPLAYED)
def test_a_member_alone_reads_all_from_the_beginning(bound: Bound, fresh: Fresh) -> None:
    channel, listener = filled(bound.channels, fresh("alone")), Noted()
    with bound.channels.join(fresh("group"), [channel], listener) as member:
        found = drive([member], having(40))
        assert sorted(numbers(found)) == list(range(1, 41))
        assert member.held() == {(channel, part): end for part, (_, end) in bound.channels.bounds(channel).items()}
    assert listener.told == [("given", partitions(channel)), ("taken", partitions(channel))]


@over(REPLAYED)
def test_members_share_the_partitions_and_who_leaves_gives_them_back(bound: Bound, fresh: Fresh) -> None:
    channel, group = filled(bound.channels, fresh("shared")), fresh("group")
    first, second = Noted(), Noted()
    with bound.channels.join(group, [channel], first) as one:
        first.commit = one.commit
        found = drive([one], having(40))
        with bound.channels.join(group, [channel], second) as other:
            second.commit = other.commit
            found += drive([one, other], holding((one, 2), (other, 2)))
            assert sorted([*one.held(), *other.held()]) == partitions(channel)
            send(bound.channels, channel, numbered(40, keys=40, first=41))
            found += drive([one, other], lambda more: len(found) + len(more) >= 80)
            mine = set(other.held())
        assert second.partitions("taken") == sorted(mine)
        send(bound.channels, channel, numbered(40, keys=40, first=81))
        found += drive([one], lambda more: len(found) + len(more) >= 120)
        assert sorted(one.held()) == partitions(channel)
    # What was read is committed whenever a partition moves: nothing is read twice, and nothing passed over.
    assert sorted(numbers(found)) == list(range(1, 121))
    assert not [word for word, _ in [*first.told, *second.told] if word == "lost"]


@over(REPLAYED)
def test_members_resume_where_the_group_has_committed(bound: Bound, fresh: Fresh) -> None:
    channel, group = filled(bound.channels, fresh("resumed")), fresh("group")
    with bound.channels.join(group, [channel], Noted()) as member:
        drive([member], having(40))
        member.commit()
        send(bound.channels, channel, numbered(20, keys=40, first=41))
        drive([member], having(20))  # Read, and never committed.
    with bound.channels.join(group, [channel], Noted()) as member:
        assert sorted(numbers(drive([member], having(20)))) == list(range(41, 61))


@over(REPLAYED)
def test_a_group_that_never_committed_may_begin_at_the_end(bound: Bound, fresh: Fresh) -> None:
    channel = filled(bound.channels, fresh("end"))
    with bound.channels.join(fresh("group"), [channel], Noted(), beginning=False) as member:
        drive([member], holding((member, PARTITIONS)))
        send(bound.channels, channel, numbered(20, keys=40, first=41))
        assert sorted(numbers(drive([member], having(20)))) == list(range(41, 61))


@over(REPLAYED)
def test_a_member_that_knows_better_begins_at_its_own_offsets(bound: Bound, fresh: Fresh) -> None:
    channel, group = filled(bound.channels, fresh("own")), fresh("group")
    bounds = bound.channels.bounds(channel)
    bound.channels.move(group, {channel: {partition: end for partition, (_, end) in bounds.items()}})
    with bound.channels.join(group, [channel], Noted({(channel, 2): 3, (channel, 0): 0})) as member:
        found = drive([member], having(bounds[0][1] + bounds[2][1] - 3))
    wanted = [(0, offset) for offset in range(bounds[0][1])] + [(2, offset) for offset in range(3, bounds[2][1])]
    assert sorted((entry.partition, entry.offset) for entry in found) == wanted


@over(REPLAYED)
def test_what_is_not_asked_of_a_member_is_not_taken_from_it(bound: Bound, fresh: Fresh) -> None:
    """It may answer with all offsets that it knows; it holds what it was given, and no more."""
    channel, group = filled(bound.channels, fresh("more"), 0), fresh("group")

    class Knowing(Noted):
        def assigned(self, partitions: Sequence[ChannelPartition]) -> dict[ChannelPartition, int]:
            return {**super().assigned(partitions), **self.starts}

    known = dict.fromkeys(partitions(channel), 0)
    with (
        bound.channels.join(group, [channel], Knowing(known)) as one,
        bound.channels.join(group, [channel], Knowing(known)) as other,
    ):
        drive([one, other], holding((one, 2), (other, 2)))
        one.commit()
        other.commit()


@over(REPLAYED)
def test_a_channel_that_is_made_again_is_read_from_its_beginning(bound: Bound, fresh: Fresh) -> None:
    channel, group = filled(bound.channels, fresh("again")), fresh("group")
    with bound.channels.join(group, [channel], Noted()) as member:
        drive([member], having(40))
        member.commit()
    bound.channels.remove(channel)
    filled(bound.channels, channel, 60)
    with bound.channels.join(group, [channel], Noted()) as member:
        assert sorted(numbers(drive([member], having(60)))) == list(range(1, 61))


@over(REPLAYED)
def test_a_member_that_fails_is_not_asked_to_commit(bound: Bound, fresh: Fresh) -> None:
    channel, group, listener = filled(bound.channels, fresh("failed")), fresh("group"), Noted()

    def work() -> None:
        with bound.channels.join(group, [channel], listener) as member:
            listener.commit = member.commit
            drive([member], having(40))
            raise EOFError

    with pytest.raises(EOFError):
        work()
    assert [word for word, _ in listener.told] == ["given", "lost"]
    with bound.channels.join(group, [channel], Noted()) as member:
        assert sorted(numbers(drive([member], having(40)))) == list(range(1, 41))


@over(REPLAYED)
def test_a_start_that_fails_is_tried_again(bound: Bound, fresh: Fresh) -> None:
    channel = filled(bound.channels, fresh("retried"))

    class Failing(Noted):
        def assigned(self, partitions: Sequence[ChannelPartition]) -> dict[ChannelPartition, int]:
            first = not self.told
            starts = dict(super().assigned(partitions))
            if first:
                raise Unavailable("the place where we keep our offsets", "it sleeps")
            return starts

    with bound.channels.join(fresh("group"), [channel], Failing()) as member:
        with pytest.raises(Unavailable, match="it sleeps"):
            drive([member], having(1))
        assert member.held() == {}
        assert sorted(numbers(drive([member], having(40)))) == list(range(1, 41))


@over(REPLAYED)
def test_a_member_that_is_silent_loses_its_partitions(bound: Bound, fresh: Fresh) -> None:
    channel, group = filled(bound.channels, fresh("silent"), 0), fresh("group")
    first, second = Noted(), Noted()
    with (
        bound.channels.join(group, [channel], first) as silent,
        bound.channels.join(group, [channel], second) as other,
    ):
        drive([silent, other], holding((silent, 2), (other, 2)))
        send(bound.channels, channel, numbered(40, keys=40))
        found = drive([silent, other], having(40))
        other.commit()
        lost = sorted(silent.held())
        theirs = [entry for entry in found if (channel, entry.partition) in lost]
        again: list[Entry] = []
        until = time.monotonic() + PATIENCE
        while len(again) < len(theirs):
            assert time.monotonic() < until
            again += other.read(100, 0.05)
        # It has committed nothing, so all that it read is read again; and it cannot say otherwise now.
        assert sorted(numbers(again)) == sorted(numbers(theirs))
        with pytest.raises(Unavailable):
            silent.commit()
        other.commit()
        drive([silent, other], holding((silent, 2), (other, 2)))
        assert first.partitions("lost") == lost
        silent.commit()
    assert sorted(numbers(found)) == list(range(1, 41))


@over(DURABLE)
def test_a_member_that_is_killed_loses_its_partitions(bound: Bound, fresh: Fresh) -> None:
    channel, group = filled(bound.channels, fresh("killed")), fresh("group")
    with bound.channels.join(group, [channel], Noted()) as member:
        drive([member], having(40))
        member.commit()
        with process("holder.py", bound.channels, group, channel) as holder:
            drive([member], holding((member, 2)))
            assert next(count for count in lines(holder) if count == 2)
            holder.kill()
            drive([member], holding((member, PARTITIONS)))


@over(REPLAYED)
def test_members_come_and_go_and_each_record_is_read_once(bound: Bound, fresh: Fresh) -> None:
    channel, group, count = filled(bound.channels, fresh("busy"), 0), fresh("group"), 2_000
    found: list[int] = []
    told: list[Noted] = []

    def work(stay: float) -> None:
        """Be a member for a while, again and again, until all is read."""
        while len(set(found)) < count:
            listener = Noted()
            told.append(listener)
            with bound.channels.join(group, [channel], listener) as member:
                listener.commit = member.commit
                until = time.monotonic() + stay
                while time.monotonic() < until and len(set(found)) < count:
                    found.extend(numbers(member.read(20, 0.05)))

    async def flow() -> None:
        async with bound.channels.sender() as sender:
            for first in range(1, count, 20):
                await sender.send(channel, numbered(20, keys=40, first=first))
                await asyncio.sleep(0.01)  # So that members come and go meanwhile.

    with ThreadPoolExecutor(3) as pool:
        working = [pool.submit(work, stay) for stay in (0.4, 0.7, PATIENCE)]
        asyncio.run(flow())
        for one in working:
            one.result(PATIENCE)
    assert set(found) == set(range(1, count + 1))
    # Who was held up for longer than its lease has lost what it had not committed, and somebody read it again.
    assert len(found) == count or [listener for listener in told if listener.partitions("lost")]


@over(REPLAYED)
def test_members_of_one_group_may_ask_for_different_channels(bound: Bound, fresh: Fresh) -> None:
    one, other = filled(bound.channels, fresh("one")), filled(bound.channels, fresh("other"))
    group = fresh("group")
    with (
        bound.channels.join(group, [one, other], Noted()) as both,
        bound.channels.join(group, [other], Noted()) as single,
    ):
        found = drive([both, single], lambda _: len(both.held()) + len(single.held()) == 8 and len(single.held()) > 1)
        found += drive([both, single], lambda more: len(found) + len(more) >= 80)
        assert {channel for channel, _ in single.held()} == {other}
        assert set(partitions(one)) <= set(both.held())


@over(REPLAYED)
def test_members_notice_partitions_that_are_added(bound: Bound, fresh: Fresh) -> None:
    channel = filled(bound.channels, fresh("grows"))
    with bound.channels.join(fresh("group"), [channel], Noted()) as member:
        drive([member], having(40))
        bound.channels.ensure([Topic(channel, PARTITIONS + 2)])
        drive([member], holding((member, PARTITIONS + 2)))
        send(bound.channels, channel, numbered(40, keys=40, first=41))
        found = drive([member], having(40))
    assert sorted(numbers(found)) == list(range(41, 81))
    assert {entry.partition for entry in found} == set(range(PARTITIONS + 2))


@over(REPLAYED)
def test_a_group_is_told_and_moved(bound: Bound, fresh: Fresh) -> None:
    channel, group = filled(bound.channels, fresh("told")), fresh("group")
    with pytest.raises(Unavailable, match=group):
        bound.channels.group(group)
    assert group not in bound.channels.groups()
    with bound.channels.join(group, [channel], Noted()) as member:
        drive([member], having(40))
        member.commit()
        assert group in bound.channels.groups()
        told = bound.channels.group(group)
        assert (told.name, told.state) == (group, "stable")
        assert [sorted(held) for held in told.members.values()] == [partitions(channel)]
        assert told.committed == dict(member.held())
        with pytest.raises(Unavailable, match=f"{group}.* members"):
            bound.channels.move(group, {channel: {0: 1}})
    told = bound.channels.group(group)
    assert (told.state, dict(told.members)) == ("empty", {})
    bound.channels.move(group, {channel: {0: 1}})
    moved = bound.channels.group(group).committed
    assert moved == {**told.committed, (channel, 0): 1}
    groups = bound.channels.groups()
    assert group in groups
    assert groups == sorted(groups)
    with bound.channels.join(group, [channel], Noted()) as member:
        found = drive([member], having(told.committed[channel, 0] - 1))
    assert [(entry.partition, entry.offset) for entry in found] == [
        (0, offset) for offset in range(1, told.committed[channel, 0])
    ]

"""How members deal partitions among themselves, with a clock that is moved by hand."""

import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
from tests.channels.traffic import Noted, numbers

from penstock.channels.leases import LEASE, GroupState, LeasedConsumer, MemberState, assign_partitions
from penstock.channels.memory import MemoryChannels
from penstock.core.contracts import ChannelPartition, Entry, RebalanceListener, Topic
from penstock.core.errors import Unaccounted, Unavailable
from penstock.testing import ManualClock

NOW = 1_700_000_000_000_000
SECOND = 1_000_000


def asking(**channels: int) -> dict[str, int]:
    return dict(channels)


def member(channels: dict[str, int], *held: ChannelPartition) -> MemberState:
    return MemberState(channels, NOW, set(held))


def everything(channels: dict[str, int]) -> set[ChannelPartition]:
    return {(channel, partition) for channel, count in channels.items() for partition in range(count)}


def somehow(draw: random.Random) -> dict[str, MemberState]:
    """Members that ask for some of three channels, and hold some of what they ask for, each partition at most once."""
    counts = {name: draw.randint(1, 9) for name in "xyz"}
    members = {}
    free = sorted(everything(counts))
    draw.shuffle(free)
    for turn in range(draw.randint(1, 6)):
        channels = {name: counts[name] for name in counts if draw.random() < 0.7} or {"x": counts["x"]}
        held = [location for location in free if location[0] in channels and draw.random() < 0.4]
        free = [location for location in free if location not in held]
        members[f"m{turn}"] = member(channels, *held)
    return members


# --- shares


@pytest.mark.parametrize("seed", range(50))
def test_all_is_dealt_and_nothing_twice_and_only_to_who_asks(seed: int) -> None:
    members = somehow(random.Random(seed))
    found = assign_partitions(members)
    dealt = [location for partitions in found.values() for location in partitions]
    assert len(dealt) == len(set(dealt))
    assert set(dealt) == set().union(*(everything(share.channels) for share in members.values()))
    for name, partitions in found.items():
        assert {channel for channel, _ in partitions} <= set(members[name].channels)


@pytest.mark.parametrize("seed", range(50))
def test_nobody_has_two_more_than_another_who_asks_for_one_of_them(seed: int) -> None:
    members = somehow(random.Random(seed))
    found = assign_partitions(members)
    for giver in members:
        for taker in members:
            wanted = [location for location in found[giver] if location[0] in members[taker].channels]
            assert not wanted or len(found[giver]) - len(found[taker]) < 2


@pytest.mark.parametrize("seed", range(50))
def test_shares_are_even_where_all_ask_for_the_same(seed: int) -> None:
    draw = random.Random(seed)
    channels = {name: draw.randint(1, 7) for name in "wxyz"}
    found = assign_partitions({f"m{turn}": member(channels) for turn in range(draw.randint(1, 8))})
    counts = [len(partitions) for partitions in found.values()]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("seed", range(50))
def test_no_more_moves_than_has_to(seed: int) -> None:
    draw = random.Random(seed)
    channels = {"x": draw.randint(1, 20)}
    partitions, names = sorted(everything(channels)), [f"m{turn}" for turn in range(draw.randint(1, 6))]
    owners = {location: draw.choice(names) for location in partitions}
    members = {
        name: member(channels, *(location for location in partitions if owners[location] == name)) for name in names
    }
    found = assign_partitions(members)
    move_offsets = sum(len(members[name].held - found[name]) for name in names)
    least, odd = divmod(len(partitions), len(names))
    held = sorted((len(members[name].held) for name in names), reverse=True)
    assert move_offsets == sum(max(0, count - least - (turn < odd)) for turn, count in enumerate(held))


def test_what_is_fair_stays_as_it_is() -> None:
    channels = asking(x=5)
    members = {"a": member(channels, ("x", 4), ("x", 0), ("x", 2)), "b": member(channels, ("x", 1), ("x", 3))}
    assert assign_partitions(members) == {name: share.held for name, share in members.items()}


def test_channels_of_one_partition_do_not_all_go_to_the_same_member() -> None:
    channels = asking(w=1, x=1, y=1, z=1)
    alone = {"a": member(channels, *everything(channels))}
    assert [len(partitions) for partitions in assign_partitions({**alone, "b": member(channels)}).values()] == [2, 2]


def test_each_channel_is_spread_too() -> None:
    channels = asking(x=4, y=4)
    found = assign_partitions({"a": member(channels, *everything(channels)), "b": member(channels)})
    assert all(len([location for location in partitions if location[0] == "x"]) == 2 for partitions in found.values())


def test_who_asks_for_less_gets_all_that_the_other_can_do_without() -> None:
    members = {"both": member(asking(x=4, y=4)), "single": member(asking(y=4))}
    assert assign_partitions(members) == {"both": everything(asking(x=4)), "single": everything(asking(y=4))}


def test_a_partition_of_which_one_member_knows_already_is_dealt() -> None:
    found = assign_partitions({"old": member(asking(x=2), ("x", 0), ("x", 1)), "new": member(asking(x=4))})
    assert found == {"old": {("x", 0), ("x", 1)}, "new": {("x", 2), ("x", 3)}}


def test_what_is_held_and_is_no_more_is_nobodys() -> None:
    assert assign_partitions({"a": member(asking(x=1), ("x", 0), ("x", 5), ("y", 0))}) == {"a": {("x", 0)}}


# --- what a group knows


def test_a_standing_survives_being_written_down() -> None:
    group = GroupState({"a": MemberState({"x": 2}, NOW, {("x", 1)})}, {("x", 0): 5, ("y", 3): 7})
    assert GroupState.loads(group.dumps()) == group
    assert GroupState.loads(None) == GroupState.loads(b"") == GroupState()


def test_a_member_takes_only_what_nobody_has_and_says_what_is_beyond_its_share() -> None:
    group = GroupState()
    assert group.renew("a", {"x": 4}, NOW).held == everything({"x": 4})
    second = group.renew("b", {"x": 4}, NOW)
    assert (second.new, second.held, second.surplus) == (True, frozenset(), frozenset())
    first = group.renew("a", {"x": 4}, NOW)
    assert (first.new, len(first.held), len(first.surplus)) == (False, 2, 2)
    assert not group.renew("b", {"x": 4}, NOW).held
    group.release("a", first.surplus)
    assert group.renew("b", {"x": 4}, NOW).held == first.surplus


def test_a_lease_that_has_run_out_leaves_nothing() -> None:
    group, lease = GroupState(), round(LEASE.total_seconds() * SECOND)
    group.renew("a", {"x": 2}, NOW)
    assert group.commit("a", {("x", 0): 1}, NOW + lease - 1) == frozenset()
    assert group.commit("a", {("x", 0): 2}, NOW + lease) == {("x", 0)}
    assert group.committed == {("x", 0): 1}
    assert group.renew("b", {"x": 2}, NOW + lease).held == everything({"x": 2})
    back = group.renew("a", {"x": 2}, NOW + lease)
    assert (back.new, back.held) == (True, frozenset())


def test_a_commit_is_whole_or_not_at_all() -> None:
    group = GroupState()
    group.renew("a", {"x": 1}, NOW)
    assert group.commit("a", {("x", 0): 3, ("x", 1): 4}, NOW) == {("x", 1)}
    assert group.committed == {}


@pytest.mark.parametrize("seed", range(50))
def test_a_group_settles_whoever_comes_goes_and_dies(seed: int) -> None:
    """Beats in any order; never does a partition have two holders, and in the end each has one, in even shares."""
    draw, group, now = random.Random(seed), GroupState(), NOW
    channels = {"x": draw.randint(1, 12), "y": draw.randint(1, 5)}
    alive = [f"m{turn}" for turn in range(draw.randint(1, 6))]

    def renew(name: str) -> None:
        deal = group.renew(name, channels, now)
        if draw.random() < 0.7:
            group.release(name, deal.surplus)
        held = [location for share in group.members.values() for location in share.held]
        assert len(held) == len(set(held))

    for step in range(60):
        now += draw.randint(0, 2 * SECOND)
        match draw.choice(["beat"] * 8 + ["come", "go", "die"]):
            case "come":
                alive.append(f"n{step}")
            case "go" if len(alive) > 1:
                group.members.pop(alive.pop(), None)
            case "die" if len(alive) > 1:
                alive.pop(0)
            case _:
                renew(draw.choice(alive))
    now += round(LEASE.total_seconds() * SECOND)
    for _ in range(40):
        for name in draw.sample(alive, len(alive)):
            renew(name)
    assert set(group.members) == set(alive)
    assert {location for share in group.members.values() for location in share.held} == everything(channels)
    counts = [len(share.held) for share in group.members.values()]
    assert max(counts) - min(counts) <= 1


def test_a_lease_of_a_clock_that_was_set_back_is_none() -> None:
    group = GroupState()
    group.renew("dead", {"x": 2}, NOW)
    earlier = NOW - 3_600 * SECOND
    assert group.renew("alive", {"x": 2}, earlier).held == everything({"x": 2})
    assert not group.renew("alive", {"x": 2}, earlier - SECOND).new  # A little matters to nobody.


def test_a_channel_that_is_gone_is_forgotten_with_those_who_hold_it() -> None:
    group = GroupState(committed={("x", 0): 5, ("y", 0): 7})
    group.renew("a", {"x": 1}, NOW)
    group.renew("b", {"y": 1}, NOW)
    group.forget("x")
    assert group.committed == {("y", 0): 7}
    assert group.commit("a", {("x", 0): 9}, NOW) == {("x", 0)}
    assert group.renew("a", {"x": 1}, NOW).new
    assert not group.renew("b", {"y": 1}, NOW).new


# --- members


@dataclass
class World:
    """A channel of four partitions with ten records, and members of a group."""

    clock: ManualClock = field(default_factory=ManualClock)
    opened: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.channels = MemoryChannels(None, self.clock)
        self.channels.ensure([Topic("x", 4)])
        for n in range(40):
            self.channels.append("x", b"%d" % n, b"k%d" % n)

    def join(self, listener: RebalanceListener, beginning: bool = True) -> LeasedConsumer:
        return self.opened.enter_context(self.channels.join("group", ["x"], listener, beginning=beginning))

    def turn(self, *members: LeasedConsumer, seconds: float = 1.0) -> list[Entry]:
        """Let some time pass, then each reads once."""
        self.clock.move(seconds)
        return [entry for one in members for entry in one.read(100, 0)]


@pytest.fixture
def world() -> World:
    return World()


def test_a_member_gives_what_is_beyond_its_share_after_it_could_commit(world: World) -> None:
    first = Noted()
    one, other = world.join(first), world.join(Noted())
    first.commit = one.commit
    found = world.turn(one)
    assert len(found) == 40
    assert world.turn(other) == []
    assert world.turn(one, other) == []
    assert (len(one.held()), len(other.held())) == (2, 2)
    assert first.partitions("taken") == sorted(other.held())


def test_between_two_beats_nothing_is_dealt(world: World) -> None:
    one, other = world.join(Noted()), world.join(Noted())
    world.turn(one, other)
    world.turn(one, other, seconds=0.9)
    assert (len(one.held()), len(other.held())) == (4, 0)


def test_a_member_that_was_silent_is_told_what_it_lost(world: World) -> None:
    listener = Noted()
    one, other = world.join(listener), world.join(Noted())
    world.turn(one)
    lost = sorted(one.held())
    assert len(world.turn(other, seconds=LEASE.total_seconds())) == 40
    with pytest.raises(Unavailable, match="x/0, x/1, x/2, x/3"):
        one.commit()
    assert world.turn(one) == []
    assert listener.told[-1] == ("lost", lost)
    assert one.held() == {}
    one.commit()


def test_a_member_that_was_silent_alone_reads_again_what_it_has_not_committed(world: World) -> None:
    listener = Noted()
    one = world.join(listener)
    first = world.turn(one)
    again = world.turn(one, seconds=LEASE.total_seconds() + 1)
    assert numbers(first) == numbers(again)
    assert [word for word, _ in listener.told] == ["given", "lost", "given"]


def test_a_commit_in_the_last_moment_is_where_the_next_goes_on(world: World) -> None:
    listener = Noted()
    with ExitStack() as own:
        one = own.enter_context(world.channels.join("group", ["x"], listener))
        listener.commit = one.commit
        assert len(world.turn(one)) == 40
    world.channels.append("x", b"new", b"k1")
    assert [entry.value for entry in world.turn(world.join(Noted()))] == [b"new"]


def test_a_commit_that_fails_at_the_end_is_told_and_the_member_gone(world: World) -> None:
    def asleep() -> None:
        raise Unavailable("the disk", "it sleeps")

    def work() -> None:
        with world.channels.join("group", ["x"], Noted(commit=asleep)) as one:
            world.turn(one)

    with pytest.raises(Unavailable, match="it sleeps"):
        work()
    assert world.channels.groups() == []


@pytest.mark.parametrize("fails", ["given", "reader", "bounds"])
def test_what_failed_half_way_is_done_with_the_next_read(fails: str) -> None:
    class Once(MemoryChannels):
        broken = ""

        def _fail(self, what: str) -> None:
            if self.broken == what:
                self.broken = ""
                raise Unavailable(what, "just now")

        def bounds(self, channel: str) -> dict[int, tuple[int, int]]:
            self._fail("bounds")
            return dict(super().bounds(channel))

        def reader(self, *args, **kwargs):  # type: ignore[no-untyped-def]  # as the one that it wraps
            self._fail("reader")
            return super().reader(*args, **kwargs)

    class Failing(Noted):
        def assigned(self, partitions: Sequence[ChannelPartition]) -> dict[ChannelPartition, int]:
            channels._fail("given")
            return {}

    clock = ManualClock()
    channels = Once(2, clock)
    channels.append("x", b"1")
    with channels.join("group", ["x"], Failing()) as one:
        channels.broken = fails
        with pytest.raises(Unavailable, match="just now"):
            one.read(10, 0)
        clock.move(1)
        assert numbers(one.read(10, 0)) == [1]
        assert len(one.held()) == 2


def test_positions_that_the_log_does_not_hold_are_told(world: World) -> None:
    world.channels.move("group", {"x": {0: 1_000}})
    one = world.join(Noted())

    def read_each_partition_first() -> None:
        for _ in range(5):
            world.turn(one)

    for _ in range(2):
        with pytest.raises(Unaccounted, match="1000"):
            read_each_partition_first()


def test_a_group_without_members_and_positions_is_none(world: World) -> None:
    with world.channels.join("idle", ["x"], Noted()) as one:
        world.turn(one)
        assert world.channels.groups() == ["idle"]
    assert world.channels.groups() == []
    with pytest.raises(Unavailable, match="group idle"):
        world.channels.group("idle")


def test_a_member_that_died_is_no_member_after_its_lease(world: World) -> None:
    world.turn(world.join(Noted()))
    assert len(world.channels.group("group").members) == 1
    world.clock.move(LEASE.total_seconds())
    with pytest.raises(Unavailable):
        world.channels.group("group")
    world.channels.move("group", {"x": {0: 3}})
    assert world.channels.group("group").committed == {("x", 0): 3}


def test_the_lease_is_as_long_as_the_binder_says() -> None:
    clock = ManualClock()
    channels = MemoryChannels(1, clock, timedelta(seconds=100))
    channels.append("x", b"1")
    listener = Noted()
    with channels.join("group", ["x"], listener) as one:
        one.read(1, 0)
        clock.move(99)
        one.commit()
        clock.move(2)
        with pytest.raises(Unavailable):
            one.commit()


def test_offsets_that_were_not_asked_for_are_not_taken(world: World) -> None:
    class Knowing(Noted):
        def assigned(self, partitions: Sequence[ChannelPartition]) -> Mapping[ChannelPartition, int]:
            return {**super().assigned(partitions), **dict.fromkeys(everything({"x": 4}), 0)}

    one, other = world.join(Knowing()), world.join(Knowing())
    for _ in range(4):
        world.turn(one, other)
    assert sorted([*one.held(), *other.held()]) == sorted(everything({"x": 4}))
    other.commit()


def test_a_partition_that_only_another_member_remembers_is_waited_for(world: World) -> None:
    one = world.join(Noted())
    world.turn(one)
    world.channels.change("group", lambda group, now: group.renew("other", {"x": 9}, now))
    world.channels.change("group", lambda group, _: group.release("other", everything({"x": 9})))
    world.turn(one)
    shared = assign_partitions(world.channels.change("group", lambda group, _: group.members))
    assert len(set.union(*shared.values())) == 9
    assert set(one.held()) == everything({"x": 4})


def test_a_member_goes_on_with_a_channel_that_is_made_again(world: World) -> None:
    listener = Noted()
    one = world.join(listener)
    assert len(world.turn(one)) == 40
    world.channels.remove("x")
    world.channels.ensure([Topic("x", 2)])
    for n in range(100, 110):
        world.channels.append("x", b"%d" % n, b"k%d" % n)
    with pytest.raises(Unavailable, match="nothing was committed"):
        one.commit()
    assert sorted(numbers(world.turn(one))) == list(range(100, 110))
    assert [word for word, _ in listener.told] == ["given", "lost", "given"]

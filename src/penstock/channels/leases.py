"""Groups for binders whose middleware has none: the members assign the partitions among themselves.

The state of a group is a small document that its binder changes atomically. Each member renews its lease in it every
few reads. It takes free partitions up to its share, and releases those above its share after it has committed what it
read of them. A member whose lease has expired owns no partition, and its commits are refused.
"""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated, TypeVar

from pydantic import BeforeValidator, ConfigDict, PlainSerializer, TypeAdapter

from penstock.channels.common import posting
from penstock.core.clock import Micros, micros
from penstock.core.contracts import ChannelPartition, Entry, Group, Offsets, Reader, RebalanceListener, Sender
from penstock.core.errors import Unavailable

Answer = TypeVar("Answer")

LEASE = timedelta(seconds=10)
"""A member that does not renew its lease for this long loses its partitions."""


_STORED = ConfigDict(extra="forbid", ser_json_timedelta="float")


@dataclass
class MemberState:
    """One member: the channels that it reads, with their numbers of partitions, and the partitions that it owns."""

    channels: dict[str, int]
    until: Micros
    held: set[ChannelPartition] = field(default_factory=set)
    lease: timedelta = LEASE
    __pydantic_config__ = _STORED


Committed = Annotated[
    dict[ChannelPartition, int],
    # JSON has only text as keys.
    PlainSerializer(lambda found: [(*one, offset) for one, offset in found.items()]),
    BeforeValidator(lambda rows: {(channel, partition): offset for channel, partition, offset in rows}),
]


@dataclass
class GroupState:
    """The members of a group and its committed offsets."""

    members: dict[str, MemberState] = field(default_factory=dict)
    committed: Committed = field(default_factory=dict)
    __pydantic_config__ = _STORED

    def dumps(self) -> bytes:
        return _GROUP.dump_json(self)

    @classmethod
    def loads(cls, document: bytes | None) -> "GroupState":
        """Raises ValueError if the document is damaged."""
        return _GROUP.validate_json(document) if document else cls()

    def expire(self, now: Micros) -> None:
        # If the clock was set back, a lease of a dead member can end far in the future.
        self.members = {
            name: state for name, state in self.members.items() if now < state.until <= now + 2 * micros(state.lease)
        }

    def exists(self, now: Micros) -> bool:
        """Whether the group has members or committed offsets."""
        self.expire(now)
        return bool(self.members or self.committed)

    def renew(self, name: str, channels: Mapping[str, int], now: Micros, lease: timedelta = LEASE) -> "Assignment":
        """Renew the lease of a member, and assign it the free partitions of its share."""
        self.expire(now)
        new = name not in self.members
        state = self.members.setdefault(name, MemberState({}, 0))
        state.channels, state.until, state.lease = dict(channels), now + micros(lease), lease
        target = assign_partitions(self.members)[name]
        state.held |= target - {partition for one in self.members.values() for partition in one.held}
        return Assignment(new, frozenset(state.held & target), frozenset(state.held - target))

    def release(self, name: str, partitions: Collection[ChannelPartition]) -> None:
        if state := self.members.get(name):
            state.held -= set(partitions)

    def forget(self, channel: str) -> None:
        """Drop the offsets of a removed channel, and the members that own partitions of it."""
        self.committed = {one: offset for one, offset in self.committed.items() if one[0] != channel}
        self.members = {
            name: state for name, state in self.members.items() if all(one[0] != channel for one in state.held)
        }

    def commit(self, name: str, positions: Mapping[ChannelPartition, int], now: Micros) -> frozenset[ChannelPartition]:
        """Commit the offsets of a member. Returns the partitions that it does not own; then nothing is committed."""
        state = self.members.get(name)
        ours = state.held if state and state.until > now else set[ChannelPartition]()
        if strange := frozenset(positions) - ours:
            return strange
        self.committed |= positions
        return frozenset()


_GROUP = TypeAdapter(GroupState)


@dataclass(frozen=True)
class Assignment:
    new: bool
    """Whether the member is new to the group: it has lost what it owned before."""
    held: frozenset[ChannelPartition]
    """The partitions that it owns and keeps."""
    surplus: frozenset[ChannelPartition]
    """The partitions that it owns and has to release."""


def assign_partitions(members: Mapping[str, MemberState]) -> dict[str, set[ChannelPartition]]:
    """The partitions that each member should own. The same input gives the same result in every member.

    No member has two partitions more than another that could read one of them, and as few as possible move.
    """
    names = sorted(members)
    counts: dict[str, int] = {}
    for state in members.values():
        for channel, count in state.channels.items():
            counts[channel] = max(count, counts.get(channel, 0))
    free = {(channel, partition) for channel, count in counts.items() for partition in range(count)}
    found: dict[str, set[ChannelPartition]] = {}
    for name in names:
        found[name] = {one for one in members[name].held & free if one[0] in members[name].channels}
        free -= found[name]
    for one in sorted(free):
        asking = [name for name in names if one[0] in members[name].channels]
        found[min(asking, key=lambda name: (len(found[name]), _count(found[name], one[0]), name))].add(one)
    while (move := _move(members, found)) is not None:
        one, giver, taker = move
        found[giver].remove(one)
        found[taker].add(one)
    return found


def _count(partitions: Collection[ChannelPartition], channel: str) -> int:
    return sum(1 for name, _ in partitions if name == channel)


def _move(
    members: Mapping[str, MemberState], found: Mapping[str, set[ChannelPartition]]
) -> tuple[ChannelPartition, str, str] | None:
    """A partition to move, the member to take it from, and the one to give it to; None if the loads are even."""
    by_load = sorted(found, key=lambda name: len(found[name]))
    for giver in reversed(by_load):
        for taker in by_load:
            if len(found[giver]) - len(found[taker]) < 2:
                break
            # Of the channel in which the two differ most, so that each channel is spread, too.
            excess = {
                channel: _count(found[giver], channel) - _count(found[taker], channel)
                for channel in members[taker].channels
            }
            if wanted := [one for one in found[giver] if one[0] in excess]:
                return max(wanted, key=lambda one: (excess[one[0]], one)), giver, taker
    return None


# --- binders


class LeasedGroups(ABC):
    """A base class that gives a binder groups and a poster. The binder changes the states of groups atomically."""

    lease: timedelta

    @abstractmethod
    def change(self, group: str, change: Callable[[GroupState, Micros], Answer]) -> Answer:
        """Change the state of a group atomically. `change` gets the state, and the time that all members share."""

    @abstractmethod
    def group_states(self) -> tuple[Mapping[str, GroupState], Micros]:
        """The state of each group, and the time that all members share."""

    @abstractmethod
    def reader(
        self, start: Mapping[str, Offsets], only: Collection[ChannelPartition] | None = None
    ) -> AbstractContextManager[Reader]: ...

    @abstractmethod
    def bounds(self, channel: str) -> Mapping[int, tuple[int, int]]: ...

    @abstractmethod
    def sender(self) -> AbstractAsyncContextManager[Sender]: ...

    def poster(self) -> AbstractContextManager[Callable[[str, bytes, bytes], None]]:
        return posting(self.sender)

    def elapsed(self) -> float:
        return time.monotonic()

    @contextmanager
    def join(
        self, group: str, channels: Sequence[str], listener: RebalanceListener, *, beginning: bool = True
    ) -> Iterator["LeasedConsumer"]:
        member = LeasedConsumer(self, group, channels, listener, beginning)
        with membership(member.leave, listener):
            yield member

    def groups(self) -> list[str]:
        states, now = self.group_states()
        return sorted(name for name, state in states.items() if state.exists(now))

    def group(self, name: str) -> Group:
        states, now = self.group_states()
        state = states.get(name, GroupState())
        if not state.exists(now):
            raise Unavailable(f"group {name}", "there is no such group")
        members = {name: sorted(member.held) for name, member in state.members.items()}
        return Group(name, "stable" if members else "empty", members, dict(state.committed))

    def move(self, group: str, positions: Mapping[str, Offsets]) -> None:
        def commit(state: GroupState, now: Micros) -> None:
            state.expire(now)
            if state.members:
                raise Unavailable(f"group {group}", f"it has {len(state.members)} members; stop them first")
            state.committed |= {
                (channel, partition): offset
                for channel, offsets in positions.items()
                for partition, offset in offsets.items()
            }

        self.change(group, commit)

    def forget_channel(self, channel: str) -> None:
        """Remove a channel that no longer exists from all groups."""
        for group in self.groups():
            self.change(group, lambda state, _: state.forget(channel))


Tell = Callable[[Sequence[ChannelPartition]], object]


@contextmanager
def membership(leave: Callable[[Tell], None], listener: RebalanceListener) -> Iterator[None]:
    """Leave the group at the end of the block. If the block raises, the partitions count as lost, not as revoked.

    `leave` gets the method of the listener to call with the partitions that are still owned.
    """
    try:
        yield
    except BaseException:
        leave(listener.lost)
        raise
    leave(listener.revoked)


class LeasedConsumer:
    def __init__(
        self, binder: LeasedGroups, group: str, channels: Sequence[str], listener: RebalanceListener, beginning: bool
    ) -> None:
        self._binder, self._group, self._listener = binder, group, listener
        self._channels, self._beginning = list(channels), beginning
        self._name = uuid.uuid4().hex
        self._every = binder.lease.total_seconds() / 10
        self._next: dict[ChannelPartition, int] = {}
        self._renewed: float | None = None
        self._opened = ExitStack()
        self._reader: Reader | None = None
        """Reads the assigned partitions; None if they have changed."""
        self._partitions()  # Raises if a channel does not exist.

    def read(self, most: int, wait: float) -> Sequence[Entry]:
        elapsed = self._binder.elapsed
        until = elapsed() + wait
        while True:
            if self._renewed is None or elapsed() - self._renewed >= self._every:
                self._renew()
            left = max(0.0, until - elapsed())
            # Not longer than until the next renewal, which can change the assignment.
            found = self._read(most, min(left, self._every / 2))
            if found or elapsed() >= until:
                return found

    def held(self) -> Mapping[ChannelPartition, int]:
        return dict(self._next)

    def commit(self) -> None:
        positions = self.held()
        if not positions:
            return
        strange = self._binder.change(self._group, lambda group, now: group.commit(self._name, positions, now))
        if strange:
            gone = ", ".join(f"{channel}/{partition}" for channel, partition in sorted(strange))
            raise Unavailable(f"group {self._group}", f"{gone} is assigned to other members now; nothing was committed")

    def leave(self, tell: Tell) -> None:
        """Leave the group; `tell` gets the partitions that are still owned."""
        try:
            if self._next:
                tell(sorted(self._next))
        finally:
            self._next.clear()
            self._close()
            self._binder.change(self._group, lambda group, _: group.members.pop(self._name, None))

    def _read(self, most: int, wait: float) -> Sequence[Entry]:
        if self._reader is None:
            time.sleep(min(wait, 0.05))  # No partition is assigned until the next renewal.
            return ()
        entries = self._reader.read(most, wait)
        for channel in self._channels:
            for partition, offset in self._reader.positions(channel).items():
                if (channel, partition) in self._next:
                    self._next[channel, partition] = offset
        return entries

    def _renew(self) -> None:
        """Renew the lease, and adapt to the partitions that are assigned now."""
        partitions, lease = self._partitions(), self._binder.lease
        assignment = self._binder.change(
            self._group, lambda group, now: group.renew(self._name, partitions, now, lease)
        )
        if assignment.new and self._next:
            before = sorted(self._next)
            self._next.clear()
            self._close()
            self._listener.lost(before)
        if leaving := sorted(assignment.surplus & set(self._next)):
            self._listener.revoked(leaving)
            for one in leaving:
                del self._next[one]
            self._close()
        if assignment.surplus:
            self._binder.change(self._group, lambda group, _: group.release(self._name, assignment.surplus))
        # Also partitions of an earlier assignment that failed half-way.
        if added := assignment.held - set(self._next):
            start = self._starts(added)
            better = self._listener.assigned(sorted(start))
            self._next |= {one: better.get(one, offset) for one, offset in start.items()}
            self._close()
        if self._reader is None and self._next:
            starts: dict[str, dict[int, int]] = {channel: {} for channel in self._channels}
            for (channel, partition), offset in self._next.items():
                starts[channel][partition] = offset
            self._reader = self._opened.enter_context(self._binder.reader(starts, only=set(self._next)))
        self._renewed = self._binder.elapsed()

    def _close(self) -> None:
        self._reader = None
        self._opened.close()

    def _partitions(self) -> dict[str, int]:
        return {channel: len(self._binder.bounds(channel)) for channel in self._channels}

    def _starts(self, partitions: Collection[ChannelPartition]) -> dict[ChannelPartition, int]:
        """The committed offset of each partition; without one, its beginning or its end."""
        committed = self._binder.change(self._group, lambda group, _: dict(group.committed))
        bounds = {channel: self._binder.bounds(channel) for channel in self._channels}
        start = {}
        for channel, partition in partitions:
            if partition in bounds[channel]:  # Another member may still know partitions that no longer exist.
                low, end = bounds[channel][partition]
                start[channel, partition] = committed.get((channel, partition), low if self._beginning else end)
        return start

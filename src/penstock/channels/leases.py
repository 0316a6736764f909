"""Groups for binders whose middleware has none: members deal the partitions among themselves.

What a group knows is a small document that its binder changes atomically. Each member renews its lease in it with
every few reads, and takes what is its share and nobody's; what is beyond its share it gives back, once what it has
read of it is committed. A member whose lease has run out holds nothing any more: whatever it still believes, it can
commit nothing.
"""

import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import orjson

from penstock.core.clock import Micros
from penstock.core.contracts import ChannelPartition, Entry, Group, Offsets, Reader, RebalanceListener
from penstock.core.errors import Unavailable

Answer = TypeVar("Answer")

LEASE = timedelta(seconds=10)
"""A member that is silent for so long has lost its partitions."""


@dataclass
class Share:
    """What one member asks for, as channels with the partitions that it knows of, and what it has."""

    channels: dict[str, int]
    until: Micros
    held: set[ChannelPartition] = field(default_factory=set)
    lease: timedelta = LEASE


@dataclass
class Standing:
    """What a group knows."""

    members: dict[str, Share] = field(default_factory=dict)
    committed: dict[ChannelPartition, int] = field(default_factory=dict)

    def dumps(self) -> bytes:
        return orjson.dumps(
            {
                "members": {
                    name: {
                        "channels": share.channels,
                        "until": share.until,
                        "held": sorted(share.held),
                        "lease": share.lease.total_seconds(),
                    }
                    for name, share in self.members.items()
                },
                "committed": [[*place, offset] for place, offset in sorted(self.committed.items())],
            }
        )

    @classmethod
    def loads(cls, document: bytes | None) -> "Standing":
        if not document:
            return cls()
        told: dict[str, Any] = orjson.loads(document)
        members = {
            name: Share(
                one["channels"],
                one["until"],
                {(channel, partition) for channel, partition in one["held"]},
                timedelta(seconds=one["lease"]),
            )
            for name, one in told["members"].items()
        }
        return cls(members, {(channel, partition): offset for channel, partition, offset in told["committed"]})

    def expire(self, now: Micros) -> None:
        # A lease that ends far later than it could is of a clock that was set back: its member may be long dead.
        self.members = {
            name: share for name, share in self.members.items() if now < share.until <= now + 2 * _micros(share.lease)
        }

    def known(self, now: Micros) -> bool:
        """Somebody is in it, or has left positions."""
        self.expire(now)
        return bool(self.members or self.committed)

    def beat(self, name: str, channels: Mapping[str, int], now: Micros, lease: timedelta = LEASE) -> "Deal":
        """Renew a lease, take what is free of one's share, and say what is beyond it."""
        self.expire(now)
        new = name not in self.members
        share = self.members.setdefault(name, Share({}, 0))
        share.channels, share.until, share.lease = dict(channels), now + _micros(lease), lease
        target = shares(self.members)[name]
        taken = {place for one in self.members.values() for place in one.held}
        share.held |= target - taken
        return Deal(new, frozenset(share.held & target), frozenset(share.held - target))

    def release(self, name: str, partitions: Collection[ChannelPartition]) -> None:
        if share := self.members.get(name):
            share.held -= set(partitions)

    def forget(self, channel: str) -> None:
        """A channel is gone. Another one of its name begins anew, also for those who still hold partitions of it."""
        self.committed = {place: offset for place, offset in self.committed.items() if place[0] != channel}
        self.members = {
            name: share for name, share in self.members.items() if all(place[0] != channel for place in share.held)
        }

    def commit(self, name: str, positions: Mapping[ChannelPartition, int], now: Micros) -> frozenset[ChannelPartition]:
        """Write down how far a member is; the partitions that are not its own, in which case nothing is written."""
        share = self.members.get(name)
        ours = share.held if share and share.until > now else set[ChannelPartition]()
        if strange := frozenset(positions) - ours:
            return strange
        self.committed |= positions
        return frozenset()


@dataclass(frozen=True)
class Deal:
    new: bool
    """The member was not known: whatever it held before is lost."""
    held: frozenset[ChannelPartition]
    """What is its own and should be."""
    beyond: frozenset[ChannelPartition]
    """What is its own still, and should be somebody else's."""


def shares(members: Mapping[str, Share]) -> dict[str, set[ChannelPartition]]:
    """What each member should hold: nobody has two more than another who asks for one of them; and little moves.

    All members find the same, whoever looks.
    """
    names = sorted(members)
    counts: dict[str, int] = {}
    for share in members.values():
        for channel, count in share.channels.items():
            counts[channel] = max(count, counts.get(channel, 0))
    free = {(channel, partition) for channel, count in counts.items() for partition in range(count)}
    found: dict[str, set[ChannelPartition]] = {name: set() for name in names}

    def load(name: str, channel: str) -> tuple[int, int]:
        """How much a member has, and how much of one channel: what is even in all should be so in each."""
        return len(found[name]), sum(1 for place in found[name] if place[0] == channel)

    for name in names:
        found[name] = {place for place in members[name].held & free if place[0] in members[name].channels}
        free -= found[name]
    for place in sorted(free):
        asking = [name for name in names if place[0] in members[name].channels]
        _, least = min((load(name, place[0]), name) for name in asking)
        found[least].add(place)
    while (move := _move(members, found)) is not None:
        place, giver, taker = move
        found[giver].remove(place)
        found[taker].add(place)
    return found


def _move(
    members: Mapping[str, Share], found: Mapping[str, set[ChannelPartition]]
) -> tuple[ChannelPartition, str, str] | None:
    """A partition that somebody has who has two more than another who asks for it."""
    by_load = sorted(found, key=lambda name: len(found[name]))
    for giver in reversed(by_load):
        for taker in by_load:
            if len(found[giver]) - len(found[taker]) < 2:
                break
            if wanted := [place for place in found[giver] if place[0] in members[taker].channels]:
                return _most(wanted, found[taker]), giver, taker
    return None


def _most(partitions: Sequence[ChannelPartition], beside: Collection[ChannelPartition]) -> ChannelPartition:
    """The last partition of the channel that the giver has most of, and the taker least."""
    excess: dict[str, int] = {}
    for channel, _ in partitions:
        excess[channel] = excess.get(channel, 0) + 1
    for channel, _ in beside:
        if channel in excess:
            excess[channel] -= 1
    return max(partitions, key=lambda place: (excess[place[0]], place))


class Table(Protocol):
    """Where a binder keeps what its groups know."""

    def change(self, group: str, change: Callable[[Standing, Micros], Answer]) -> Answer:
        """Let a function change what a group knows: atomically, with the time as all members see it."""


class Readable(Protocol):
    """The part of a binder that members need."""

    def reader(
        self, start: Mapping[str, Offsets], linger: float = 0.0, only: Collection[ChannelPartition] | None = None
    ) -> AbstractContextManager[Reader]: ...

    def bounds(self, channel: str) -> Mapping[int, tuple[int, int]]: ...


class Leaving(Protocol):
    def leave(self, tell: Callable[[Sequence[ChannelPartition]], object]) -> None:
        """Leave the group; what is still held is told to `tell`."""


OneOf = TypeVar("OneOf", bound=Leaving)


@contextmanager
def joined(member: OneOf, listener: RebalanceListener) -> Iterator[OneOf]:
    """A member, for as long as the body runs. When that fails, nobody is asked to commit what it was at."""
    try:
        yield member
    except BaseException:
        member.leave(listener.lost)
        raise
    member.leave(listener.revoked)


class LeasedConsumer:
    def __init__(
        self,
        binder: Readable,
        table: Table,
        group: str,
        channels: Sequence[str],
        listener: RebalanceListener,
        beginning: bool,
        elapsed: Callable[[], float],
        lease: timedelta = LEASE,
    ) -> None:
        self._binder, self._table, self._group, self._listener = binder, table, group, listener
        self._channels, self._beginning, self._elapsed = list(channels), beginning, elapsed
        self._name = uuid.uuid4().hex
        self._lease, self._every = lease, lease.total_seconds() / 10
        self._next: dict[ChannelPartition, int] = {}
        self._beaten: float | None = None
        self._opened = ExitStack()
        self._reader: Reader | None = None
        self._read_by_it: set[ChannelPartition] = set()
        self._partitions()  # A channel that is not there is told at once.

    def read(self, most: int, wait: float) -> Sequence[Entry]:
        until = self._elapsed() + wait
        while True:
            if self._beaten is None or self._elapsed() - self._beaten >= self._every:
                self._beat()
            left = max(0.0, until - self._elapsed())
            # No longer than until the next beat: what is dealt anew has to be seen.
            found = self._read(most, min(left, self._every / 2))
            if found or self._elapsed() >= until:
                return found

    def held(self) -> Mapping[ChannelPartition, int]:
        return dict(self._next)

    def commit(self) -> None:
        positions = self.held()
        if not positions:
            return
        strange = self._table.change(self._group, lambda group, now: group.commit(self._name, positions, now))
        if strange:
            gone = ", ".join(f"{channel}/{partition}" for channel, partition in sorted(strange))
            raise Unavailable(f"group {self._group}", f"{gone} is held by others by now: nothing was committed")

    def leave(self, tell: Callable[[Sequence[ChannelPartition]], object]) -> None:
        try:
            if self._next:
                tell(sorted(self._next))
        finally:
            self._next.clear()
            self._opened.close()
            self._table.change(self._group, lambda group, _: group.members.pop(self._name, None))

    def _read(self, most: int, wait: float) -> Sequence[Entry]:
        if self._reader is None:
            time.sleep(min(wait, 0.05))  # Nothing is ours, and something may be after the next beat.
            return ()
        entries = self._reader.read(most, wait)
        for channel in self._channels:
            for partition, offset in self._reader.positions(channel).items():
                if (channel, partition) in self._next:
                    self._next[channel, partition] = offset
        return entries

    def _beat(self) -> None:
        known = self._partitions()
        deal = self._table.change(self._group, lambda group, now: group.beat(self._name, known, now, self._lease))
        if deal.new and self._next:
            before = sorted(self._next)
            self._next.clear()
            self._listener.lost(before)
        if leaving := sorted(deal.beyond & set(self._next)):
            self._listener.revoked(leaving)
            for place in leaving:
                self._next.pop(place, None)
        if deal.beyond:
            self._table.change(self._group, lambda group, _: group.release(self._name, deal.beyond))
        # Not what was given now, but what we do not read yet: an earlier beat may have failed half-way.
        if given := deal.held - set(self._next):
            start = self._starts(given)
            better = self._listener.assigned(sorted(start))
            self._next |= {place: better.get(place, offset) for place, offset in start.items()}
        if given or set(self._next) != self._read_by_it:
            self._reopen()
        self._beaten = self._elapsed()

    def _partitions(self) -> dict[str, int]:
        return {channel: len(self._binder.bounds(channel)) for channel in self._channels}

    def _starts(self, partitions: Collection[ChannelPartition]) -> dict[ChannelPartition, int]:
        """Where the group has committed; where it has not, the beginning or the end, as it is now."""
        committed = self._table.change(self._group, lambda group, _: dict(group.committed))
        bounds = {channel: self._binder.bounds(channel) for channel in {channel for channel, _ in partitions}}
        start = {}
        for channel, partition in partitions:
            if partition in bounds[channel]:  # Another member may remember more than there are by now.
                low, end = bounds[channel][partition]
                start[channel, partition] = committed.get((channel, partition), low if self._beginning else end)
        return start

    def _reopen(self) -> None:
        self._opened.close()
        self._reader, self._read_by_it = None, set()
        if self._next:
            start: dict[str, dict[int, int]] = {channel: {} for channel in self._channels}
            for (channel, partition), offset in self._next.items():
                start[channel][partition] = offset
            self._reader = self._opened.enter_context(self._binder.reader(start, only=set(self._next)))
        self._read_by_it = set(self._next)


def _micros(span: timedelta) -> Micros:
    return round(span.total_seconds() * 1e6)


def described(name: str, standing: Standing, now: Micros) -> Group:
    if not standing.known(now):
        raise Unavailable(f"group {name}", "there is none of that name")
    members = {member: sorted(share.held) for member, share in standing.members.items()}
    return Group(name, "stable" if members else "empty", members, dict(standing.committed))


def moved(standing: Standing, now: Micros, group: str, positions: Mapping[str, Offsets]) -> None:
    """Write positions down for a group that has no members."""
    standing.expire(now)
    if standing.members:
        raise Unavailable(f"group {group}", f"it has {len(standing.members)} members: stop them first")
    standing.committed |= {
        (channel, partition): offset for channel, offsets in positions.items() for partition, offset in offsets.items()
    }

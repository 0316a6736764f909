"""How far a group is behind in its channels."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from penstock.core.contracts import ChannelPartition, Channels, Group


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """The lag of a group in one partition."""

    place: ChannelPartition
    committed: int | None
    bounds: tuple[int, int] | None
    """None if the channel no longer exists."""
    member: str | None

    @property
    def first(self) -> int | None:
        return self.bounds and self.bounds[0]

    @property
    def end(self) -> int | None:
        return self.bounds and self.bounds[1]

    @property
    def lag(self) -> int | None:
        """Offsets that are not committed; None without a commit, because it is not known where reading starts."""
        return None if self.committed is None or self.end is None else max(0, self.end - self.committed)

    def to_json(self) -> dict[str, object]:
        channel, partition = self.place
        return {
            "channel": channel,
            "partition": partition,
            "member": self.member,
            "committed": self.committed,
            "first": self.first,
            "end": self.end,
            "lag": self.lag,
        }


@dataclass(frozen=True, slots=True)
class GroupLag:
    """The lag of a group in all its channels."""

    group: Group
    rows: Sequence[PartitionLag]

    @classmethod
    def of(cls, channels: Channels, group: Group, only: Collection[str] | None = None) -> "GroupLag":
        """`only`: these channels alone."""
        holder = {place: member for member, places in group.members.items() for place in places}
        places = {*holder, *group.committed}
        bounds = dict(_bounds(channels, {channel for channel, _ in places}))
        rows = [
            PartitionLag(place, group.committed.get(place), bounds.get(place), holder.get(place))
            for place in sorted({*places, *bounds})
            if not only or place[0] in only
        ]
        return cls(group, rows)

    @property
    def lag(self) -> int:
        return sum(row.lag or 0 for row in self.rows)


def _bounds(channels: Channels, names: Collection[str]) -> Iterator[tuple[ChannelPartition, tuple[int, int]]]:
    known = channels.names()
    for name in names:
        if name in known:
            yield from (((name, partition), both) for partition, both in channels.bounds(name).items())

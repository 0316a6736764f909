"""How far a group is behind in its channels."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from penstock.core.contracts import ChannelPartition, Channels, Group


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """The lag of a group in one partition."""

    location: ChannelPartition
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
        channel, partition = self.location
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
        holder = {partition: member for member, partitions in group.members.items() for partition in partitions}
        partitions = {*holder, *group.committed}
        bounds = dict(_bounds(channels, {channel for channel, _ in partitions}))
        rows = [
            PartitionLag(partition, group.committed.get(partition), bounds.get(partition), holder.get(partition))
            for partition in sorted({*partitions, *bounds})
            if not only or partition[0] in only
        ]
        return cls(group, rows)

    @property
    def lag(self) -> int:
        return sum(row.lag or 0 for row in self.rows)


def _bounds(channels: Channels, names: Collection[str]) -> Iterator[tuple[ChannelPartition, tuple[int, int]]]:
    existing = channels.names()
    for name in names:
        if name in existing:
            yield from (((name, partition), both) for partition, both in channels.bounds(name).items())

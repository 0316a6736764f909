"""A process that is a member of a group, and prints how many partitions it holds."""

import pickle
import sys
from collections.abc import Mapping, Sequence

from penstock.core.contracts import ChannelPartition, Channels


class Silent:
    def assigned(self, _: Sequence[ChannelPartition]) -> Mapping[ChannelPartition, int]:
        return {}

    def revoked(self, _: Sequence[ChannelPartition]) -> None: ...

    def lost(self, _: Sequence[ChannelPartition]) -> None: ...


def hold(channels: Channels, group: str, channel: str) -> None:
    with channels.join(group, [channel], Silent()) as member:
        while True:
            member.read(10, 0.05)
            sys.stdout.write(f"{len(member.held())}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    pickled, group_name, asked = sys.argv[1:]
    hold(pickle.loads(bytes.fromhex(pickled)), group_name, asked)

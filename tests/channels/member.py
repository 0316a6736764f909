"""A member of a group, as a process: writes down what it is given, what it has processed, and what it gives back.

`member.py SERVERS GROUP CHANNEL FILE`, until SIGTERM. Each line of the file is an event with the time at which it was
over, of a clock that all processes of a machine share.
"""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.channels.kafka import Kafka
from penstock.core.contracts import ChannelPartition, Entry, Member
from penstock.core.errors import Unavailable
from penstock.supervise.process import stop_on_signals

EVERY = 0.2


class Diary:
    """Each event is with the system in one write: a kill -9 takes nothing of it."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, event: str, **facts: object) -> None:
        os.write(self._file, json.dumps({"event": event, "at": time.monotonic(), **facts}).encode() + b"\n")


class RebalanceListener:
    def __init__(self, diary: Diary) -> None:
        self._diary = diary
        self.member: Member | None = None

    def assigned(self, partitions: Sequence[ChannelPartition]) -> Mapping[ChannelPartition, int]:
        self._diary.write("given", partitions=[partition for _, partition in partitions])
        return {}

    def revoked(self, partitions: Sequence[ChannelPartition]) -> None:
        assert self.member is not None
        commit(self.member, self._diary)
        self._diary.write("taken", partitions=[partition for _, partition in partitions])

    def lost(self, partitions: Sequence[ChannelPartition]) -> None:
        self._diary.write("lost", partitions=[partition for _, partition in partitions])


def commit(member: Member, diary: Diary) -> None:
    try:
        member.commit()
    except Unavailable as error:
        diary.write("not committed", why=str(error))


def runs(entries: Sequence[Entry]) -> dict[int, list[list[int]]]:
    """Per partition, the first and the last offset of each run of them."""
    found: dict[int, list[list[int]]] = {}
    for entry in entries:
        of = found.setdefault(entry.partition, [])
        if of and of[-1][1] == entry.offset - 1:
            of[-1][1] = entry.offset
        else:
            of.append([entry.offset, entry.offset])
    return found


def main(servers: str, group: str, channel: str, file: str) -> None:
    with stop_on_signals() as stop:
        diary = Diary(Path(file))  # Once the file exists, SIGTERM lets this process leave the group.
        listener = RebalanceListener(diary)
        with Kafka(servers).join(group, [channel], listener) as member:
            listener.member, due = member, time.monotonic()
            while not stop.is_set():
                try:
                    entries = member.read(1_000, 0.1)
                except Unavailable as error:
                    diary.write("waiting", why=str(error))
                    continue
                if entries:
                    diary.write("processed", offsets=runs(entries))
                if time.monotonic() >= due:
                    commit(member, diary)
                    due = time.monotonic() + EVERY


if __name__ == "__main__":
    main(*sys.argv[1:])

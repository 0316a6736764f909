"""What tests of channels do with them."""

import asyncio
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from penstock.core.contracts import ChannelPartition, Channels, Entry, Member, Offsets, Reader
from penstock.core.record import Origin, Record

PATIENCE = 30.0


def numbered(count: int, keys: int = 7, first: int = 1, sender: str = "s") -> list[Record]:
    return [
        Record(b"%d" % n, Origin(sender, 1, n, 1_000 + n), b"k%d" % (n % keys)) for n in range(first, first + count)
    ]


def number(entry: Entry) -> int:
    return int(entry.value or b"")


def numbers(entries: Sequence[Entry]) -> list[int]:
    return [number(entry) for entry in entries]


def send(channels: Channels, channel: str, records: Sequence[Record], at_once: int | None = None) -> None:
    """Send by one sender, in one call or so many records in each."""

    async def go() -> None:
        async with channels.sender() as sender:
            step = at_once or max(1, len(records))
            for begin in range(0, len(records), step):
                await sender.send(channel, records[begin : begin + step])

    asyncio.run(go())


def gathered(reader: Reader | Member, count: int, most: int = 1_000, patience: float = PATIENCE) -> list[Entry]:
    """Read until there are so many entries."""
    found: list[Entry] = []
    until = time.monotonic() + patience
    while len(found) < count:
        assert time.monotonic() < until, f"{len(found)} of {count} came"
        found += reader.read(min(most, count - len(found)), 1)
    return found


def read(
    channels: Channels,
    channel: str,
    count: int,
    start: Offsets | None = None,
    only: set[ChannelPartition] | None = None,
) -> list[Entry]:
    with channels.reader({channel: start or {}}, only=only) as reader:
        return gathered(reader, count)


def everything(channels: Channels, channel: str) -> list[Entry]:
    """All that a channel holds now."""
    ends = {partition: end for partition, (_, end) in channels.bounds(channel).items()}
    found: list[Entry] = []
    until = time.monotonic() + PATIENCE
    with channels.reader({channel: {}}) as reader:
        while any(reader.positions(channel)[partition] < end for partition, end in ends.items()):
            assert time.monotonic() < until, f"{reader.positions(channel)} are not {ends}"
            found += reader.read(1_000, 0.2)
    return found


def carried(
    channels: Channels,
    channel: str,
    records: Sequence[Record],
    at_once: int | None = None,
    take: Callable[[Reader, int], list[Entry]] = gathered,
) -> list[Entry]:
    """What a reader gets that is there before the sender: the way in which every binder can be used."""
    with channels.reader({channel: {}}) as reader, ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send, channels, channel, records, at_once)
        found = take(reader, len(records))
        sent.result(PATIENCE)
    return found


def eventually(condition: Callable[[], object], patience: float = PATIENCE) -> None:
    until = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < until, "it did not come true"
        time.sleep(0.02)


@contextmanager
def process(program: str, channels: Channels, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process of this folder that works with the channels; killed at the end."""
    file = Path(__file__).with_name(program)
    command = [sys.executable, str(file), pickle.dumps(channels).hex(), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        try:
            yield running
        finally:
            running.kill()


def lines(running: "subprocess.Popen[str]") -> Iterator[int]:
    """The numbers that a process prints; a last one that is torn is none."""
    assert running.stdout is not None
    return (int(line) for line in running.stdout if line.endswith("\n"))


class Noted:
    """A `Dealing` that writes down what it is told, and commits when it is asked to."""

    def __init__(
        self, starts: Mapping[ChannelPartition, int] | None = None, commit: Callable[[], None] | None = None
    ) -> None:
        self.starts, self.commit = dict(starts or {}), commit
        self.told: list[tuple[str, list[ChannelPartition]]] = []

    def assigned(self, partitions: Sequence[ChannelPartition]) -> Mapping[ChannelPartition, int]:
        self.told.append(("given", list(partitions)))
        return {location: self.starts[location] for location in partitions if location in self.starts}

    def revoked(self, partitions: Sequence[ChannelPartition]) -> None:
        self.told.append(("taken", list(partitions)))
        if self.commit:
            self.commit()

    def lost(self, partitions: Sequence[ChannelPartition]) -> None:
        self.told.append(("lost", list(partitions)))

    def partitions(self, word: str) -> list[ChannelPartition]:
        return sorted(location for said, partitions in self.told if said == word for location in partitions)

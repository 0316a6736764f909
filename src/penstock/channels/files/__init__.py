"""Channels in files: checksummed segments on one machine, for many processes at once, without a server."""

import fcntl
import os
import re
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from penstock.channels.files import topics
from penstock.channels.files.cleaning import forget
from penstock.channels.files.cursor import bounds_of
from penstock.channels.files.folder import answering
from penstock.channels.files.groups import Groups
from penstock.channels.files.log import SEGMENT, Log
from penstock.channels.files.reading import FilesReader, since
from penstock.channels.files.sending import FilesSender, Poster, Writers
from penstock.channels.files.topics import Known
from penstock.channels.leases import LEASE, LeasedConsumer, described, joined, moved
from penstock.core.clock import Micros, SystemClock
from penstock.core.contracts import ChannelPartition, EnsureResult, Group, Offsets, Promise, RebalanceListener, Topic
from penstock.core.errors import Misconfigured
from penstock.core.text import did_you_mean

_SYNCED = Promise(
    durable=True,
    replay=True,
    description=(
        "a record is acknowledged once it is synced to disk: it survives kill -9, and a power cut as far as the disk "
        "keeps its word; one machine, one copy"
    ),
)
_CACHED = Promise(
    durable=True,
    replay=True,
    description=(
        "a record is acknowledged from the memory of the operating system (sync=no): it survives kill -9 of every "
        "process, and no power cut; one machine, one copy"
    ),
)
_UNITS = {"": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
_OPTIONS = ("sync", "segment")
_HOLDER = ".held"


def at(address: str, _: object = None) -> "Files":
    """`file:///absolute/path?sync=yes|no&segment=64MB`."""
    place, told = f"channels at {address}", urlsplit(address)
    path = Path(unquote(told.path))
    if told.netloc not in ("", "localhost") or not told.path.strip("/") or ".." in path.parts:
        raise Misconfigured(place, "it tells no absolute path", "write file:///absolute/path, with three slashes")
    options = dict(parse_qsl(told.query, keep_blank_values=True))
    for name in options:
        if name not in _OPTIONS:
            fix = did_you_mean(name, _OPTIONS, f"the options are {' and '.join(_OPTIONS)}")
            raise Misconfigured(place, f'"{name}" is not an option', fix)
    if (sync := options.get("sync", "yes")) not in ("yes", "no"):
        raise Misconfigured(place, f'sync is "{sync}"', "write sync=yes or sync=no")
    return Files(path, sync == "yes", _size(place, options.get("segment", "64MB")))


def _size(place: str, text: str) -> int:
    match = re.fullmatch(r"(\d{1,9})\s*(|KB|MB|GB)", text.strip().upper())
    size = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 1 << 10 <= size <= 1 << 40:
        raise Misconfigured(place, f'segment is "{text}"', "write a number with KB, MB or GB, such as 64MB")
    return size


@dataclass(frozen=True)
class Files:
    """The binder: names of channels become folders in a folder.

    `segment`: of so many bytes is a file, about. `lease`: after how long a silent member of a group has lost its
    partitions.
    """

    folder: Path
    sync: bool = True
    segment: int = SEGMENT
    lease: timedelta = LEASE

    @property
    def promise(self) -> Promise:
        return _SYNCED if self.sync else _CACHED

    @property
    def where(self) -> str:
        options = ([] if self.sync else ["sync=no"]) + ([f"segment={self.segment}"] if self.segment != SEGMENT else [])
        return self.folder.absolute().as_uri() + ("?" + "&".join(options) if options else "")

    # --- topics

    def ensure(self, topics_: Sequence[Topic]) -> EnsureResult:
        with answering(self.folder):
            return topics.ensure(self.folder, topics_)

    def names(self) -> list[str]:
        with answering(self.folder):
            return topics.names(self.folder)

    def topic(self, channel: str) -> Topic:
        return self._known(channel).topic

    def topic_id(self, channel: str) -> str:
        return self._known(channel).id

    def remove(self, channel: str) -> None:
        with answering(self.folder):
            topics.remove(self.folder, channel)
        groups = self._groups()
        for group in groups.names():
            groups.change(group, lambda standing, _: standing.forget(channel))

    # --- in

    @asynccontextmanager
    async def sender(self) -> AsyncIterator[FilesSender]:
        sender = FilesSender(self.folder, self._writers())
        try:
            yield sender
        finally:
            await sender.close()

    @contextmanager
    def poster(self) -> Iterator[Callable[[str, bytes, bytes], None]]:
        poster = Poster(self._writers())
        try:
            yield poster.post
        finally:
            poster.close()

    def log(self, folder: Path, known: Known) -> Log:
        """The log of a partition, as its channel wants it."""
        return Log(folder, self.segment, os.fdatasync if self.sync else None, topics.turn(known.topic))

    # --- out

    @contextmanager
    def reader(
        self, start: Mapping[str, Offsets], linger: float = 0.0, only: Collection[ChannelPartition] | None = None
    ) -> Iterator[FilesReader]:
        with answering(self.folder):
            reader = FilesReader(self.folder, start, linger, only)
        try:
            yield reader
        finally:
            reader.close()

    def bounds(self, channel: str) -> Mapping[int, tuple[int, int]]:
        with answering(self.folder):
            return {partition: bounds_of(folder) for partition, folder in self._partitions(channel)}

    def forget(self, channel: str, before: Offsets) -> None:
        """What lies before these positions need not stay: it goes, segment by segment."""
        with answering(self.folder):
            for partition, folder in self._partitions(channel):
                forget(folder, before.get(partition, 0))

    def since(self, channel: str, timestamp: Micros) -> Offsets:
        with answering(self.folder):
            return {partition: since(folder, timestamp) for partition, folder in self._partitions(channel)}

    @contextmanager
    def hold(self, channel: str) -> Iterator[None]:
        """Have a channel for oneself, among all who ask for that; Misconfigured when somebody has it."""
        with answering(self.folder):
            topics.known(self.folder, channel)
            place = topics.home(self.folder, channel)
            opened = os.open(place / _HOLDER, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                fix = "stop that one, or start this one in another folder"
                raise Misconfigured(str(place), "it is in use by another process", fix) from error
            yield
        finally:
            # With it goes the lock; that of a process that was killed went with the process.
            os.close(opened)

    # --- groups

    @contextmanager
    def join(
        self, group: str, channels: Sequence[str], listener: RebalanceListener, *, beginning: bool = True
    ) -> Iterator[LeasedConsumer]:
        clock = SystemClock()
        member = LeasedConsumer(self, self._groups(), group, channels, listener, beginning, clock.elapsed, self.lease)
        with joined(member, listener):
            yield member

    def groups(self) -> list[str]:
        return self._groups().names()

    def group(self, name: str) -> Group:
        return described(name, self._groups().standing(name), SystemClock().now())

    def move(self, group: str, positions: Mapping[str, Offsets]) -> None:
        self._groups().change(group, lambda standing, now: moved(standing, now, group, positions))

    # --- parts

    def _known(self, channel: str) -> Known:
        with answering(self.folder):
            return topics.known(self.folder, channel)

    def _partitions(self, channel: str) -> Iterator[tuple[int, Path]]:
        for partition in range(topics.known(self.folder, channel).topic.partitions):
            yield partition, topics.partition(self.folder, channel, partition)

    def _groups(self) -> Groups:
        return Groups(self.folder, SystemClock())

    def _writers(self) -> Writers:
        return Writers(self.folder, self.log, SystemClock())

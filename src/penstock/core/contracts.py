"""The interfaces between the tiers. The tiers import these, and not each other.

Most interfaces have two parts: a frozen description, which opens nothing and can be pickled, and the handle that
opening it returns. A wrapper has the interface of what it wraps.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Protocol, runtime_checkable

from penstock.core.clock import Micros
from penstock.core.record import Headers, Heartbeat, Origin, OutageInterval, Record, light_dataclass


class Guarantee(StrEnum):
    """How often a record takes effect if something fails."""

    EXACTLY_ONCE = "exactly once"
    AT_LEAST_ONCE = "at least once"
    AT_MOST_ONCE = "at most once"
    BEST_EFFORT = "best effort"


# --- collection -------------------------------------------------------------------------------------------------------


@light_dataclass
class Arrival:
    """One payload that a source received.

    `origin`: the sender, epoch and number, where the sender numbers its records.
    `cursor`: where records have no numbers but the source can resume: the text from which it resumes after this record,
    different for each record. It is stored in the headers of the record and identifies a repeated record.
    `dedup_key`: identifies the record instead of the cursor, where a repeated record can have another cursor.
    `refused`: the reason why the payload is invalid; it becomes a dead letter.
    `shed`: dropped by load shedding; it is only counted.
    """

    value: bytes
    origin: Origin | None = None
    cursor: str | None = None
    refused: str | None = None
    shed: bool = False
    dedup_key: str | None = None


async def _no_acknowledgement(error: Exception | None) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Intake:
    """A batch of arrivals in order, with its acknowledgement.

    The ingest loop awaits `settle(None)` when all arrivals are durable (they survive a crash of this process), or
    `settle(error)` when they may not be. The source acknowledges to the sender only after `settle(None)`.
    """

    arrivals: Sequence[Arrival | Heartbeat | OutageInterval]
    settle: Callable[[Exception | None], Awaitable[None]] = _no_acknowledgement


SenderNumbers = Mapping[str, tuple[int, int]]
"""By sender: epoch and sequence number."""


@dataclass(frozen=True, slots=True)
class ResumeState:
    """The point from which a source resumes: all records up to it are durable."""

    numbers: SenderNumbers = field(default_factory=dict)
    """By sender: the last number before the first gap."""
    cursor: str | None = None
    """The cursor of the last record before the first gap, for a source whose records have cursors."""
    highest: SenderNumbers = field(default_factory=dict)
    """By sender: the highest durable number. There can be gaps before it."""


class Source(Protocol):
    """A description of where records come from."""

    @property
    def name(self) -> str:
        """Unique in a pipeline. Also the sender's name of records that the collector numbers."""

    @property
    def guarantee(self) -> Guarantee: ...

    @property
    def description(self) -> str:
        """The reason for the guarantee and its limits, for people: a clause without a full stop."""

    def open(self, resume: ResumeState) -> AbstractAsyncContextManager[AsyncIterator[Intake]]:
        """Connect and resume after `resume`. The iterator ends when the source is exhausted.

        Raises Unavailable when the other side is not reachable. The source acknowledges nothing before `settle(None)`.
        It is opened again after all intakes of the last opening were settled. Records that were settled with an error
        are delivered again, if the sender still has them.
        """


@dataclass(frozen=True)
class SourceContext:
    """What a source can use of its pipeline."""

    channels: "Channels"
    into: str
    dead: str
    bookmarks: str
    folder: Path
    """A local folder for state that survives the process."""


@runtime_checkable
class NeedsContext(Protocol):
    """A source that uses its SourceContext."""

    def with_context(self, context: SourceContext) -> Source: ...


# --- channels ---------------------------------------------------------------------------------------------------------

Offsets = Mapping[int, int]
"""Per partition, the offset of the next record to read."""


@light_dataclass
class Entry:
    """A record that was read from a channel."""

    channel: str
    partition: int
    offset: int
    appended: Micros
    key: bytes | None
    value: bytes | None
    headers: Headers


@dataclass(frozen=True, slots=True)
class Topic:
    """A channel as it is declared."""

    name: str
    partitions: int = 1
    replicas: int | None = None
    """The number of copies; None: the default of the middleware."""
    compacted: bool = False
    """Only the last record of each key has to stay."""
    retention: timedelta | None = None
    """How long records are kept; None: forever."""
    config: Mapping[str, str] = field(default_factory=dict)
    """Further settings of the middleware."""


@dataclass(frozen=True, slots=True)
class EnsureResult:
    """What `Channels.ensure` did. It never removes anything."""

    made: tuple[str, ...] = ()
    extended: tuple[str, ...] = ()
    """Channels that got more partitions. Some keys change their partition."""
    differences: tuple[str, ...] = ()
    """A sentence for each difference from the declaration that remains."""


@dataclass(frozen=True, slots=True)
class Promise:
    """What a binder guarantees for a record that it has acknowledged."""

    durable: bool
    """The record survives a kill -9 of every process."""
    replay: bool
    """The record can be read again; otherwise each record is read once, by one reader."""
    description: str
    """Both, with their limits, as text."""


class Sender(Protocol):
    async def send(self, channel: str, records: Sequence[Record]) -> None:
        """Append the records in order; return once they are acknowledged.

        If it raises, some records may have been appended. Sending them again can append them a second time, with the
        same origin. Stores, the audit and queries with `unique=` count such a copy once; a query without `unique=`
        counts it twice. Raises Unavailable, or waits, while the middleware does not answer; Refused if a record can
        never be appended, for example because it is too large. If the middleware is slow, this call waits.
        """


class Reader(Protocol):
    def read(self, most: int, wait: float) -> Sequence[Entry]:
        """Read up to `most` entries, in order within each partition; none if there is none within `wait` seconds."""

    def positions(self, channel: str) -> Offsets:
        """The offsets of the next reads. They may pass offsets without an entry."""

    def age(self) -> float:
        """Seconds since the reader was at the end of its channels; infinite if it never was."""


ChannelPartition = tuple[str, int]
"""A partition of a channel."""


class RebalanceListener(Protocol):
    """Called from `Member.read` when the partitions of a consumer change."""

    def assigned(self, partitions: Sequence[ChannelPartition]) -> Mapping[ChannelPartition, int]:
        """These partitions are assigned. Returns start offsets that replace those of the group."""

    def revoked(self, partitions: Sequence[ChannelPartition]) -> None:
        """These partitions are revoked once this returns. It can still commit."""

    def lost(self, partitions: Sequence[ChannelPartition]) -> None:
        """These partitions were lost because the consumer was silent for too long. It cannot commit any more."""


class Member(Protocol):
    """A consumer: it shares channels with the other consumers of its group. Each partition has one consumer."""

    def read(self, most: int, wait: float) -> Sequence[Entry]:
        """As `Reader.read`, of the assigned partitions. A consumer that does not read for long loses them.

        `read(0, 0)` reads nothing and keeps them.
        """

    def held(self) -> Mapping[ChannelPartition, int]:
        """The assigned partitions, with the next offset of each."""

    def commit(self) -> None:
        """Commit the offsets of all that was read. Raises Unavailable if a partition is no longer assigned."""


@dataclass(frozen=True, slots=True)
class Group:
    """The state of a consumer group."""

    name: str
    state: str
    members: Mapping[str, Sequence[ChannelPartition]]
    committed: Mapping[ChannelPartition, int]


class Channels(Protocol):
    """A binder: the channels of one middleware. A description that opens nothing and can be pickled."""

    @property
    def promise(self) -> Promise: ...

    @property
    def where(self) -> str:
        """The address of the middleware, without passwords."""

    def ensure(self, topics: Sequence[Topic]) -> EnsureResult:
        """Create or extend channels. Existing channels never lose partitions or records."""

    def names(self) -> list[str]:
        """The existing channels, in alphabetical order."""

    def topic(self, channel: str) -> Topic:
        """An existing channel with all its settings; Unavailable if it does not exist."""

    def topic_id(self, channel: str) -> str:
        """An id that changes if the channel is removed and created again."""

    def remove(self, channel: str) -> None:
        """Delete a channel and its records."""

    def sender(self) -> AbstractAsyncContextManager[Sender]: ...

    def poster(self) -> AbstractContextManager[Callable[[str, bytes, bytes], None]]:
        """A function `post(channel, key, value)` that does not wait, for records that may be lost, such as status."""

    def reader(
        self, start: Mapping[str, Offsets], only: Collection[ChannelPartition] | None = None
    ) -> AbstractContextManager[Reader]:
        """Read these channels from these offsets; a partition without one is read from its beginning.

        `only`: the partitions to read. Reading raises Unaccounted if retention has removed the next offset.
        """

    def bounds(self, channel: str) -> Mapping[int, tuple[int, int]]:
        """Per partition, the first offset that is kept and the offset of the next record.

        Unavailable if there is no such channel.
        """

    def since(self, channel: str, timestamp: Micros) -> Offsets:
        """Per partition, the offset of the first entry that was appended at this time or later, or the end."""

    def join(
        self, group: str, channels: Sequence[str], listener: RebalanceListener, *, beginning: bool = True
    ) -> AbstractContextManager[Member]:
        """Join a consumer group; leave it at the end.

        A partition is read from its committed offset; without one, from its beginning or its end. If the body raises,
        the listener gets `lost`, not `revoked`.
        """

    def groups(self) -> list[str]:
        """The groups with members or committed offsets, in alphabetical order."""

    def group(self, name: str) -> Group:
        """The state of a group; Unavailable if it does not exist."""

    def move(self, group: str, positions: Mapping[str, Offsets]) -> None:
        """Set the committed offsets of a group without members."""

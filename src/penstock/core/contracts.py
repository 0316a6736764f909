"""The shapes by which the tiers know each other. `pipeline/` introduces them; they are strangers otherwise.

Each shape comes as a frozen description that costs nothing and can be pickled, and as the live handle that opening it
gives. Wrappers have the shape of what they wrap.
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
    """What a part promises for each record that it took."""

    EXACTLY_ONCE = "exactly once"
    AT_LEAST_ONCE = "at least once"
    BEST_EFFORT = "best effort"


# --- collection -------------------------------------------------------------------------------------------------------


@light_dataclass
class Arrival:
    """One payload from outside.

    `origin`: where the outside numbers its records. `cursor`: where it does not, but can go on after a place of its
    own: the text by which this source finds what follows this very record, another for each record. It is kept with
    the record, which is known by it when it comes again. `mark`: by what it is known instead, where the cursor tells
    of others, too, and may be another one then. `refused`: why it cannot be taken as it is; then it becomes a dead
    letter. `shed`: it was dropped on purpose, because there was too much: it is counted, and that is all.
    """

    value: bytes
    origin: Origin | None = None
    cursor: str | None = None
    refused: str | None = None
    shed: bool = False
    mark: str | None = None


@dataclass(frozen=True, slots=True)
class Intake:
    """What a source yields: some arrivals in order, and the call that tells it that they are safe now.

    `settle(None)` is awaited once all arrivals survive a crash of this process; `settle(error)` when they were not
    taken. Only then may the source acknowledge to the outside or move its cursor.
    """

    arrivals: Sequence[Arrival | Heartbeat | OutageInterval]
    settle: Callable[[Exception | None], Awaitable[None]]


SenderNumbers = Mapping[str, tuple[int, int]]
"""Per sender, the (epoch, seq) up to which everything is safe."""


@dataclass(frozen=True, slots=True)
class ResumeState:
    """What is safe already: where a source that can resume has to go on."""

    places: SenderNumbers = field(default_factory=dict)
    cursor: str | None = None
    """That of the last record before which all are safe, for a source whose records have one."""
    highest: SenderNumbers = field(default_factory=dict)
    """The highest numbers that were taken: there may be gaps before them."""


class Source(Protocol):
    """A way in: a description of where records come from."""

    @property
    def name(self) -> str:
        """Also the sender's name, when the collector has to number the records itself."""

    @property
    def guarantee(self) -> Guarantee: ...

    @property
    def description(self) -> str:
        """Why it can promise that, and what it cannot promise, for people: half a sentence."""

    def open(self, taken: ResumeState) -> AbstractAsyncContextManager[AsyncIterator[Intake]]:
        """Connect and go on after `taken`. Raises Unavailable when the other side is away; ends when it is done.

        Nothing may be acknowledged before it is settled, and what was not settled is given again at the next opening,
        as far as the outside still has it.
        """


@dataclass(frozen=True)
class SourceContext:
    """What a source may know of the pipeline that it belongs to."""

    channels: "Channels"
    into: str
    dead: str
    bookmarks: str
    folder: Path
    """On this machine, for what has to outlast a process."""


@runtime_checkable
class NeedsContext(Protocol):
    """A source that has to know its home."""

    def with_context(self, home: SourceContext) -> Source: ...


# --- channels ---------------------------------------------------------------------------------------------------------

Offsets = Mapping[int, int]
"""Per partition, the offset of the next record to read."""


@light_dataclass
class Entry:
    """A record as it lies in a channel."""

    channel: str
    partition: int
    offset: int
    appended: Micros
    key: bytes | None
    value: bytes | None
    headers: Headers


@dataclass(frozen=True, slots=True)
class Topic:
    """What a channel has to be, wherever it lies."""

    name: str
    partitions: int = 1
    replicas: int | None = None
    """How many copies; None: as many as the middleware finds right."""
    compacted: bool = False
    """Only the last record of each key has to stay."""
    retention: timedelta | None = None
    """How long records stay; None: for ever."""
    config: Mapping[str, str] = field(default_factory=dict)
    """Further settings, in the middleware's own words."""


@dataclass(frozen=True, slots=True)
class EnsureResult:
    """What was done so that channels are as they are declared, and what was not: nothing is ever destroyed."""

    made: tuple[str, ...] = ()
    extended: tuple[str, ...] = ()
    """Those that have got more partitions: from now on, some keys lie in others than before."""
    differences: tuple[str, ...] = ()
    """A sentence for each way in which a channel is not as it is declared."""


@dataclass(frozen=True, slots=True)
class Promise:
    """What a binder promises for a record that it has acknowledged."""

    durable: bool
    """It survives a kill -9 of every process."""
    replay: bool
    """It can be read again, from any position that is kept; otherwise each record is read once, by one reader."""
    description: str
    """Both, and their limits, for people."""


class Sender(Protocol):
    async def send(self, channel: str, records: Sequence[Record]) -> None:
        """Append in order; return once they are safe, as the binder promises it.

        A call that raises may have appended some. Sending again is safe: readers know an origin that they have seen.
        Waits, or raises Unavailable, while the other side is away, and ends once it is back; Refused when it will never
        take one of them, such as a huge one.
        A sender takes no more than it can hold: when the other side is slow, this call is.
        """


class Reader(Protocol):
    def read(self, most: int, wait: float) -> Sequence[Entry]:
        """Up to `most` entries, in order within each partition; as soon as there is one, none after `wait` seconds."""

    def positions(self, channel: str) -> Offsets:
        """Where reading goes on. It may move without an entry, over offsets that hold none."""

    def age(self) -> float:
        """How many seconds ago all that the channels held then had been read; infinite before that was so."""


ChannelPartition = tuple[str, int]
"""A partition of a channel."""


class RebalanceListener(Protocol):
    """Who is told when partitions are dealt to a member of a group. Called from within its `read`."""

    def assigned(self, partitions: Sequence[ChannelPartition]) -> Mapping[ChannelPartition, int]:
        """These are ours now; where to begin, for those of which we know better than the group."""

    def revoked(self, partitions: Sequence[ChannelPartition]) -> None:
        """These are somebody else's as soon as this returns: the last moment to commit."""

    def lost(self, partitions: Sequence[ChannelPartition]) -> None:
        """These are somebody else's already: we were silent for too long. Nothing can be committed any more."""


class Member(Protocol):
    """A reader that shares channels with the other members of its group: no two hold a partition at once."""

    def read(self, most: int, wait: float) -> Sequence[Entry]:
        """As `Reader.read`, of the partitions that are ours. A member that does not read for long loses them.

        To read none, `read(0, 0)`, takes nothing, and keeps them.
        """

    def held(self) -> Mapping[ChannelPartition, int]:
        """The partitions that are ours, and where reading goes on in each."""

    def commit(self) -> None:
        """All that was read is done: who gets a partition next goes on behind it.

        Raises Unavailable when it cannot be written down, for one because a partition is ours no longer.
        """


@dataclass(frozen=True, slots=True)
class Group:
    """A group as it stands."""

    name: str
    state: str
    members: Mapping[str, Sequence[ChannelPartition]]
    committed: Mapping[ChannelPartition, int]


class Channels(Protocol):
    """A binder: what turns names of channels into logs. A description that costs nothing and can be pickled."""

    @property
    def promise(self) -> Promise: ...

    @property
    def where(self) -> str:
        """Its address, for people: without passwords."""

    def ensure(self, topics: Sequence[Topic]) -> EnsureResult:
        """Bring the channels about. What is there already is never made smaller, and never forgets."""

    def names(self) -> list[str]:
        """The channels that are there, in alphabetical order."""

    def topic(self, channel: str) -> Topic:
        """A channel as it is, with all its settings; Unavailable when it is not there."""

    def topic_id(self, channel: str) -> str:
        """What tells this channel from another one that had its name before."""

    def remove(self, channel: str) -> None:
        """Destroy a channel and all that it holds."""

    def sender(self) -> AbstractAsyncContextManager[Sender]: ...

    def poster(self) -> AbstractContextManager[Callable[[str, bytes, bytes], None]]:
        """For what need not be durable one by one, such as figures: `post(channel, key, value)` and go on."""

    def reader(
        self, start: Mapping[str, Offsets], linger: float = 0.0, only: Collection[ChannelPartition] | None = None
    ) -> AbstractContextManager[Reader]:
        """Read these channels from these positions; a partition without one is read from its beginning.

        `only`: these partitions and no others.
        Who can wait lets entries linger for some seconds: they come in fewer and larger batches, at less cost for all.
        Reading raises Unaccounted when a position is no longer kept: what lay there is lost to this reader.
        """

    def bounds(self, channel: str) -> Mapping[int, tuple[int, int]]:
        """Per partition, the first offset that is kept and the one that the next record will get.

        Unavailable when there is no such channel.
        """

    def since(self, channel: str, timestamp: Micros) -> Offsets:
        """Where the entries begin that were appended at this moment or later; the end where there is none."""

    def join(
        self, group: str, channels: Sequence[str], listener: RebalanceListener, *, beginning: bool = True
    ) -> AbstractContextManager[Member]:
        """Become a member of a group, and leave it at the end.

        A partition is read from where the group has committed; where it never did, from its beginning or its end. When
        the body raises, what is held counts as lost, not as taken: nobody knows how much of it was done.
        """

    def groups(self) -> list[str]:
        """The groups that have members, or have committed something, in alphabetical order."""

    def group(self, name: str) -> Group:
        """How a group stands; Unavailable when there is none of that name."""

    def move(self, group: str, positions: Mapping[str, Offsets]) -> None:
        """Write positions down as those that a group has committed. Only for a group that has no members."""


# --- stores -----------------------------------------------------------------------------------------------------------


class Store(Protocol):
    """A way out into a database: filled from a channel, by one loader at a time."""

    @property
    def guarantee(self) -> Guarantee: ...

    def positions(self) -> Offsets:
        """Where loading goes on, as the store itself remembers it."""

    def write(self, entries: Sequence[Entry], positions: Offsets) -> int:
        """Apply the entries and remember the positions, in one transaction; the number of rows that were new.

        Writing the same entries again changes nothing.
        """

    def close(self) -> None: ...

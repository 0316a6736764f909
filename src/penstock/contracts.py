"""The shapes by which the tiers know each other. `pipeline/` introduces them; they are strangers otherwise.

Each shape comes as a frozen description that costs nothing and can be pickled, and as the live handle that opening it
gives. Wrappers have the shape of what they wrap.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from penstock.clock import Micros
from penstock.record import Blind, Headers, Heartbeat, Origin, Record


class Guarantee(StrEnum):
    """What a part promises for each record that it took."""

    EXACTLY_ONCE = "exactly once"
    AT_LEAST_ONCE = "at least once"
    BEST_EFFORT = "best effort"


# --- collection -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrival:
    """One payload from outside, with its origin where the outside numbers its records."""

    value: bytes
    origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class Intake:
    """What a source yields: some arrivals in order, and the call that tells it that they are safe now.

    `settle(None)` is awaited once all arrivals survive a crash of this process; `settle(error)` when they were not
    taken. Only then may the source acknowledge to the outside or move its cursor.
    """

    arrivals: Sequence[Arrival | Heartbeat | Blind]
    settle: Callable[[Exception | None], Awaitable[None]]


Taken = Mapping[str, tuple[int, int]]
"""Per sender, the (epoch, seq) up to which everything is safe: where a source that can resume has to go on."""


class Source(Protocol):
    """A way in: a description of where records come from."""

    @property
    def name(self) -> str:
        """Also the sender's name, when the collector has to number the records itself."""

    @property
    def guarantee(self) -> Guarantee: ...

    def open(self, taken: Taken) -> AbstractAsyncContextManager[AsyncIterator[Intake]]:
        """Connect and go on after `taken`. Raises Unavailable when the other side is away; ends when it is done."""


# --- channels ---------------------------------------------------------------------------------------------------------

Positions = Mapping[int, int]
"""Per partition, the offset of the next record to read."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A record as it lies in a channel."""

    channel: str
    partition: int
    offset: int
    appended: Micros
    key: bytes | None
    value: bytes | None
    headers: Headers


class Sender(Protocol):
    async def send(self, channel: str, records: Sequence[Record]) -> None:
        """Append in order; return once they survive a crash of this process and of a broker.

        A call that raises may have appended some. Sending again is safe: readers know an origin that they have seen.
        """


class Reader(Protocol):
    def read(self, most: int, wait: float) -> Sequence[Entry]:
        """Up to `most` entries, in order within each partition; as soon as there is one, none after `wait` seconds."""

    def positions(self, channel: str) -> Positions:
        """Where reading goes on. It may move without an entry, over offsets that hold none."""

    def age(self) -> float:
        """How many seconds ago all that the channels held then had been read; infinite before that was so."""


class Channels(Protocol):
    """A binder: what turns names of channels into logs."""

    def sender(self) -> AbstractAsyncContextManager[Sender]: ...

    def reader(self, start: Mapping[str, Positions], linger: float = 0.0) -> AbstractContextManager[Reader]:
        """Read these channels from these positions; a partition without one is read from its beginning.

        Who can wait lets entries linger for some seconds: they come in fewer and larger batches, at less cost for all.
        """

    def bounds(self, channel: str) -> Mapping[int, tuple[int, int]]:
        """Per partition, the first offset that is kept and the one that the next record will get."""


# --- stores -----------------------------------------------------------------------------------------------------------


class Store(Protocol):
    """A way out into a database: filled from a channel, by one loader at a time."""

    @property
    def guarantee(self) -> Guarantee: ...

    def positions(self) -> Positions:
        """Where loading goes on, as the store itself remembers it."""

    def write(self, entries: Sequence[Entry], positions: Positions) -> int:
        """Apply the entries and remember the positions, in one transaction; the number of rows that were new.

        Writing the same entries again changes nothing.
        """

    def close(self) -> None: ...

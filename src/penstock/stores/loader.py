"""The loader: fills a store from a channel, and goes on where the store itself says that it stands."""

import logging
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from threading import Event
from typing import Any, Protocol, runtime_checkable

from penstock.audit.account import Account
from penstock.audit.retention import from_what_is_kept
from penstock.audit.writers import Writers
from penstock.core.clock import Clock, SystemClock
from penstock.core.contracts import Channels, Entry, Offsets, Reader, Store
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.retry import retry
from penstock.stores.accounting import AccountingStore, Figures, StoreAccounting
from penstock.stores.base import Loadable, furthest, require_kept

log = logging.getLogger(__name__)

_AT_ONCE = 250
"""Entries of one read. They may be large: a batch is written as soon as it has MOST_BYTES."""
MOST_BYTES = 32 * 1024 * 1024
_LOOK_EVERY = 5.0
"""Seconds between two looks at how long the channel is and, when nothing comes, at whether the store is still there."""


@runtime_checkable
class Refusing(Protocol):
    """A store that does not take every record."""

    refused: int


class Loader:
    """One channel into one store. A store or a channel that is away is waited for; nothing is lost or doubled."""

    def __init__(
        self,
        channels: Channels,
        channel: str,
        store: Loadable,
        clock: Clock | None = None,
        most: int = 5_000,
        wait: timedelta = timedelta(milliseconds=200),
        skip_lost: bool = False,
        writers: Writers | None = None,
    ) -> None:
        """`skip_lost`: go on behind what the channel has removed unread, instead of ending there.

        `writers`: of a result, rows that none of them has written are not loaded.
        """
        self._channels = channels
        self._channel = channel
        self._store = store
        self._clock = clock or SystemClock()
        self._most = most
        self._skip_lost = skip_lost
        self._writers = writers
        self._wait = wait.total_seconds()
        self._figures = Figures(self._clock)
        self._accounting = StoreAccounting(channel, self._clock)

    def run(self, stop: Event) -> None:
        """Load until `stop` is set; what was read by then is still written."""
        try:
            retry(lambda well: self._load(stop, well), stop, self._waiting, log)
        finally:
            self._figures.says("stopped")

    def figures(self) -> dict[str, Any]:
        """count (of rows), rate (per second), lag, refused, latency (record to row, in ms), state, and why it waits."""
        return self._figures.told()

    def account(self, stage: str) -> Account | None:
        """What the store has taken, as it said last; None until then. It lags by a second while rows are written."""
        return self._accounting.account(stage)

    def _load(self, stop: Event, well: Callable[[], None]) -> None:
        """From one fault to the next: everything is opened anew, so nothing has to be mended."""
        # Half of the time that entries may gather here is spent at the broker.
        linger = min(1.0, self._store.every.total_seconds() / 2)
        with closing(self._store.open()) as store:
            stands = store.positions()
            with self._channels.reader({self._channel: self._begins(stands)}, linger) as reader:
                if isinstance(store, AccountingStore):
                    store.begin(reader.positions(self._channel))
                batch = _Batch(self._channel, store, reader, dict(stands), self._figures, self._writers)
                self._fill(batch, store, stop, well)

    def _begins(self, stands: Offsets) -> Offsets:
        if not self._skip_lost:
            return stands
        begins = from_what_is_kept(stands, self._channels.bounds(self._channel))
        for partition, offset in begins.items():
            if offset != stands[partition]:
                gone = offset - stands[partition]
                log.warning("%s/%s: %d offsets were removed unread", self._channel, partition, gone)
        return begins

    def _fill(self, batch: "_Batch", store: Store, stop: Event, well: Callable[[], None]) -> None:
        elapsed, every = self._clock.elapsed, self._store.every.total_seconds()
        due = look = elapsed()
        while not stop.is_set():
            if elapsed() >= look:
                batch.require_kept()
                self._figures.lags(batch.behind(self._channels))
                self._figures.says("loading")
                self._accounting.look(store)
                look = elapsed() + _LOOK_EVERY
            wait = min(self._wait, max(0.0, due - elapsed())) if batch.entries else self._wait
            if batch.gather(self._most, wait):
                due = elapsed() + every
            if batch.entries and (batch.is_full(self._most) or elapsed() >= due):
                batch.write()
                self._accounting.wrote()
            self._accounting.keep_up(store)
            well()
        if batch.entries:
            batch.write()
        self._accounting.look(store)

    def _waiting(self, error: Unavailable) -> None:
        self._figures.says("waiting", str(error))


class _Batch:
    """Entries on their way from an opened reader to an opened store."""

    def __init__(
        self,
        channel: str,
        store: Store,
        reader: Reader,
        stands: dict[int, int],
        figures: Figures,
        writers: Writers | None,
    ) -> None:
        self._channel = channel
        self._store = store
        self._reader = reader
        self._stands = stands
        self._figures = figures
        self._writers = writers
        self._refused = self._bytes = 0
        self.entries: list[Entry] = []

    def gather(self, most: int, wait: float) -> bool:
        """Read more; True when these are the first of a batch."""
        first = not self.entries
        some = self._reader.read(min(_AT_ONCE, most - len(self.entries)), wait)
        if self._writers is not None:
            some = self._writers.genuine(some)
        self.entries += some
        self._bytes += sum(len(entry.value or b"") + len(entry.key or b"") for entry in some)
        return first and bool(some)

    def is_full(self, most: int) -> bool:
        return len(self.entries) >= most or self._bytes >= MOST_BYTES

    def write(self) -> None:
        positions = self._reader.positions(self._channel)
        rows = self._store.write(self.entries, positions)
        self._stands = furthest(self._stands, positions)
        refused = self._store.refused if isinstance(self._store, Refusing) else 0
        self._figures.wrote(self.entries, rows, refused - self._refused)
        self._refused, self._bytes = refused, 0
        self.entries = []

    def require_kept(self) -> None:
        """A store that came back without its last rows would otherwise miss them until the next record."""
        require_kept("the store", self._stands, self._store.positions())

    def behind(self, channels: Channels) -> int:
        """How many entries the store lacks; Misconfigured when it holds more than the channel ever had."""
        lag = 0
        for partition, (first, end) in channels.bounds(self._channel).items():
            stands = max(self._stands.get(partition, 0), first)
            if stands > end:
                raise Misconfigured(
                    f"the channel {self._channel}, partition {partition}",
                    f"it ends at {end}, but the store was filled up to {stands}:"
                    " this is another channel of the same name",
                    "empty the store, or bring back the channel that it belongs to",
                )
            lag += end - stands
        return lag

"""The loader: fills a store from a channel, and resumes at the offsets in the store."""

import logging
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from threading import Event
from typing import Any, Protocol, runtime_checkable

from penstock.audit.account import Account
from penstock.audit.lag import from_what_is_kept
from penstock.audit.writers import Writers
from penstock.core.clock import Clock, SystemClock
from penstock.core.contracts import Channels, Entry, Offsets, Reader, Store
from penstock.core.errors import Misconfigured, Unavailable, retry
from penstock.stores.accounting import AccountingStore, Figures, StoreAccounting
from penstock.stores.base import Loadable, furthest, require_kept

log = logging.getLogger(__name__)

_AT_ONCE = 250
"""Entries of one read. They can be large: a batch is written as soon as it has MOST_BYTES."""
MOST_BYTES = 32 * 1024 * 1024
_LOOK_EVERY = 5.0
"""Seconds between two checks of the channel's end and of the store."""


@runtime_checkable
class Refusing(Protocol):
    """A store that can refuse records."""

    refused: int


class Loader:
    """Fills one store from one channel. It waits for an unavailable store or channel; no row is lost or duplicated."""

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
        """`skip_lost`: continue after offsets that the channel removed unread, instead of failing.

        `writers`: of a result, only the rows of these writers are loaded.
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
        """Load until `stop` is set; entries that were read by then are still written."""
        try:
            retry(lambda well: self._load(stop, well), stop, self._waiting, log)
        finally:
            self._figures.set_state("stopped")

    def figures(self) -> dict[str, Any]:
        """Return count (of rows), rate (per second), lag, refused, latency (in ms), state, and why it waits."""
        return self._figures.to_json()

    def account(self, stage: str) -> Account | None:
        """Return the last account of the store; None before the first. It is up to a second old."""
        return self._accounting.account(stage)

    def _load(self, stop: Event, well: Callable[[], None]) -> None:
        """Load until the next error, after which store and reader are opened again."""
        # Entries are collected half of the time at the broker, half of the time here.
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
                self._figures.set_lag(batch.behind(self._channels))
                self._figures.set_state("loading")
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
        self._figures.set_state("waiting", str(error))


class _Batch:
    """Entries that were read from a channel and are not yet in the store."""

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
        """Read more; return True if these are the first of a batch."""
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
        """Check the offsets of the store: after a restart it can lack its last rows."""
        require_kept("the store", self._stands, self._store.positions())

    def behind(self, channels: Channels) -> int:
        """Return how many entries are not in the store; raise Misconfigured if it is ahead of the channel."""
        lag = 0
        for partition, (first, end) in channels.bounds(self._channel).items():
            stands = max(self._stands.get(partition, 0), first)
            if stands > end:
                raise Misconfigured(
                    f"the channel {self._channel}, partition {partition}",
                    f"it ends at {end}, but the store was filled up to {stands}:"
                    " this is another channel of the same name",
                    "empty the store, or restore the channel that it belongs to",
                )
            lag += end - stands
        return lag

"""The loader: fills a store from a channel, and resumes at the offsets in the store."""

import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from threading import Event
from typing import Any

from penstock.audit.account import Account
from penstock.audit.findings import time_of
from penstock.audit.lag import from_what_is_kept
from penstock.audit.writers import Writers
from penstock.core.clock import SystemClock
from penstock.core.contracts import Channels, Entry, Offsets, Reader
from penstock.core.errors import Misconfigured, Unavailable, retry
from penstock.stores.base import Loadable, Progress, Store, furthest, require_kept

log = logging.getLogger(__name__)

_AT_ONCE = 250
"""Entries of one read. They can be large: a batch is written as soon as it has _MAX_BYTES."""
_PAUSE = 0.02
"""Seconds between two reads, if there are few entries."""
_MAX_BYTES = 32 * 1024 * 1024
_WAIT = 0.2
_CHECK_EVERY = 1.0
"""Seconds between two checks of the channel's end and of the store."""


class Loader:
    """Fills one store from one channel. It waits for an unavailable store or channel; no row is lost or duplicated."""

    def __init__(
        self,
        channels: Channels,
        channel: str,
        store: Loadable,
        most: int = 5_000,
        skip_lost: bool = False,
        writers: Writers | None = None,
    ) -> None:
        """`skip_lost`: continue after offsets that the channel removed unread, instead of failing.

        `writers`: of a result, only the rows of these writers are loaded.
        """
        self._channels, self._channel, self._store = channels, channel, store
        self._clock = SystemClock()
        self._most, self._skip_lost, self._writers = most, skip_lost, writers
        self._progress = Progress(channel, self._clock)

    def run(self, stop: Event) -> None:
        """Load until `stop` is set; entries that were read by then are still written."""
        try:
            retry(lambda well: self._load(stop, well), stop, self._waiting, log)
        finally:
            self._progress.set_state("stopped")

    def figures(self) -> dict[str, Any]:
        return self._progress.to_json()

    def account(self, stage: str) -> Account | None:
        """Return the last account of the store; None before the first. It is up to a second old."""
        return self._progress.account(stage)

    def _load(self, stop: Event, well: Callable[[], None]) -> None:
        """Load until the next error, after which store and reader are opened again."""
        with closing(self._store.open()) as store:
            stands = store.positions()
            with self._channels.reader({self._channel: self._begins(stands)}) as reader:
                store.begin(reader.positions(self._channel))
                self._fill(store, reader, stands, stop, well)

    def _begins(self, stands: Offsets) -> Offsets:
        if not self._skip_lost:
            return stands
        begins = from_what_is_kept(stands, self._channels.bounds(self._channel))
        for partition, offset in begins.items():
            if offset != stands[partition]:
                gone = offset - stands[partition]
                log.warning("%s/%s: %d offsets were removed unread", self._channel, partition, gone)
        return begins

    def _fill(self, store: Store, reader: Reader, stands: Offsets, stop: Event, well: Callable[[], None]) -> None:
        elapsed = self._clock.elapsed
        batch: list[Entry] = []
        size, due, check = 0, elapsed(), elapsed()
        while not stop.is_set():
            if elapsed() >= check:
                # After a restart, a store can lack its last rows.
                require_kept("the store", stands, store.positions())
                self._progress.set_lag(self._behind(stands))
                self._progress.set_state("loading")
                self._progress.set_totals(store.share(), store.generation)
                check = elapsed() + _CHECK_EVERY
            wait = min(_WAIT, max(0.0, due - elapsed())) if batch else _WAIT
            some = reader.read(min(_AT_ONCE, self._most - len(batch)), wait)
            if self._writers is not None:
                some = self._writers.genuine(some)
            if some and not batch:
                due = elapsed() + self._store.every.total_seconds()
            batch += some
            size += sum(len(entry.value or b"") + len(entry.key or b"") for entry in some)
            if batch and (len(batch) >= self._most or size >= _MAX_BYTES or elapsed() >= due):
                stands = self._write(store, reader, batch, stands)
                batch, size = [], 0
            elif 0 < len(some) < _AT_ONCE:
                stop.wait(_PAUSE)  # A read returns with the first entries: let more arrive.
            well()
        if batch:
            self._write(store, reader, batch, stands)
        self._progress.set_totals(store.share(), store.generation)

    def _write(self, store: Store, reader: Reader, batch: Sequence[Entry], stands: Offsets) -> Offsets:
        """Write a batch; return the offsets of the store after it."""
        positions = reader.positions(self._channel)
        rows = store.write(batch, positions)
        times = [time for entry in batch if (time := time_of(entry.headers)) is not None]
        self._progress.stored(len(batch), rows, 0, times)
        return furthest(stands, positions)

    def _behind(self, stands: Offsets) -> int:
        """Return how many entries are not in the store; raise Misconfigured if it is ahead of the channel."""
        lag = 0
        for partition, (first, end) in self._channels.bounds(self._channel).items():
            at = max(stands.get(partition, 0), first)
            if at > end:
                raise Misconfigured(
                    f"the channel {self._channel}, partition {partition}",
                    f"it ends at {end}, but the store was filled up to {at}: this is another channel of the same name",
                    "empty the store, or restore the channel that it belongs to",
                )
            lag += end - at
        return lag

    def _waiting(self, error: Unavailable) -> None:
        self._progress.set_state("waiting", str(error))

"""The auditor: reads the headers of all channels and keeps the ledger."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from threading import Event
from typing import Protocol

from penstock.audit.findings import Findings, Kind, Watched, reduced
from penstock.audit.lag import from_what_is_kept
from penstock.audit.ledger import Ledger
from penstock.audit.writers import Writers, WriterTokens
from penstock.core.clock import Clock, Micros, SystemClock
from penstock.core.contracts import Channels, Entry, Offsets, Reader
from penstock.core.errors import Misconfigured, Refused, Unavailable, retry

log = logging.getLogger(__name__)

FULL = 3
"""After this many full reads in a row, the auditor counts the entries that are left."""
RECENT = 15.0
"""Seconds for which an error is reported after it last occurred; it is retried every five."""
CATCH_UP = 1_000_000
"""Maximum entries of one catch-up step: this bounds the memory."""


class Reduction(Protocol):
    """Reduces a long range of channels at once, such as Spark."""

    def reduce(
        self,
        start: Mapping[str, Offsets],
        end: Mapping[str, Offsets],
        kinds: Mapping[str, Kind],
        writers: WriterTokens | None = None,
    ) -> Findings: ...


class Auditor:
    """Counts every entry of the watched channels exactly once, also after crashes: its offsets are in the ledger.

    It reads the entries itself, or lets a reduction catch up over long ranges; the two can alternate.
    """

    def __init__(
        self,
        channels: Channels,
        ledger: Ledger,
        watched: Sequence[Watched],
        heartbeats: str,
        clock: Clock | None = None,
        most: int = 10_000,
        bookmarks: str = "",
        stages: Mapping[str, Sequence[str]] | None = None,
        catch_up_only: bool = False,
        skip_lost: bool = False,
    ) -> None:
        """`skip_lost`: continue after offsets that a channel removed unread; the numbers in them are then missing."""
        self._channels = channels
        self._ledger = ledger
        self._watched = watched
        self._heartbeats = heartbeats
        self._bookmarks = bookmarks
        self._clock = clock or SystemClock()
        self._most = most
        self._kinds = {one.channel: one.kind for one in watched}
        self._notes = [name for name in (heartbeats, bookmarks) if name]
        self._stages = stages
        self._catch_up_only = catch_up_only
        self._skip_lost = skip_lost
        self._writers = Writers(channels, [bookmarks] if bookmarks else [], self._clock)
        self._positions: dict[str, dict[int, int]] = {}
        self._opened = ExitStack()
        self._error: tuple[Unavailable | None, float] = None, 0.0
        self.failure: Exception | None = None
        """Another thread may set it: then `run` raises it."""
        self._reader: Reader | None = None
        self._drained = False
        self._last = self._clock.now()
        """When this auditor last merged something, or was created."""

    def step(self, wait: float) -> int:
        """Read once, waiting at most `wait` seconds, and merge the entries; return their number.

        Raises Unavailable if a channel or the ledger is unavailable, and if another auditor was faster; the next step
        continues at the offsets of the ledger.
        """
        try:
            reader = self._reader or self._open()
            entries = reader.read(self._most, wait)
            self._merge(reader, entries)
        except Refused as error:
            self.close()
            raise Unavailable("the audit", f"an entry cannot be read: {error.reason}") from error
        except BaseException:
            self.close()
            raise
        return len(entries)

    def catch_up(self, reduction: Reduction) -> int:
        """Reduce one long range of the watched channels and merge it; return how many entries are left."""
        self.close()
        start = self._starts(list(self._kinds))
        ends = {channel: self._channels.bounds(channel) for channel in self._kinds}
        now = self._clock.now()
        end, left = _next_range(start, ends)
        start = {channel: {at: start[channel][at] for at in positions} for channel, positions in end.items()}
        if end:
            # All writers of entries before these ends are announced by now.
            self._writers.refresh()
            self._add(reduction.reduce(start, end, self._kinds, self._writers.known), now, now if left == 0 else 0)
        return left

    def behind(self) -> int:
        """Return how many entries of the watched channels are not in the ledger."""
        return sum(self._ledger.unread({name: self._channels.bounds(name) for name in self._kinds}).values())

    def run(
        self,
        stop: Event,
        wait: float = 0.5,
        every: float = 0.25,
        reduction: Callable[[], Reduction] | None = None,
        behind: int = 0,
    ) -> None:
        """Step until `stop` is set. Few entries are merged every quarter of a second, not one by one.

        If the ledger is more than `behind` entries behind, the reduction reads them.
        """

        def work(well: Callable[[], None]) -> None:
            full = 0
            while not stop.is_set():
                if self.failure:
                    raise self.failure
                some = self.step(wait)
                well()
                full = full + 1 if some == self._most else 0
                if reduction and (self._catch_up_only or full >= FULL):
                    full = 0
                    self._catch_up_to(reduction, behind, bool(some), stop, well)
                if 0 < some < self._most:
                    stop.wait(every)

        try:
            retry(work, stop, self._failed, log)
        finally:
            self.close()

    def _catch_up_to(
        self,
        reduction: Callable[[], Reduction],
        behind: int,
        noted: bool,
        stop: Event,
        well: Callable[[], None],
    ) -> None:
        """Let the reduction read while more than `behind` entries are left."""
        now, left = self._clock.now(), self.behind()
        if not left and noted and self._catch_up_only:
            # No other code marks this: the numbers that were just claimed are not among unread entries.
            self._ledger.mark_drained(now)
        while left > behind and not stop.is_set() and not self.failure:
            left = self.catch_up(reduction())
            well()

    def recent_error(self) -> Unavailable | None:
        """Return the last error if it is recent: a damaged part fails again and again while others are read."""
        error, at = self._error
        return error if self._clock.elapsed() - at < RECENT else None

    def _failed(self, error: Unavailable) -> None:
        # Without the delay: the same error has the same text.
        self._error = Unavailable(error.service, error.reason), self._clock.elapsed()

    def close(self) -> None:
        """Close the reader of the channels; the ledger stays open."""
        self._reader = None
        self._opened.close()

    def _open(self) -> Reader:
        self._ledger.watch(self._watched, self._stages)
        self._positions = self._starts([*(() if self._catch_up_only else self._kinds), *self._notes])
        self._reader = self._opened.enter_context(self._channels.reader(self._positions))
        return self._reader

    def _starts(self, names: Sequence[str]) -> dict[str, dict[int, int]]:
        """Return the offsets of the ledger; an unread partition starts at its first offset."""
        stands = self._ledger.positions()
        found: dict[str, dict[int, int]] = {}
        for channel in names:
            read = stands.get(channel, {})
            bounds = self._channels.bounds(channel)
            found[channel] = {partition: read.get(partition, first) for partition, (first, _) in bounds.items()}
            # Removed heartbeats and bookmarks are not a loss: later ones repeat their content.
            if self._skip_lost or channel in self._notes:
                found[channel] = self._skipped(channel, found[channel], bounds)
            for partition, (_, end) in bounds.items():
                if read.get(partition, 0) > end:
                    raise Misconfigured(
                        f"the channel {channel}, partition {partition}",
                        f"it ends at {end}, but the ledger has read it up to {read[partition]}:"
                        " it was created again, or has lost its last records",
                        "move the ledger away, or bring back the channel that it belongs to",
                    )
        return found

    def _skipped(self, channel: str, stands: Offsets, bounds: Mapping[int, tuple[int, int]]) -> dict[int, int]:
        """Move the ledger past offsets that the channel removed unread: their numbers are reported as missing."""
        begins = from_what_is_kept(stands, bounds)
        passed = {partition: to for partition, to in begins.items() if to != stands[partition]}
        if passed:
            for partition, to in passed.items():
                log.warning("%s/%s was removed from %s to %s unread", channel, partition, stands[partition], to)
            start = {channel: {partition: stands[partition] for partition in passed}}
            self._add(Findings(start, {channel: passed}), self._clock.now(), 0)
        return begins

    def _merge(self, reader: Reader, entries: Sequence[Entry]) -> None:
        """Merge the entries and the offsets that moved: offsets also move over transaction markers, without entries."""
        end = {
            channel: moved
            for channel, offsets in self._positions.items()
            if (moved := {at: to for at, to in reader.positions(channel).items() if to != offsets.get(at)})
        }
        now = self._clock.now()
        # If a reduction reads the channels, this reader reads only heartbeats and bookmarks.
        drained = 0 if self._catch_up_only or math.isinf(age := reader.age()) else now - int(age * 1e6)
        if end:
            self._writers.learn(entries, lambda channel: self._kinds.get(channel) is Kind.RESULT)
            writers = self._writers.known
            found = reduced(entries, self._positions, end, self._kinds, self._heartbeats, self._bookmarks, writers)
            self._add(found, now, drained)
            self._last = now
            for channel, positions in end.items():
                self._positions[channel] = {**self._positions[channel], **positions}
        elif drained and not self._drained:
            self._ledger.mark_drained(drained)
        # An idle channel stays drained: this is written once after the last entries.
        self._drained = drained >= self._last and not end

    def _add(self, found: Findings, now: Micros, drained: Micros) -> None:
        try:
            self._ledger.merge(found, now, drained)
        except Refused as error:
            raise Unavailable("the audit", f"another auditor writes to this ledger: {error.reason}") from error


def _next_range(
    start: Mapping[str, Offsets], ends: Mapping[str, Mapping[int, tuple[int, int]]]
) -> tuple[dict[str, dict[int, int]], int]:
    """Return the end of the next range, the same share of each partition, and how many entries are left after it."""
    waiting = {
        (channel, partition): end - start[channel][partition]
        for channel, bounds in ends.items()
        for partition, (_, end) in bounds.items()
        if end > start[channel][partition]
    }
    total = sum(waiting.values())
    share = min(1.0, CATCH_UP / total) if total else 1.0
    end: dict[str, dict[int, int]] = {}
    count = 0
    for (channel, partition), number in waiting.items():
        some = max(1, int(number * share))
        end.setdefault(channel, {})[partition] = start[channel][partition] + some
        count += some
    return end, total - count

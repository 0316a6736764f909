"""The auditor: reads the headers of all channels and keeps the ledger."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from threading import Event
from typing import Protocol

from penstock.audit.findings import Findings, Kind, Watched, reduced
from penstock.audit.ledger import Ledger
from penstock.audit.retention import from_what_is_kept
from penstock.audit.writers import KnownWriters, Writers
from penstock.core.clock import Clock, SystemClock
from penstock.core.contracts import Channels, Entry, Offsets, Reader
from penstock.core.errors import Misconfigured, Refused, Unavailable
from penstock.core.retry import retry

log = logging.getLogger(__name__)

FULL = 3
"""After so many full reads in a row it is asked how much there is left."""
LATELY = 15.0
"""Seconds for which trouble is told after it was last met; it is tried again every five."""
STRIDE = 1_000_000
"""So many entries are reduced at once, so that memory stays bounded."""


class Reduction(Protocol):
    """Who can reduce a long stretch of channels at once, such as Spark."""

    def reduce(
        self,
        start: Mapping[str, Offsets],
        end: Mapping[str, Offsets],
        kinds: Mapping[str, Kind],
        writers: KnownWriters | None = None,
    ) -> Findings: ...


class Auditor:
    """Counts every entry of the watched channels once, whatever crashes: its positions lie in the ledger.

    It reads by itself, entry by entry, or has a reduction catch up over long stretches; the two can alternate freely.
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
        """`skip_lost`: go on behind what a channel has removed unread; numbers that lay there are then missing."""
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
        self._writers = Writers(channels, [bookmarks], self._clock) if bookmarks else None
        self._positions: dict[str, dict[int, int]] = {}
        self._opened = ExitStack()
        self._trouble: tuple[Unavailable | None, float] = None, 0.0
        self._reader: Reader | None = None
        self._drained = False
        self._last = self._clock.now()
        """When the ledger last took something, or this auditor began."""

    def step(self, wait: float) -> int:
        """Read once, waiting at most this many seconds, and merge what came; how many entries that were.

        Raises Unavailable when a channel or the ledger is, and when another auditor was quicker; the next step then
        goes on where the ledger stands.
        """
        try:
            reader = self._reader or self._open()
            entries = reader.read(self._most, wait)
            self._merge(reader, entries)
        except Refused as error:
            self.close()
            raise Unavailable("the audit", f"somebody else keeps this ledger: {error.reason}") from error
        except BaseException:
            self.close()
            raise
        return len(entries)

    def catch_up(self, reduction: Reduction) -> int:
        """Have one long stretch of the watched channels reduced, and merge it; how many entries are left then."""
        self.close()
        start = self._starts(list(self._kinds))
        ends = {channel: self._channels.bounds(channel) for channel in self._kinds}
        now = self._clock.now()
        end, left = _stretch(start, ends)
        start = {channel: {at: start[channel][at] for at in positions} for channel, positions in end.items()}
        if end:
            try:
                if self._writers is not None:
                    # Whoever wrote what lies before these ends was announced by now.
                    self._writers.refresh()
                known = None if self._writers is None else self._writers.known
                found = reduction.reduce(start, end, self._kinds, known)
                self._ledger.merge(found, now, now if left == 0 else 0)
            except Refused as error:
                raise Unavailable("the audit", f"somebody else keeps this ledger: {error.reason}") from error
        return left

    def behind(self) -> int:
        """How many entries of the watched channels are not in the ledger."""
        return sum(self._ledger.unread({name: self._channels.bounds(name) for name in self._kinds}).values())

    def run(
        self,
        stop: Event,
        wait: float = 0.5,
        every: float = 0.25,
        reduction: Callable[[], Reduction] | None = None,
        behind: int = 0,
    ) -> None:
        """Step until `stop` is set. What trickles in is merged every quarter of a second, not entry by entry.

        With a reduction, what lies more than so many entries behind is left to it.
        """

        def work(well: Callable[[], None]) -> None:
            full = 0
            while not stop.is_set():
                some = self.step(wait)
                well()
                full = full + 1 if some == self._most else 0
                if reduction and (self._catch_up_only or full >= FULL):
                    full = 0
                    self._catch_up_to(reduction, behind, bool(some), stop, well)
                if 0 < some < self._most:
                    stop.wait(every)

        try:
            retry(work, stop, self._troubled, log)
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
        """Have the reduction read as long as there is more than `behind`."""
        now, left = self._clock.now(), self.behind()
        if not left and noted and self._catch_up_only:
            # Nobody else says so: what was just claimed is not among what is still to be read.
            self._ledger.mark_drained(now)
        while left > behind and not stop.is_set():
            left = self.catch_up(reduction())
            well()

    def trouble(self) -> Unavailable | None:
        """What stood in the way lately: a part that cannot be read does so again and again, while others are read."""
        error, at = self._trouble
        return error if self._clock.elapsed() - at < LATELY else None

    def _troubled(self, error: Unavailable) -> None:
        # Without the delay: the same trouble has the same text.
        self._trouble = Unavailable(error.service, error.reason), self._clock.elapsed()

    def close(self) -> None:
        """Let go of the channels; the ledger stays open."""
        self._reader = None
        self._opened.close()

    def _open(self) -> Reader:
        self._ledger.watch(self._watched, self._stages)
        self._positions = self._starts([*(() if self._catch_up_only else self._kinds), *self._notes])
        self._reader = self._opened.enter_context(self._channels.reader(self._positions, linger=0.25))
        return self._reader

    def _starts(self, names: Sequence[str]) -> dict[str, dict[int, int]]:
        """Where the ledger stands; what it has not read yet begins where the channel does."""
        stands = self._ledger.positions()
        found: dict[str, dict[int, int]] = {}
        for channel in names:
            known = stands.get(channel, {})
            bounds = self._channels.bounds(channel)
            found[channel] = {partition: known.get(partition, first) for partition, (first, _) in bounds.items()}
            # Old notes that are gone are no loss: what they claim is said anew by those that follow.
            if self._skip_lost or channel in self._notes:
                found[channel] = self._skipped(channel, found[channel], bounds)
            for partition, (_, end) in bounds.items():
                if known.get(partition, 0) > end:
                    raise Misconfigured(
                        f"the channel {channel}, partition {partition}",
                        f"it ends at {end}, but the ledger has read it up to {known[partition]}:"
                        " this is another channel of the same name",
                        "move the ledger away, or bring back the channel that it belongs to",
                    )
        return found

    def _skipped(self, channel: str, stands: Offsets, bounds: Mapping[int, tuple[int, int]]) -> dict[int, int]:
        """Move the ledger behind what the channel has removed unread: what lay there is missing, and named so."""
        begins = from_what_is_kept(stands, bounds)
        passed = {partition: to for partition, to in begins.items() if to != stands[partition]}
        if passed:
            for partition, to in passed.items():
                log.warning("%s/%s was removed from %s to %s unread", channel, partition, stands[partition], to)
            start = {channel: {partition: stands[partition] for partition in passed}}
            self._ledger.merge(Findings(start, {channel: passed}), self._clock.now(), 0)
        return begins

    def _merge(self, reader: Reader, entries: Sequence[Entry]) -> None:
        """Take the entries, and the positions that moved: some move without an entry, over marks of transactions."""
        end = {
            channel: moved
            for channel, known in self._positions.items()
            if (moved := {at: to for at, to in reader.positions(channel).items() if to != known.get(at)})
        }
        now = self._clock.now()
        # Who leaves the channels to a reduction reads notes alone here, and knows nothing of the rest.
        drained = 0 if self._catch_up_only or math.isinf(age := reader.age()) else now - int(age * 1e6)
        if end:
            known = None
            if self._writers is not None:
                self._writers.learn(entries, lambda channel: self._kinds.get(channel) is Kind.RESULT)
                known = self._writers.known
            found = reduced(entries, self._positions, end, self._kinds, self._heartbeats, self._bookmarks, known)
            self._ledger.merge(found, now, drained)
            self._last = now
            for channel, positions in end.items():
                self._positions[channel] = {**self._positions[channel], **positions}
        elif drained and not self._drained:
            self._ledger.mark_drained(drained)
        # An idle channel stays drained: once it was so after all that came, that need not be written down again.
        self._drained = drained >= self._last and not end


def _stretch(
    start: Mapping[str, Offsets], ends: Mapping[str, Mapping[int, tuple[int, int]]]
) -> tuple[dict[str, dict[int, int]], int]:
    """Where the next stretch ends, the same share of each partition, and how many entries lie behind that."""
    waiting = {
        (channel, partition): end - start[channel][partition]
        for channel, bounds in ends.items()
        for partition, (_, end) in bounds.items()
        if end > start[channel][partition]
    }
    total = sum(waiting.values())
    share = min(1.0, STRIDE / total) if total else 1.0
    end: dict[str, dict[int, int]] = {}
    taken = 0
    for (channel, partition), number in waiting.items():
        some = max(1, int(number * share))
        end.setdefault(channel, {})[partition] = start[channel][partition] + some
        taken += some
    return end, total - taken

"""The auditor: reads the headers of all channels and keeps the ledger."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from threading import Event

from penstock.audit.findings import Watched, reduced
from penstock.audit.ledger import Ledger
from penstock.audit.patience import patiently
from penstock.clock import Clock, SystemClock
from penstock.contracts import Channels, Entry, Reader
from penstock.errors import Misconfigured, Refused, Unavailable

log = logging.getLogger(__name__)


class Auditor:
    """Counts every entry of the watched channels once, whatever crashes: its positions lie in the ledger."""

    def __init__(
        self,
        channels: Channels,
        ledger: Ledger,
        watched: Sequence[Watched],
        heartbeats: str,
        clock: Clock | None = None,
        most: int = 10_000,
    ) -> None:
        self._channels = channels
        self._ledger = ledger
        self._watched = watched
        self._heartbeats = heartbeats
        self._clock = clock or SystemClock()
        self._most = most
        self._kinds = {one.channel: one.kind for one in watched}
        self._names = [*self._kinds, heartbeats]
        self._positions: dict[str, dict[int, int]] = {}
        self._opened = ExitStack()
        self._reader: Reader | None = None

    def step(self, wait: float) -> int:
        """Read once, waiting at most this many seconds, and merge what came; how many entries that were.

        Raises Unavailable when a channel or the ledger is, and when another auditor was quicker; the next step then
        goes on where the ledger stands.
        """
        try:
            reader = self._reader or self._open()
            entries = reader.read(self._most, wait)
            if entries:
                self._merge(reader, entries)
        except Refused as error:
            self.close()
            raise Unavailable("the audit", f"somebody else keeps this ledger: {error.reason}") from error
        except BaseException:
            self.close()
            raise
        return len(entries)

    def run(self, stop: Event, wait: float = 0.5, every: float = 0.25) -> None:
        """Step until `stop` is set. What trickles in is merged every quarter of a second, not entry by entry."""

        def work(well: Callable[[], None]) -> None:
            while not stop.is_set():
                some = self.step(wait)
                well()
                if 0 < some < self._most:
                    stop.wait(every)

        try:
            patiently(work, stop, lambda error: log.warning("%s", error))
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the channels; the ledger stays open."""
        self._reader = None
        self._opened.close()

    def _open(self) -> Reader:
        self._ledger.watch(self._watched)
        stands = self._ledger.positions()
        self._positions = {channel: stands.get(channel, {}) for channel in self._names}
        for channel, positions in self._positions.items():
            bounds = self._channels.bounds(channel) if positions else {}
            for partition, offset in positions.items():
                if partition in bounds and offset > bounds[partition][1]:
                    raise Misconfigured(
                        f"the channel {channel}, partition {partition}",
                        f"it ends at {bounds[partition][1]}, but the ledger has read it up to {offset}:"
                        " this is another channel of the same name",
                        "move the ledger away, or bring back the channel that it belongs to",
                    )
        self._reader = self._opened.enter_context(self._channels.reader(self._positions, linger=0.25))
        return self._reader

    def _merge(self, reader: Reader, entries: Sequence[Entry]) -> None:
        names = {entry.channel for entry in entries}
        touched = {(entry.channel, entry.partition) for entry in entries}
        end = {
            channel: {
                partition: offset
                for partition, offset in reader.positions(channel).items()
                if (channel, partition) in touched
            }
            for channel in names
        }
        found = reduced(entries, self._positions, end, self._kinds, self._heartbeats)
        self._ledger.merge(found, self._clock.now())
        for channel, positions in end.items():
            self._positions[channel] = {**self._positions[channel], **positions}

"""A stretch of a channel, sent into another one as it once came.

What is replayed keeps its key, payload and headers, and so its identity and its event time. Two headers more tell that
it is history: `replay`, the same for all that one replay sends, and `from`, the place where it lay.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Event

from penstock.core.clock import Clock, Micros
from penstock.core.contracts import Channels, Entry, Sender
from penstock.core.errors import Misconfigured, PenstockError
from penstock.core.record import Record
from penstock.pipeline.merged import Merged, Stretch

REPLAY, FROM = "replay", "from"

_SENT_AT_ONCE = 500
_SOON = 0.02
"""What is due within so many seconds goes now: a send for each record would take longer."""


@dataclass
class Replayed:
    """How far a replay is."""

    due: int
    sent: int = 0
    last: Micros | None = None
    """When the last record that was sent had been appended: a replay since then leaves out nothing that is not sent."""
    failure: PenstockError | None = None
    """What broke it off."""


def stretch(channels: Channels, channel: str, since: Micros | None, until: Micros | None) -> dict[int, tuple[int, int]]:
    """What a channel holds from one moment up to another: all of it, when they are not said."""
    if not channels.promise.replay:
        problem = f"{channels.where} keeps nothing, so there is no history"
        raise Misconfigured(f"channel {channel}", problem, "use kafka://, redis:// or file://")
    bounds = channels.bounds(channel)
    starts = {partition: low for partition, (low, _) in bounds.items()}
    ends = {partition: end for partition, (_, end) in bounds.items()}
    if since is not None:
        starts |= channels.since(channel, since)
    if until is not None:
        ends |= channels.since(channel, until)
    return {partition: (start, ends[partition]) for partition, start in starts.items() if start < ends[partition]}


class Replay:
    """From one channel into another. `speed`: how many times as fast as it came; None: as fast as it goes."""

    def __init__(
        self, source: Channels, channel: str, target: Channels, into: str, speed: float | None, clock: Clock
    ) -> None:
        self._source, self._channel, self._target, self._into = source, channel, target, into
        self._speed, self._clock = speed, clock
        self._mark = b"%d" % clock.now()

    async def run(self, chosen: Stretch, stop: Event, tell: Callable[[Replayed], None]) -> Replayed:
        """Send the stretch in the order in which it came, until all is sent, `stop` is set, or it breaks off."""
        done = Replayed(sum(end - start for start, end in chosen.values()))
        try:
            with Merged(self._source, self._channel, chosen) as entries:
                async with self._target.sender() as sender:
                    await self._sent(entries, sender, done, stop, tell)
        except PenstockError as error:
            done.failure = error
        return done

    async def _sent(
        self, entries: Iterator[Entry], sender: Sender, done: Replayed, stop: Event, tell: Callable[[Replayed], None]
    ) -> None:
        first, began = None, self._clock.elapsed()
        waiting = await asyncio.to_thread(next, entries, None)
        while waiting is not None and not stop.is_set():
            first = waiting.appended if first is None else first
            late = self._clock.elapsed() - began
            due = (waiting.appended - first) / 1e6 / self._speed if self._speed else 0.0
            if due - late > _SOON:
                await asyncio.sleep(min(due - late, 0.2))
                continue
            batch, waiting = await asyncio.to_thread(self._due, waiting, entries, first, late + _SOON)
            await self._send(sender, batch, done)
            tell(done)

    def _due(
        self, waiting: Entry, entries: Iterator[Entry], first: Micros, late: float
    ) -> tuple[list[Entry], Entry | None]:
        """Those that are due by now, and the next that is not."""
        batch = [waiting]
        while (entry := next(entries, None)) is not None:
            if len(batch) == _SENT_AT_ONCE or (self._speed and (entry.appended - first) / 1e6 / self._speed > late):
                return batch, entry
            batch.append(entry)
        return batch, None

    async def _send(self, sender: Sender, batch: list[Entry], done: Replayed) -> None:
        await sender.send(self._into, [self._marked(entry) for entry in batch])
        done.sent += len(batch)
        done.last = batch[-1].appended

    def _marked(self, entry: Entry) -> Record:
        headers = [header for header in entry.headers if header[0] not in (REPLAY, FROM)]
        place = f"{entry.channel}:{entry.partition}:{entry.offset}".encode()
        return Record(entry.value, None, entry.key, (*headers, (REPLAY, self._mark), (FROM, place)))

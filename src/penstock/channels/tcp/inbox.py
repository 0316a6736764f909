"""What was taken and not yet read: bounded in bytes, filled by one thread and emptied by another. No I/O."""

import threading
from collections import deque
from collections.abc import Callable, Iterable

from penstock.channels.tcp.frames import Batch
from penstock.core.clock import Clock
from penstock.core.contracts import Entry
from penstock.core.record import Headers

ROOM = 16 << 20
"""So many bytes lie here at most, or one batch that is larger."""
_RECORD, _HEADER = 400, 200  # What they cost in memory beside their bytes, about.


class Inbox:
    """Entries of several channels in the order in which they came. Offsets count from zero, per channel."""

    def __init__(self, channels: Iterable[str], clock: Clock, room: int = ROOM) -> None:
        self._clock = clock
        self._room = room
        self._changed = threading.Condition()
        self._batches: deque[tuple[deque[Entry], int]] = deque()
        self._held = 0
        self._end = dict.fromkeys(channels, 0)
        self._next = dict(self._end)
        self._filled: float | None = None  # Since when it has not been empty.
        self._failure: BaseException | None = None
        self.made_room: Callable[[], None] = lambda: None
        """Called by the thread that reads, when there may be room again."""

    @property
    def channels(self) -> tuple[str, ...]:
        return tuple(self._end)

    def put(self, batch: Batch) -> bool:
        """Take a batch; False when there is no room for it now."""
        cost = sum(_cost(*record) for record in batch.records)
        with self._changed:
            if self._held and self._held + cost > self._room:
                return False
            if not batch.records:
                return True
            now, start = self._clock.now(), self._end[batch.channel]
            entries = deque(
                Entry(batch.channel, 0, start + place, now, key, value, headers)
                for place, (key, value, headers) in enumerate(batch.records)
            )
            self._end[batch.channel] += len(entries)
            self._batches.append((entries, cost))
            self._held += cost
            if self._filled is None:
                self._filled = self._clock.elapsed()
            self._changed.notify_all()
        return True

    def take(self, most: int, wait: float) -> list[Entry]:
        """Up to `most` entries, as soon as there is one; none after `wait` seconds."""
        found: list[Entry] = []
        with self._changed:
            self._changed.wait_for(lambda: self._batches or self._failure, wait)
            if self._failure is not None and not self._batches:
                raise self._failure
            while self._batches and len(found) < most:
                entries, cost = self._batches[0]
                while entries and len(found) < most:
                    found.append(entries.popleft())
                if not entries:
                    self._batches.popleft()
                    self._held -= cost
            if not self._batches:
                self._filled = None
            for entry in found:
                self._next[entry.channel] = entry.offset + 1
        if found:
            self.made_room()
        return found

    def fail(self, error: BaseException) -> None:
        """Nothing will come any more, for this reason: whoever reads is told, once all is read."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def next(self, channel: str) -> int:
        """The offset of the next entry that is taken from here."""
        with self._changed:
            return self._next[channel]

    def left(self) -> int:
        """How many entries were taken in and not taken out."""
        with self._changed:
            return sum(self._end.values()) - sum(self._next.values())

    def age(self) -> float:
        """For how many seconds there has always been something left to read."""
        with self._changed:
            return 0.0 if self._filled is None else self._clock.elapsed() - self._filled


def _cost(key: bytes | None, value: bytes | None, headers: Headers) -> int:
    told = sum(_HEADER + len(name) + len(header) for name, header in headers)
    return _RECORD + len(key or b"") + len(value or b"") + told

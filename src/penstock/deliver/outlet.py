"""A feed at work: who waits for it, and how long rows take to get here and to the browsers."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from uuid import uuid4

from penstock.audit.account import Account, Outcome, Share
from penstock.core.clock import Clock
from penstock.core.contracts import Entry, Offsets
from penstock.core.metrics import Rate, RecentSketch
from penstock.deliver.feed import Feed


@dataclass(frozen=True, slots=True)
class FeedSpec:
    """A result channel that clients may follow under a name. `topic_id` changes when the channel is made anew.

    Reading begins at `start`: for a feed that keeps rows for a while, that long ago and `feed.AWAY` is enough.
    """

    name: str
    channel: str
    topic_id: str = ""
    keep: timedelta | None = None
    start: Offsets = field(default_factory=dict)


class Outlet:
    """One feed, those who follow it, and its figures."""

    def __init__(self, spec: FeedSpec, clock: Clock) -> None:
        self.spec = spec
        self.feed = Feed(spec.name, spec.topic_id, spec.keep)
        self.to_the_door = RecentSketch(clock)
        self.to_the_browser = RecentSketch(clock)
        self._clock = clock
        self.rate = Rate(clock)
        self.count = 0
        # The table is built anew by each process, so each is a life of its own.
        self._life = uuid4().hex
        self._since: dict[int, int] = {}
        self._account: Account | None = None
        self._wakers: set[asyncio.Event] = set()

    def begin(self, start: Offsets) -> None:
        """Where reading starts, or starts again: what a partition brings is counted from its first start on."""
        read = self.feed.positions()
        self._since.update({number: offset for number, offset in start.items() if number not in read})
        self._tell()

    def take(self, entries: Sequence[Entry], live: Offsets) -> None:
        """Apply entries and wake those who follow. What lies before `live` was there at the start: no latency."""
        now = self._clock.now()
        for entry in entries:
            if entry.offset >= live.get(entry.partition, 0):
                self._measure(entry, now)
        self.count += len(entries)
        self.rate.add(len(entries))
        tick = self.feed.tick
        self.feed.push(entries)
        self._tell()
        if self.feed.tick != tick:
            self.wake()

    def account(self) -> Account | None:
        """What the feed has taken; None before it is known where reading starts. Any thread may ask."""
        return self._account

    def _tell(self) -> None:
        # Made at once and whole: who asks from another thread never sees half of a batch.
        feed = self.feed
        outcomes = {
            Outcome.PASSED: feed.passed,
            Outcome.DUPLICATE: feed.duplicate,
            Outcome.REFUSED: feed.refused,
        }
        share = Share(dict(self._since), {**self._since, **feed.positions()}, feed.taken, outcomes)
        stage = f"feed:{self.spec.name}"
        self._account = Account(stage, self._life, self._clock.now(), {self.spec.channel: share}, step=feed.taken)

    def _measure(self, entry: Entry, now: int) -> None:
        for name, value in entry.headers:
            # Longer ones are no microseconds of this age; the feed refuses them.
            if name == "time" and value.isdigit() and len(value) <= 18:
                self.to_the_door.add((now - int(value)) / 1_000)

    @contextmanager
    def following(self) -> Iterator[asyncio.Event]:
        """An event that is set whenever there may be something new."""
        waker = asyncio.Event()
        self._wakers.add(waker)
        try:
            yield waker
        finally:
            self._wakers.discard(waker)

    def wake(self) -> None:
        for waker in self._wakers:
            waker.set()

    @property
    def clients(self) -> int:
        return len(self._wakers)

    def figures(self) -> dict[str, object]:
        return {
            "count": self.count,
            "rate": self.rate.per_second(),
            "lag": None,
            "latency": self.to_the_browser.summary() or self.to_the_door.summary(),
            "door": self.to_the_door.summary(),
            "browser": self.to_the_browser.summary(),
            "rows": len(self.feed),
            "clients": self.clients,
            "refused": self.feed.refused,
            "state": "serving",
            "note": self.feed.refusal and f"{self.feed.refused} refused, the last: {self.feed.refusal}",
        }

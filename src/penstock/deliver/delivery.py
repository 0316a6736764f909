"""The delivery without HTTP: a thread that reads the channels, and the feeds that it fills."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Annotated
from uuid import uuid4

import orjson
from pydantic import BeforeValidator, Field

from penstock.audit.account import Account, Outcome, Share
from penstock.audit.writers import Writers
from penstock.core.clock import Clock, Duration
from penstock.core.contracts import Channels, Entry, Offsets, Reader
from penstock.core.errors import Unavailable
from penstock.core.metrics import Rate, RecentSketch, Sketch
from penstock.core.settings import Section
from penstock.deliver.feed import Feed

_MAX_BATCH = 5_000
_WAIT = 0.2
_RETRY = 1.0


def _list(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


class DeliverSettings(Section):
    """The page and the feeds."""

    clients: int = Field(1_000, ge=1, description="how many clients may follow feeds at the same time")
    origins: Annotated[tuple[str, ...], BeforeValidator(_list)] = Field(
        (), description='other sites whose pages may follow feeds, such as "https://example.org"'
    )
    connections: int = Field(2_000, ge=1, description="how many connections may be open, those of followers included")
    idle_timeout: Duration = Field(
        timedelta(seconds=10),
        description="how long a client may leave a message unread, or a request unfinished, before it is disconnected",
    )


@dataclass(frozen=True, slots=True)
class FeedSpec:
    """A result channel that clients may follow under a name. `topic_id` changes when the channel is created again.

    Reading begins at `start`. With a retention, entries that are older than it and `feed.MAX_ABSENCE` are not needed.
    """

    name: str
    channel: str
    topic_id: str = ""
    retention: timedelta | None = None
    start: Offsets = field(default_factory=dict)


class LiveFeed:
    """A feed with its clients, its account and its metrics."""

    def __init__(self, spec: FeedSpec, clock: Clock) -> None:
        self.spec = spec
        self.feed = Feed(spec.name, spec.topic_id, spec.retention)
        self.latency_to_delivery = RecentSketch(clock)
        self.latency_to_browser = RecentSketch(clock)
        self._clock = clock
        self.rate = Rate(clock)
        self.count = 0
        # Each process builds the table from the start.
        self._generation = uuid4().hex
        self._since: dict[int, int] = {}
        self.account: Account | None = None
        """The account of the entries that were read; None before reading starts. Thread-safe."""
        self._wakers: set[asyncio.Event] = set()

    def begin(self, start: Offsets) -> None:
        """Where reading starts, or starts again. The account counts each partition from its first start."""
        read = self.feed.offsets()
        self._since.update({number: offset for number, offset in start.items() if number not in read})
        self._update_account()

    def apply(self, entries: Sequence[Entry], live: Offsets) -> None:
        """Apply entries and wake the clients. Latency is measured from the offsets `live` on."""
        now = self._clock.now()
        for entry in entries:
            if entry.offset >= live.get(entry.partition, 0):
                self._measure(entry, now)
        self.count += len(entries)
        self.rate.add(len(entries))
        revision = self.feed.revision
        self.feed.push(entries)
        self._update_account()
        if self.feed.revision != revision:
            self.wake()

    def _update_account(self) -> None:
        # Replaced as a whole, so that another thread never reads half of a batch.
        feed = self.feed
        outcomes = {
            Outcome.PASSED: feed.passed,
            Outcome.DUPLICATE: feed.duplicate,
            Outcome.REFUSED: feed.refused,
        }
        share = Share(dict(self._since), {**self._since, **feed.offsets()}, feed.received, outcomes)
        stage, now = f"feed:{self.spec.name}", self._clock.now()
        self.account = Account(stage, self._generation, now, {self.spec.channel: share}, step=feed.received)

    def _measure(self, entry: Entry, now: int) -> None:
        for name, value in entry.headers:
            # The feed refuses longer numbers.
            if name == "time" and value.isdigit() and len(value) <= 18:
                self.latency_to_delivery.add((now - int(value)) / 1_000)

    @contextmanager
    def following(self) -> Iterator[asyncio.Event]:
        """Register a client; the event is set whenever the table may have changed."""
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

    def latency(self) -> dict[str, float] | None:
        """To the browser, or to the delivery while no browser reports."""
        return self.latency_to_browser.summary() or self.latency_to_delivery.summary()

    def figures(self) -> dict[str, object]:
        return {
            "count": self.count,
            "rate": self.rate.per_second(),
            "lag": None,
            "latency": self.latency(),
            "delivery": self.latency_to_delivery.summary(),
            "browser": self.latency_to_browser.summary(),
            "rows": len(self.feed),
            "clients": self.clients,
            "refused": self.feed.refused,
            "state": "serving",
            "note": self.feed.refusal and f"{self.feed.refused} refused, the last: {self.feed.refusal}",
        }


class Delivery:
    """Reads result channels and the status channel while it is `running`."""

    def __init__(
        self, channels: Channels, feeds: Sequence[FeedSpec], status: str, clock: Clock, bookmarks: str = ""
    ) -> None:
        """`bookmarks`: the channel in which queries announce themselves; rows of other writers are not shown."""
        self.feeds = {spec.name: LiveFeed(spec, clock) for spec in feeds}
        self.ready = asyncio.Event()
        self.closing = asyncio.Event()
        self.ended: asyncio.Future[None] | None = None
        self.trouble: str | None = None
        self._channels = channels
        self._clock = clock
        self._status = status
        self._writers = Writers(channels, [bookmarks], clock) if bookmarks else None
        self._processes: dict[str, dict[str, object]] = {}
        self._read_status: dict[int, int] = {}
        self._live: dict[str, Offsets] = {}
        self._stop = threading.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Read while the context is open. `ended` completes when reading ends, with the error if it failed."""
        loop = asyncio.get_running_loop()
        self.ended = asyncio.ensure_future(asyncio.to_thread(self._run, loop.call_soon_threadsafe))
        try:
            yield
        finally:
            self.close()
            self._stop.set()
            await asyncio.wait({self.ended})

    def close(self) -> None:
        """Let all clients end, and accept no new ones."""
        self.closing.set()
        for feed in self.feeds.values():
            feed.wake()

    @property
    def clients(self) -> int:
        return sum(feed.clients for feed in self.feeds.values())

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _run(self, in_loop: Callable[..., object]) -> None:
        while not self._stop.is_set():
            try:
                self._follow(in_loop)
            except Unavailable as error:
                in_loop(setattr, self, "trouble", str(error))
                self._stop.wait(error.retry_after or _RETRY)

    def _follow(self, in_loop: Callable[..., object]) -> None:
        start: dict[str, Offsets] = {
            feed.spec.channel: {**feed.spec.start, **feed.feed.offsets()} for feed in self.feeds.values()
        }
        start[self._status] = dict(self._read_status)
        for channel in start:
            if channel not in self._live:
                self._live[channel] = {part: end for part, (_, end) in self._channels.bounds(channel).items()}
        with self._channels.reader(start) as reader:
            in_loop(self._begin, {channel: reader.positions(channel) for channel in start})
            while not self._stop.is_set():
                if entries := reader.read(_MAX_BATCH, _WAIT):
                    self._hand_over(in_loop, entries)
                elif self.trouble is not None:
                    in_loop(setattr, self, "trouble", None)
                if not self.ready.is_set() and self._caught_up(reader):
                    in_loop(self.ready.set)

    def _caught_up(self, reader: Reader) -> bool:
        return all(
            reader.positions(channel).get(part, 0) >= end
            for channel, ends in self._live.items()
            for part, end in ends.items()
        )

    def _hand_over(self, in_loop: Callable[..., object], entries: Sequence[Entry]) -> None:
        # It waits until they are applied: a busy loop then gets fewer and larger batches instead of a growing queue.
        applied, genuine = threading.Event(), entries
        if self._writers is not None:
            genuine = self._writers.genuine(entries, lambda channel: channel != self._status)
        in_loop(self._apply, genuine, applied)
        while not applied.wait(_WAIT) and not self._stop.is_set():
            pass

    # --- in the event loop --------------------------------------------------------------------------------------------

    def _begin(self, start: Mapping[str, Offsets]) -> None:
        for feed in self.feeds.values():
            feed.begin(start[feed.spec.channel])

    def _apply(self, entries: Sequence[Entry], applied: threading.Event) -> None:
        try:
            by_channel: defaultdict[str, list[Entry]] = defaultdict(list)
            for entry in entries:
                by_channel[entry.channel].append(entry)
            for entry in by_channel.pop(self._status, ()):
                self._apply_status(entry)
            for feed in self.feeds.values():
                if some := by_channel.get(feed.spec.channel):
                    feed.apply(some, self._live.get(feed.spec.channel, {}))
        finally:
            applied.set()

    def _apply_status(self, entry: Entry) -> None:
        self._read_status[entry.partition] = entry.offset + 1
        process = (entry.key or b"").decode(errors="replace")
        try:
            status = None if entry.value is None else orjson.loads(entry.value)
        except orjson.JSONDecodeError:
            status = {"note": "its last status is not JSON"}
        if isinstance(status, dict):
            self._processes[process] = status
        else:
            self._processes.pop(process, None)

    # --- status -------------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, object]:
        """The nodes that the delivery measures itself: the page, and each feed."""
        to_browser, to_delivery = Sketch(), Sketch()
        for feed in self.feeds.values():
            to_browser.merge(feed.latency_to_browser.sketch())
            to_delivery.merge(feed.latency_to_delivery.sketch())
        page = {
            "count": sum(feed.count for feed in self.feeds.values()),
            "rate": round(sum(feed.rate.per_second() for feed in self.feeds.values()), 1),
            "lag": None,
            "latency": to_browser.summary(),
            "delivery": to_delivery.summary(),
            "browser": to_browser.summary(),
            "clients": self.clients,
            "state": "serving" if self.ready.is_set() and not self.trouble else "reading",
            "note": self.trouble or f"{self.clients} following",
        }
        return {"page": page} | {f"feed:{name}": feed.figures() for name, feed in self.feeds.items()}

    def accounts(self) -> list[Account]:
        """The accounts of all feeds whose reading has begun. Thread-safe."""
        return [
            replace(account, latency=feed.latency())
            for feed in self.feeds.values()
            if (account := feed.account) is not None
        ]

    def process_status(self, process: str) -> Mapping[str, object]:
        """The last status that a process reported; empty if there is none."""
        return self._processes.get(process, {})

    def status(self) -> Mapping[str, object]:
        """The last status of every process, the nodes of all of them, and the balance."""
        nodes: dict[str, object] = {}
        for status in self._processes.values():
            if isinstance(reported := status.get("nodes"), dict):
                nodes.update(reported)
        balance = self._processes.get("audit", {}).get("balance")
        return {
            "now": self._clock.now(),
            "processes": self._processes,
            "nodes": {**nodes, **self.figures()},
            "balance": balance,
        }

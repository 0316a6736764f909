"""The delivery without its web: one thread that reads the channels, and the feeds that it fills."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import orjson

from penstock.audit.account import Account
from penstock.audit.writers import Writers
from penstock.core.clock import Clock
from penstock.core.contracts import Channels, Entry, Offsets, Reader
from penstock.core.errors import Unavailable
from penstock.core.metrics import Sketch
from penstock.deliver.outlet import FeedSpec, Outlet

_MOST = 5_000
_WAIT = 0.2
_RETRY = 1.0


class Delivery:
    """Follows result channels and the status channel while it is `running`."""

    def __init__(
        self, channels: Channels, feeds: Sequence[FeedSpec], status: str, clock: Clock, bookmarks: str = ""
    ) -> None:
        """`bookmarks`: the channel in which the writers of results are announced; rows of others are not shown."""
        self.outlets = {spec.name: Outlet(spec, clock) for spec in feeds}
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
        """Read while this is open. `ended` tells when reading ends, and raises why if nobody asked for it."""
        loop = asyncio.get_running_loop()
        self.ended = asyncio.ensure_future(asyncio.to_thread(self._run, loop.call_soon_threadsafe))
        try:
            yield
        finally:
            self.close()
            self._stop.set()
            await asyncio.wait({self.ended})

    def close(self) -> None:
        """Ask all who follow to end; nobody new may join."""
        self.closing.set()
        for outlet in self.outlets.values():
            outlet.wake()

    @property
    def clients(self) -> int:
        return sum(outlet.clients for outlet in self.outlets.values())

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self, in_loop: Callable[..., object]) -> None:
        while not self._stop.is_set():
            try:
                self._follow(in_loop)
            except Unavailable as away:
                in_loop(setattr, self, "trouble", str(away))
                self._stop.wait(away.retry_after or _RETRY)

    def _follow(self, in_loop: Callable[..., object]) -> None:
        start: dict[str, Offsets] = {
            outlet.spec.channel: {**outlet.spec.start, **outlet.feed.positions()} for outlet in self.outlets.values()
        }
        start[self._status] = dict(self._read_status)
        for channel in start:
            if channel not in self._live:
                self._live[channel] = {part: end for part, (_, end) in self._channels.bounds(channel).items()}
        with self._channels.reader(start) as reader:
            in_loop(self._begin, {channel: reader.positions(channel) for channel in start})
            while not self._stop.is_set():
                if entries := reader.read(_MOST, _WAIT):
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
        # Waiting until they are applied lets a busy loop get fewer and bigger batches instead of a queue of them.
        applied, genuine = threading.Event(), entries
        if self._writers is not None:
            genuine = self._writers.genuine(entries, lambda channel: channel != self._status)
        in_loop(self._take, genuine, applied)
        while not applied.wait(_WAIT) and not self._stop.is_set():
            pass

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _begin(self, start: Mapping[str, Offsets]) -> None:
        for outlet in self.outlets.values():
            outlet.begin(start[outlet.spec.channel])

    def _take(self, entries: Sequence[Entry], applied: threading.Event) -> None:
        try:
            by_channel: defaultdict[str, list[Entry]] = defaultdict(list)
            for entry in entries:
                by_channel[entry.channel].append(entry)
            for entry in by_channel.pop(self._status, ()):
                self._take_status(entry)
            for outlet in self.outlets.values():
                if some := by_channel.get(outlet.spec.channel):
                    outlet.take(some, self._live.get(outlet.spec.channel, {}))
        finally:
            applied.set()

    def _take_status(self, entry: Entry) -> None:
        self._read_status[entry.partition] = entry.offset + 1
        process = (entry.key or b"").decode(errors="replace")
        try:
            said = None if entry.value is None else orjson.loads(entry.value)
        except orjson.JSONDecodeError:
            said = {"note": "its last status is not JSON"}
        if isinstance(said, dict):
            self._processes[process] = said
        else:
            self._processes.pop(process, None)

    # --- what it knows ------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, object]:
        """The nodes that the delivery measures itself: the page, and each feed."""
        browser, door = Sketch(), Sketch()
        for outlet in self.outlets.values():
            browser.merge(outlet.to_the_browser.sketch())
            door.merge(outlet.to_the_door.sketch())
        page = {
            "count": sum(outlet.count for outlet in self.outlets.values()),
            "rate": round(sum(outlet.rate.per_second() for outlet in self.outlets.values()), 1),
            "lag": None,
            "latency": browser.summary(),
            "door": door.summary(),
            "browser": browser.summary(),
            "clients": self.clients,
            "state": "serving" if self.ready.is_set() and not self.trouble else "reading",
            "note": self.trouble or f"{self.clients} following",
        }
        return {"page": page} | {f"feed:{name}": outlet.figures() for name, outlet in self.outlets.items()}

    def accounts(self) -> list[Account]:
        """What each feed has taken, of those whose reading has begun. Any thread may ask."""
        return [
            replace(account, latency=outlet.to_the_browser.summary() or outlet.to_the_door.summary())
            for outlet in self.outlets.values()
            if (account := outlet.account()) is not None
        ]

    def said(self, process: str) -> Mapping[str, object]:
        """What a process said last; nothing when it never spoke."""
        return self._processes.get(process, {})

    def status(self) -> Mapping[str, object]:
        """What every process said last, the nodes of all of them, and the balance."""
        nodes: dict[str, object] = {}
        for said in self._processes.values():
            if isinstance(theirs := said.get("nodes"), dict):
                nodes.update(theirs)
        balance = self._processes.get("audit", {}).get("balance")
        return {
            "now": self._clock.now(),
            "processes": self._processes,
            "nodes": {**nodes, **self.figures()},
            "balance": balance,
        }

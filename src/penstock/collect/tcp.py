"""A TCP listener: a record per line, or behind its length; acknowledgements tell each sender what is safe."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

from penstock.collect.ingest import BATCH_RECORDS
from penstock.collect.listen import (
    IngestQueue,
    SenderStates,
    duplicate_sender,
    endpoint,
    invalid_sender,
    last_number,
    listener_guarantee,
)
from penstock.core.clock import Clock, SystemClock
from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState
from penstock.core.errors import Misconfigured, Refused, Unavailable
from penstock.core.framing import FRAMES, Found, SenderKey
from penstock.core.record import LARGEST_JUMP, Origin
from penstock.core.tcp import Session, TcpServer

READING = 32
"""Connections that hold data in memory while it waits for room; that of the others stays in the kernel."""


@dataclass(frozen=True)
class TcpSource:
    """Listens at `listen+tcp://host:port`. A record beyond `max_size` becomes a dead letter with its beginning.

    `frames`: "lines", or "length" for a 4-byte big-endian length before each record. `named`: whether senders must
    identify themselves; without names, repeated records are duplicates. `acknowledge`: if False, nothing is sent to
    the sender, and it needs no name. `largest_jump`: a sender that skips more numbers than this is refused; 0: no
    limit. `shared`: other processes listen at the same address; their records are not known here, so no jump is
    refused.
    """

    url: str
    name: str
    frames: str = "lines"
    acknowledge: bool = True
    named: bool = True
    max_size: int = 900_000
    connections: int = 10_000
    largest_jump: int = LARGEST_JUMP
    shared: bool = False
    hello_within: timedelta = timedelta(seconds=10)
    stalled_after: timedelta = timedelta(seconds=30)
    clock: Clock = field(default_factory=SystemClock)

    def __post_init__(self) -> None:
        endpoint(self.url, self.name, path=False)
        if self.frames not in FRAMES:
            fix = f"it is one of {', '.join(FRAMES)}"
            raise Misconfigured(f"source {self.name}, frames", f'"{self.frames}" is not known', fix)
        for option in ("max_size", "connections"):
            if getattr(self, option) < 1:
                raise Misconfigured(f"source {self.name}, {option}", "it is less than one")
        # A sender without acknowledgements needs no name.
        object.__setattr__(self, "named", self.named and self.acknowledge)

    @property
    def numbered(self) -> str | None:
        return "by its senders" if self.named else None

    @property
    def guarantee(self) -> Guarantee:
        return listener_guarantee(self.named, self.shared)[0] if self.acknowledge else Guarantee.BEST_EFFORT

    @property
    def description(self) -> str:
        if not self.acknowledge:
            return "without acknowledgements, records that are in flight at a crash are lost"
        return listener_guarantee(self.named, self.shared)[1]

    @asynccontextmanager
    async def open(self, resume: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        serving = _Server(self, resume)
        with endpoint(self.url, self.name, path=False).listen(self.name, self.shared) as listener:
            accepting = asyncio.create_task(serving.accept(listener))
            try:
                async with aclosing(serving.queue.intakes()) as intakes:
                    yield intakes
            finally:
                accepting.cancel()
                try:
                    # Acknowledged records are not sent again.
                    await serving.queue.close()
                finally:
                    await serving.close("this source is being closed")


class _Server(TcpServer):
    """The connections of an open source, and the state of each sender."""

    def __init__(self, source: TcpSource, resume: ResumeState) -> None:
        super().__init__(
            source.name,
            frames=source.frames,
            max_size=source.max_size,
            connections=source.connections,
            reading=READING,
            hello_within=source.hello_within.total_seconds(),
            stalled_after=source.stalled_after.total_seconds(),
            named=source.named,
            acknowledge=source.acknowledge,
        )
        self.queue = IngestQueue(source.name)
        self._source = source
        self._senders = SenderStates(resume, 0 if source.shared else source.largest_jump)

    def resume_after(self, sender_key: SenderKey, first: int) -> int:
        if (wrong := invalid_sender(sender_key[0], self._source.name)) is not None:
            raise Refused("a connection", wrong)
        after = self._senders.resume_after(*sender_key, first)
        if sender_key in self.connected:
            self.warn(duplicate_sender(*sender_key))
        return after

    async def ingest(self, session: Session, found: Sequence[Found]) -> None:
        now = self._source.clock.now()
        last_number(session.last, len(found))
        for at in range(0, len(found), BATCH_RECORDS):
            some, last = found[at : at + BATCH_RECORDS], session.last
            if self._source.acknowledge:
                session.connection.require()
            if session.sender_key is None:
                arrivals = [Arrival(value, refused=why) for value, _, why in some]
            else:
                sender, epoch = session.sender_key
                arrivals = [
                    Arrival(value, Origin(sender, epoch, seq, now), refused=why)
                    for seq, (value, _, why) in enumerate(some, last + 1)
                ]
            session.last += len(some)
            try:
                session.latest = await self.queue.put(arrivals)
            except Unavailable as error:
                raise Refused("records", error.reason) from error
            if self._source.acknowledge:
                session.latest.add_done_callback(partial(self._settled, session, session.last))

    def _settled(self, session: Session, last: int, safe: "asyncio.Future[None]") -> None:
        if session.failed or safe.cancelled() or safe.exception() is not None:
            # The sender has to send these records and all later ones again.
            session.failed = True
            session.connection.leave("the records were not stored")
            return
        first, session.safe = session.safe + 1, last
        if session.sender_key is not None:
            self._senders.acknowledge(*session.sender_key, first, last)
        self.report(session)

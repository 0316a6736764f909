"""What the scenarios share: the source that sends their documents, and normal draws."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

from penstock.core.clock import Micros
from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState
from penstock.core.errors import Misconfigured
from penstock.core.record import Origin
from penstock.simulate.documents import SLOTS

BATCH = 500
SECOND = 1_000_000


@dataclass(kw_only=True)
class Scenario(ABC):
    """Documents without end: `rate` a second, of all senders together. The same seed makes the same documents.

    Record n (from 0) belongs to sender n % senders. Each sender numbers its records 1, 2, 3, … Their epoch is the
    second of the first start. After a restart they go on after the last number that the channel holds.
    """

    name: str
    sender: str
    """What its senders are called, before their number."""
    rate: float = 200.0
    senders: int = 20
    seed: int = 7
    guarantee = Guarantee.EXACTLY_ONCE
    description = "each sender goes on after the last number that the channel holds"

    def __post_init__(self) -> None:
        if self.rate <= 0 or self.senders < 1:
            raise Misconfigured(f"source {self.name}", "rate or senders is too small", "give more than 0")

    @abstractmethod
    def document(self, sender: int, number: int, time: Micros) -> bytes:
        """The record `number` of `sender`, which is due at `time`."""

    @asynccontextmanager
    async def open(self, resume: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        safe = [resume.numbers.get(self._called(sender), (0, 0)) for sender in range(self.senders)]
        epoch = max(epoch for epoch, _ in safe) or int(time.time())
        yield self._records(epoch, [seq if names == epoch else 0 for names, seq in safe])

    async def _records(self, epoch: int, safe: list[int]) -> AsyncIterator[Intake]:
        first = n = min(seq * self.senders + sender for sender, seq in enumerate(safe))
        start, began = time.time_ns() // 1_000, time.monotonic()
        while True:
            due = first + int((time.monotonic() - began) * self.rate) + 1
            batch = range(n, min(due, n + BATCH))
            found = [
                self._arrival(epoch, n, start + int((n - first) * SECOND / self.rate))
                for n in batch
                if n // self.senders >= safe[n % self.senders]
            ]
            if found:
                yield Intake(found, _settled)
            n += len(batch)
            await asyncio.sleep(0.02 if n >= due else 0)

    def _arrival(self, epoch: int, n: int, due: Micros) -> Arrival:
        sender, number = n % self.senders, n // self.senders + 1
        return Arrival(self.document(sender, number, due), Origin(self._called(sender), epoch, number, due))

    def _called(self, sender: int) -> str:
        return f"{self.sender}-{sender:02d}"


async def _settled(error: Exception | None) -> None:
    """What was not safe is made again at the next opening."""


@cache
def normals() -> Sequence[float]:
    """The slots of a standard normal draw, which therefore never lies beyond ±3.7."""
    normal = NormalDist()
    return [normal.inv_cdf((slot + 0.5) / SLOTS) for slot in range(SLOTS)]

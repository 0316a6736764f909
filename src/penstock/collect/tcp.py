"""A TCP listener: a record per line, or behind its length; acknowledgements tell each sender what is safe."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta

from penstock.collect.listen import AcknowledgingSource, SourceServer, endpoint
from penstock.collect.registry import check_positive
from penstock.core.contracts import Guarantee, Intake, ResumeState
from penstock.core.errors import Misconfigured
from penstock.core.framing import FRAMES


@dataclass(frozen=True)
class TcpSource(AcknowledgingSource):
    """Listens at `listen+tcp://host:port`. A record beyond `max_size` becomes a dead letter with its beginning.

    `frames`: "lines", or "length" for a 4-byte big-endian length before each record. `named`: whether senders must
    identify themselves; without names, repeated records are duplicates. `acknowledge`: if False, nothing is sent to
    the sender, and it needs no name. `largest_jump`: a sender that skips more numbers than this is refused; 0: no
    limit. `shared`: other processes listen at the same address; their records are not known here, so no jump is
    refused.
    """

    frames: str = "lines"
    acknowledge: bool = True
    hello_within: timedelta = timedelta(seconds=10)
    stalled_after: timedelta = timedelta(seconds=30)

    def __post_init__(self) -> None:
        endpoint(self.url, self.name, path=False)
        if self.frames not in FRAMES:
            fix = f"it is one of {', '.join(FRAMES)}"
            raise Misconfigured(f"source {self.name}, frames", f'"{self.frames}" is not known', fix)
        check_positive(self, "max_size", "connections")
        # A sender without acknowledgements needs no name.
        object.__setattr__(self, "named", self.named and self.acknowledge)

    @property
    def guarantee(self) -> Guarantee:
        return super().guarantee if self.acknowledge else Guarantee.BEST_EFFORT

    @property
    def description(self) -> str:
        if not self.acknowledge:
            return "without acknowledgements, records that are in flight at a crash are lost"
        return super().description

    @asynccontextmanager
    async def open(self, resume: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        server = SourceServer(
            self,
            resume,
            acknowledge=self.acknowledge,
            frames=self.frames,
            hello_within=self.hello_within.total_seconds(),
            stalled_after=self.stalled_after.total_seconds(),
        )
        with endpoint(self.url, self.name, path=False).listen(self.name, self.shared) as listener:
            async with server.serve(listener) as intakes:
                yield intakes

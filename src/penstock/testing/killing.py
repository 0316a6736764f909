"""Contract tests with crashes: an ingest loop in its own process, which kills itself with SIGKILL at a step.

    class TestCrash(CrashContract):
        …the same upstream as for SourceContract

The steps are those between which a record could be lost: before and after it is in the channel, before and after it is
on disk while the channel is not available, before and after the acknowledgement.
"""

import asyncio
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import StrEnum
from itertools import repeat
from pathlib import Path
from typing import IO, TYPE_CHECKING

from penstock.channels.sqlite import SqliteChannels
from penstock.collect.ingest import IngestLoop
from penstock.collect.registry import SourceWrapper
from penstock.collect.spool import Spool
from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState, Sender, Source, Topic
from penstock.core.errors import Unavailable
from penstock.core.record import Origin, Record
from penstock.core.scan import scan
from penstock.supervise.process import tied_to_parent
from penstock.testing.sources import TIMEOUT, Upstream, skip_best_effort

if TYPE_CHECKING:
    import pytest

TOPICS = ("into", "into.dead", "heartbeats", "bookmarks")
SMALL, LARGE = 30, 100_000 // 7
"""Records for each step: in a normal run, and in a soak test."""


class Step(StrEnum):
    """The steps at which a collector is killed."""

    BEFORE_CHANNEL = "before the channel"
    AFTER_CHANNEL = "after the channel"
    BEFORE_DISK = "before the sync"
    AFTER_DISK = "after the sync"
    BEFORE_ACK = "before the acknowledgement"
    AFTER_ACK = "after the acknowledgement"


ON_DISK = (Step.BEFORE_DISK, Step.AFTER_DISK)
"""The steps that need a channel that is not available."""


class CrashContract:
    """A kill at any step loses no acknowledged record, and a repeated record has the same number."""

    async def test_a_kill_at_any_step_loses_no_acknowledged_record(
        self, upstream: Upstream, tmp_path_factory: "pytest.TempPathFactory"
    ) -> None:
        folder = tmp_path_factory.mktemp("killed")
        guarantee = upstream.source.guarantee
        skip_best_effort(upstream.source)
        size = LARGE if os.environ.get("PENSTOCK_SOAK") else SMALL
        payloads = upstream.payloads(size * (len(Step) + 1))
        draw = random.Random(7)
        for number, step in enumerate(Step):
            await upstream.add_records(payloads[number * size : (number + 1) * size])
            async with CollectorProcess.started(upstream.source, folder, step, draw.randint(1, 3)) as process:
                await process.died()
            acknowledged = upstream.acknowledged() or 0
            assert set(payloads[:acknowledged]) <= set(process.found()), f"acknowledged records are lost: {step}"
        await upstream.add_records(payloads[-size:])
        async with CollectorProcess.started(upstream.source, folder) as process:
            await process.until_all(payloads)
        found = process.found()
        if guarantee is Guarantee.EXACTLY_ONCE:
            assert found == Counter(payloads), (
                f"{process.twice()} {(folder / 'log').read_text(errors='replace')[-2_000:]}"
            )
        else:
            assert set(found) == set(payloads)


@dataclass
class CollectorProcess:
    """A collector in its own process, and the records that it stored."""

    process: "subprocess.Popen[bytes]"
    folder: Path

    @classmethod
    @asynccontextmanager
    async def started(
        cls, source: Source, folder: Path, step: Step | None = None, count: int = 0
    ) -> AsyncIterator["CollectorProcess"]:
        command = [sys.executable, "-m", __name__, str(folder), str(count), *([str(step)] if step else [])]
        with (folder / "log").open("ab") as log, _spawned(command, pickle.dumps(source), log) as one:
            try:
                yield cls(one, folder)
            finally:
                one.kill()
                await asyncio.to_thread(one.wait)

    async def died(self) -> None:
        """Wait until it has killed itself."""
        async with asyncio.timeout(4 * TIMEOUT):
            while self.process.poll() is None:  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.01)
        assert self.process.returncode == -signal.SIGKILL, (self.folder / "log").read_text(errors="replace")[-2_000:]

    async def until_all(self, payloads: Sequence[bytes]) -> None:
        wanted = set(payloads)
        async with asyncio.timeout(100 * TIMEOUT if os.environ.get("PENSTOCK_SOAK") else 4 * TIMEOUT):
            while True:
                began = time.monotonic()
                if wanted <= set(self.found(waiting=False)):
                    return
                assert self.process.poll() is None, (self.folder / "log").read_text(errors="replace")[-2_000:]
                # Each check reads all: leave time for the upstream, which runs in this process.
                await asyncio.sleep(max(0.05, 10 * (time.monotonic() - began)))

    def found(self, waiting: bool = True) -> "Counter[bytes]":
        """How often each payload is durable, in the channel or in the spool. Equal numbers count once."""
        return Counter(self._once(waiting).values())

    def twice(self) -> dict[bytes, list[tuple[str, int, int] | None]]:
        """The payloads with more than one number, and their numbers."""
        numbers: dict[bytes, list[tuple[str, int, int] | None]] = {}
        for number, value in self._once(waiting=True).items():
            numbers.setdefault(value, []).append(number)
        return {value: found for value, found in numbers.items() if len(found) > 1}

    def _once(self, waiting: bool) -> dict[tuple[str, int, int] | None, bytes]:
        channels, spool = _channels(self.folder), _spool(self.folder)
        records = [(Origin.read(entry.headers), entry.value or b"") for entry in scan(channels, "into")]
        if waiting:
            records += [(record.origin, record.value or b"") for name, record in spool.records() if name == "into"]
        return {(origin.sender, origin.epoch, origin.seq) if origin else None: value for origin, value in records}


def _spawned(command: Sequence[str], pickled: bytes, log: IO[bytes]) -> "subprocess.Popen[bytes]":
    paths = os.pathsep.join(path for path in sys.path if path)
    environ = {**os.environ, "PYTHONPATH": paths}
    one = subprocess.Popen(tied_to_parent(*command), stdin=subprocess.PIPE, stderr=log, env=environ)
    assert one.stdin is not None
    one.stdin.write(pickled)
    one.stdin.close()
    return one


def _channels(folder: Path) -> SqliteChannels:
    channels = SqliteChannels(folder / "channels")
    channels.ensure([Topic(name, 2 if name == "into" else 1) for name in TOPICS])
    return channels


def _spool(folder: Path) -> Spool:
    return Spool(SqliteChannels(folder / "spool"), "into", timeout=0.05)


# --- in the killed process --------------------------------------------------------------------------------------------


_AT_LAST = 0.3


class _Killer:
    """Counts the steps, and kills the process at the selected one."""

    def __init__(self, step: Step | None, count: int) -> None:
        self.step, self._count = step, count

    def at(self, step: Step) -> None:
        if step is self.step:
            self._count -= 1
            if self._count <= 0:
                _die()
            # The records may arrive in fewer batches than the count.
            asyncio.get_running_loop().call_later(_AT_LAST, _die)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class _DyingSender:
    """A sender that kills the process before or after a send; or whose channel is not available."""

    inner: Sender
    channels: "_DyingChannels"

    async def send(self, channel: str, records: Sequence[Record]) -> None:
        if channel != "into":
            await self.inner.send(channel, records)
            return
        if self.channels.away:
            raise Unavailable("the channel", "it is not available")
        self.channels.killer.at(self.channels.before)
        await self.inner.send(channel, records)
        self.channels.killer.at(self.channels.after)


@dataclass(frozen=True, kw_only=True)
class _DyingChannels(SqliteChannels):
    """A binder whose senders kill the process."""

    killer: _Killer
    before: Step
    after: Step
    away: bool = False

    @asynccontextmanager
    async def sender(self) -> AsyncIterator[Sender]:  # type: ignore[override]  # it has the shape of one
        async with super().sender() as inner:
            yield _DyingSender(inner, self)


@dataclass(frozen=True)
class _DyingSource(SourceWrapper):
    """A source that kills the process before or after an acknowledgement."""

    killer: _Killer

    @asynccontextmanager
    async def open(self, resume: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        async with self.source.open(resume) as intakes:
            yield self._intakes(intakes)

    async def _intakes(self, intakes: AsyncIterator[Intake]) -> AsyncIterator[Intake]:
        async for intake in intakes:
            yield replace(intake, settle=self._settling(intake)) if _holds_records(intake) else intake

    def _settling(self, intake: Intake) -> Callable[[Exception | None], Awaitable[None]]:
        async def settle(error: Exception | None) -> None:
            self.killer.at(Step.BEFORE_ACK)
            await intake.settle(error)
            # The acknowledgement is sent later.
            asyncio.get_running_loop().call_later(0.02, self.killer.at, Step.AFTER_ACK)

        return settle


def _holds_records(intake: Intake) -> bool:
    return any(isinstance(one, Arrival) for one in intake.arrivals)


async def _collect(source: Source, folder: Path, killer: _Killer) -> None:
    channels = _DyingChannels(
        _channels(folder).folder,
        killer=killer,
        before=Step.BEFORE_CHANNEL,
        after=Step.AFTER_CHANNEL,
        away=killer.step in ON_DISK,
    )
    disk = _DyingChannels(folder / "spool", killer=killer, before=Step.BEFORE_DISK, after=Step.AFTER_DISK)
    loop = IngestLoop(
        _DyingSource(source, killer),
        "into",
        channels,
        heartbeats="heartbeats",
        bookmarks="bookmarks",
        bookmark_every=timedelta(milliseconds=50),
        delays=lambda: repeat(0.01),
        spool=replace(_spool(folder), disk=disk),
    )
    await loop.run(asyncio.Event())


def main(folder: str, count: str, step: str | None = None) -> None:
    source: Source = pickle.loads(sys.stdin.buffer.read())
    with suppress(KeyboardInterrupt):
        asyncio.run(_collect(source, Path(folder), _Killer(Step(step) if step else None, int(count))))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Collectors that are killed: a pump in a process of its own, which ends itself with kill -9 at a step of its work.

    class TestKilled(KilledContract):
        …the same world as for SourceContract

The steps are those between which something could be lost: before and after a record is in the channel, before and after
it is on disk while the channel is away, before and after its sender is told.
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
from penstock.testing.sources import PATIENCE, World

if TYPE_CHECKING:
    import pytest

TOPICS = ("into", "into.dead", "heartbeats", "bookmarks")
SMALL, LARGE = 30, 100_000 // 7
"""Records for each step: in a usual run, and in a soak."""


class Step(StrEnum):
    """Where a collector dies."""

    BEFORE_CHANNEL = "before the channel has it"
    AFTER_CHANNEL = "after the channel has it"
    BEFORE_DISK = "before the sync"
    AFTER_DISK = "after the sync"
    BEFORE_TOLD = "before the acknowledgement"
    AFTER_TOLD = "after the acknowledgement"


ON_DISK = (Step.BEFORE_DISK, Step.AFTER_DISK)
"""Those that need a channel that is away."""


class KilledContract:
    """Nothing that was acknowledged is lost, and what comes again is known by its number, wherever a collector dies."""

    async def test_a_kill_at_any_step_loses_nothing_that_was_acknowledged(
        self, world: World, tmp_path_factory: "pytest.TempPathFactory"
    ) -> None:
        folder = tmp_path_factory.mktemp("killed")
        guarantee = world.source.guarantee
        if guarantee is Guarantee.BEST_EFFORT:
            return
        size = LARGE if os.environ.get("PENSTOCK_SOAK") else SMALL
        given = world.payloads(size * (len(Step) + 1))
        draw = random.Random(7)
        for number, step in enumerate(Step):
            await world.give(given[number * size : (number + 1) * size])
            async with Victim.started(world.source, folder, step, draw.randint(1, 3)) as victim:
                await victim.died()
            told = world.acknowledged() or 0
            assert set(given[:told]) <= set(victim.found()), f"what was acknowledged is lost: {step}"
        await world.give(given[-size:])
        async with Victim.started(world.source, folder) as victim:
            await victim.until_all(given)
        found = victim.found()
        if guarantee is Guarantee.EXACTLY_ONCE:
            assert found == Counter(given), f"{victim.twice()} {(folder / 'log').read_text(errors='replace')[-2_000:]}"
        else:
            assert set(found) == set(given)


@dataclass
class Victim:
    """A collector in a process of its own, and what it leaves behind."""

    process: "subprocess.Popen[bytes]"
    folder: Path

    @classmethod
    @asynccontextmanager
    async def started(
        cls, source: Source, folder: Path, step: Step | None = None, count: int = 0
    ) -> AsyncIterator["Victim"]:
        command = [sys.executable, "-m", __name__, str(folder), str(count), *([str(step)] if step else [])]
        with (folder / "log").open("ab") as log, _spawned(command, pickle.dumps(source), log) as one:
            try:
                yield cls(one, folder)
            finally:
                one.kill()
                await asyncio.to_thread(one.wait)

    async def died(self) -> None:
        """Wait until it has killed itself, and not ended otherwise."""
        async with asyncio.timeout(4 * PATIENCE):
            while self.process.poll() is None:  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.01)
        assert self.process.returncode == -signal.SIGKILL, (self.folder / "log").read_text(errors="replace")[-2_000:]

    async def until_all(self, given: Sequence[bytes]) -> None:
        wanted = set(given)
        async with asyncio.timeout(100 * PATIENCE if os.environ.get("PENSTOCK_SOAK") else 4 * PATIENCE):
            while True:
                began = time.monotonic()
                if wanted <= set(self.found(waiting=False)):
                    return
                assert self.process.poll() is None, (self.folder / "log").read_text(errors="replace")[-2_000:]
                # All is read each time: of the time of the world, which runs beside this, that may not take much.
                await asyncio.sleep(max(0.05, 10 * (time.monotonic() - began)))

    def found(self, waiting: bool = True) -> "Counter[bytes]":
        """How often each payload is safe: in the channel, or on disk on its way there. Known by its number, once."""
        return Counter(self._once(waiting).values())

    def twice(self) -> dict[bytes, list[tuple[str, int, int] | None]]:
        """The payloads that have more than one number, with all of these."""
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


def _spawned(command: Sequence[str], told: bytes, log: IO[bytes]) -> "subprocess.Popen[bytes]":
    paths = os.pathsep.join(path for path in sys.path if path)
    environ = {**os.environ, "PYTHONPATH": paths}
    one = subprocess.Popen(tied_to_parent(*command), stdin=subprocess.PIPE, stderr=log, env=environ)
    assert one.stdin is not None
    one.stdin.write(told)
    one.stdin.close()
    return one


def _channels(folder: Path) -> SqliteChannels:
    channels = SqliteChannels(folder / "channels")
    channels.ensure([Topic(name, 2 if name == "into" else 1) for name in TOPICS])
    return channels


def _spool(folder: Path) -> Spool:
    return Spool(SqliteChannels(folder / "spool"), "into", timeout=0.05)


# --- in the process that dies -----------------------------------------------------------------------------------------


_AT_LAST = 0.3


class _Fate:
    """Counts the steps, and ends the process at the one that is meant."""

    def __init__(self, step: Step | None, count: int) -> None:
        self.step, self._count = step, count

    def at(self, step: Step) -> None:
        if step is self.step:
            self._count -= 1
            if self._count <= 0:
                _die()
            # What is given may come in fewer batches than that.
            asyncio.get_running_loop().call_later(_AT_LAST, _die)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class _DyingSender:
    """A sender that dies around its work; or whose channel is away."""

    inner: Sender
    fate: _Fate
    before: Step
    after: Step
    away: bool = False

    async def send(self, channel: str, records: Sequence[Record]) -> None:
        if channel == "into" and self.away:
            raise Unavailable("the channel", "it is away")
        dies = channel == "into"
        if dies:
            self.fate.at(self.before)
        await self.inner.send(channel, records)
        if dies:
            self.fate.at(self.after)


class _DyingChannels(SqliteChannels):
    """Channels whose senders die. The class attributes belong to this process alone."""

    fate: _Fate
    steps: tuple[Step, Step]
    away: bool

    @asynccontextmanager
    async def sender(self) -> AsyncIterator[Sender]:  # type: ignore[override]  # it has the shape of one
        async with super().sender() as inner:
            yield _DyingSender(inner, self.fate, *self.steps, away=self.away)


def _dying(files: SqliteChannels, fate: _Fate, steps: tuple[Step, Step], away: bool = False) -> _DyingChannels:
    kind = type("_Dying", (_DyingChannels,), {"fate": fate, "steps": steps, "away": away})
    made: _DyingChannels = kind(files.folder)
    return made


@dataclass(frozen=True)
class _DyingSource(SourceWrapper):
    """A source that dies around its acknowledgements."""

    fate: _Fate

    @asynccontextmanager
    async def open(self, taken: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        async with self.source.open(taken) as intakes:
            yield self._intakes(intakes)

    async def _intakes(self, intakes: AsyncIterator[Intake]) -> AsyncIterator[Intake]:
        async for intake in intakes:
            yield replace(intake, settle=self._settling(intake)) if _holds_records(intake) else intake

    def _settling(self, intake: Intake) -> Callable[[Exception | None], Awaitable[None]]:
        async def settle(error: Exception | None) -> None:
            self.fate.at(Step.BEFORE_TOLD)
            await intake.settle(error)
            # The answer leaves in its own time.
            asyncio.get_running_loop().call_later(0.02, self.fate.at, Step.AFTER_TOLD)

        return settle


def _holds_records(intake: Intake) -> bool:
    return any(isinstance(one, Arrival) for one in intake.arrivals)


async def _collect(source: Source, folder: Path, fate: _Fate) -> None:
    on_disk = fate.step in ON_DISK
    channels = _dying(_channels(folder), fate, (Step.BEFORE_CHANNEL, Step.AFTER_CHANNEL), away=on_disk)
    disk = _dying(SqliteChannels(folder / "spool"), fate, (Step.BEFORE_DISK, Step.AFTER_DISK))
    pump = IngestLoop(
        _DyingSource(source, fate),
        "into",
        channels,
        heartbeats="heartbeats",
        bookmarks="bookmarks",
        bookmark_every=timedelta(milliseconds=50),
        delays=lambda: repeat(0.01),
        spool=replace(_spool(folder), disk=disk),
    )
    await pump.run(asyncio.Event())


def main(folder: str, count: str, step: str | None = None) -> None:
    source: Source = pickle.loads(sys.stdin.buffer.read())
    with suppress(KeyboardInterrupt):
        asyncio.run(_collect(source, Path(folder), _Fate(Step(step) if step else None, int(count))))


if __name__ == "__main__":
    main(*sys.argv[1:])

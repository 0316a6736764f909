"""The contract tests of sources, for the sources of Penstock and for yours.

class TestMySource(SourceContract):
    @pytest.fixture
    async def upstream(self) -> AsyncIterator[Upstream]:
        async with my_upstream() as upstream:
            yield upstream
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.resources import files
from itertools import repeat
from typing import Any, Protocol
from unittest import SkipTest

import orjson

from penstock.channels.memory import MemoryChannels
from penstock.collect.ingest import IngestLoop
from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState, Source
from penstock.core.errors import Unavailable

TIMEOUT = 30.0
"""Seconds until a test fails."""
QUIET = 0.1
"""Seconds to wait for something that must not happen."""


@dataclass(frozen=True, slots=True)
class Document:
    """A payload that is JSON by RFC 8259 or not, after a case of the public JSONTestSuite."""

    name: str
    """With the prefix of the suite: y_ must be accepted, n_ must be refused, i_ is for the reader to decide."""
    payload: bytes
    accepted: bool
    """What Penstock decides."""


def _documents() -> tuple[Document, ...]:
    """The documents of `documents.json`. A character is a byte; `["[", 500]` repeats a text."""
    found = orjson.loads((files("penstock.testing") / "documents.json").read_bytes())
    payloads = {name: _payload(parts) for name, parts in found["whole"].items()}
    # A record is an object: what the suite tests as an array or a scalar is the value of the field "v".
    payloads |= {name: b'{"v":%s}' % _payload(parts) for name, parts in found["values"].items()}
    accepted = {name for name in payloads if name.startswith("y_")} | set(found["accepted"])
    return tuple(Document(name, payload, name in accepted) for name, payload in payloads.items())


def _payload(parts: str | list[Any]) -> bytes:
    texts = (
        [parts] if isinstance(parts, str) else [part if isinstance(part, str) else part[0] * part[1] for part in parts]
    )
    return "".join(texts).encode("latin-1")


DOCUMENTS = _documents()


class Upstream(Protocol):
    """The other side of a source: it has records to send, and repeats them until they are acknowledged."""

    @property
    def source(self) -> Source:
        """The source that reads from it; the same for the whole test."""

    def payloads(self, count: int) -> list[bytes]:
        """Different payloads, each as it will arrive. Use `plain` unless a certain form is needed."""

    async def add_records(self, payloads: Sequence[bytes]) -> None:
        """Add records to send. Returns at once; they are sent while the source is open."""

    async def disconnect(self) -> None:
        """Break all connections. New ones can be made at once."""

    def acknowledged(self) -> int | None:
        """How many records were acknowledged; None if the protocol has no acknowledgements."""


class SourceContract:
    """The tests. Those about resuming are skipped for a source with best effort."""

    def supports(self, payload: bytes) -> bool:
        """Whether the source supports a payload: `anything`, `text`, `lines`. False: payloads need a certain form."""
        return False

    async def test_every_payload_arrives_byte_by_byte(self, upstream: Upstream) -> None:
        """Sources do not validate payloads; the channel does."""
        if not (payloads := [one.payload for one in DOCUMENTS if self.supports(one.payload)]):
            raise SkipTest("the payloads of this source need a certain form")
        async with upstream.source.open(ResumeState()) as intakes:
            await upstream.add_records(payloads)
            found = await _received(intakes, len(payloads))
        assert Counter(found) == Counter(payloads)

    async def test_records_arrive_in_order(self, upstream: Upstream) -> None:
        async with upstream.source.open(ResumeState()) as intakes:
            await upstream.add_records(payloads := upstream.payloads(50))
            found = await _received(intakes, len(payloads))
        assert found == payloads

    async def test_nothing_is_acknowledged_before_it_is_durable(self, upstream: Upstream) -> None:
        async with upstream.source.open(ResumeState()) as intakes:
            await upstream.add_records(payloads := upstream.payloads(5))
            async with asyncio.timeout(TIMEOUT):
                intake = await anext(intakes)
            first = len(arrivals(intake))
            await asyncio.sleep(QUIET)
            assert upstream.acknowledged() in (None, 0)
            await intake.settle(None)
            if upstream.acknowledged() is not None:
                await until(lambda: (upstream.acknowledged() or 0) >= first)
                assert (upstream.acknowledged() or 0) <= len(payloads)

    async def test_a_record_that_was_not_stored_is_repeated(self, upstream: Upstream) -> None:
        skip_best_effort(upstream.source)
        await upstream.add_records(payloads := upstream.payloads(5))
        async with upstream.source.open(ResumeState()) as intakes:
            async with asyncio.timeout(TIMEOUT):
                intake = await anext(intakes)
            await intake.settle(Unavailable("the channel", "it is away"))
            await asyncio.sleep(QUIET)
            assert upstream.acknowledged() in (None, 0)
        channels = MemoryChannels()
        async with Running(upstream.source, channels) as running:
            await running.until(lambda: running.values() >= Counter(payloads))

    async def test_a_disconnect_loses_nothing(self, upstream: Upstream) -> None:
        channels, payloads = MemoryChannels(2), upstream.payloads(60)
        async with Running(upstream.source, channels) as running:
            for first in range(0, 60, 20):
                await upstream.add_records(payloads[first : first + 20])
                if upstream.source.guarantee is Guarantee.BEST_EFFORT:
                    # Records that were sent while it was disconnected are lost. It must continue.
                    await running.until(lambda last=payloads[first + 19]: running.values()[last])  # type: ignore[misc]
                else:
                    await running.until(lambda first=first: running.count() > first)  # type: ignore[misc]
                await upstream.disconnect()
            skip_best_effort(upstream.source)
            await running.until(lambda: running.values() >= Counter(payloads))
        self.check_records(upstream, running.values(), payloads)

    async def test_a_crashed_collector_resumes(self, upstream: Upstream) -> None:
        skip_best_effort(upstream.source)
        channels, payloads = MemoryChannels(2), upstream.payloads(120)
        for generation in range(6):
            await upstream.add_records(payloads[20 * generation : 20 * generation + 20])
            async with Running(upstream.source, channels) as running:
                await running.until(lambda: running.count() >= 15 * (generation + 1))  # noqa: B023 - it is over then
        async with Running(upstream.source, channels) as running:
            await running.until(lambda: running.values() >= Counter(payloads))
        self.check_records(upstream, running.values(), payloads)

    async def test_a_clean_restart_stores_each_record_once(self, upstream: Upstream) -> None:
        skip_best_effort(upstream.source)
        channels, payloads = MemoryChannels(2), upstream.payloads(40)
        for generation in range(2):
            await upstream.add_records(payloads[20 * generation : 20 * generation + 20])
            async with Running(upstream.source, channels) as running:
                await running.until(lambda: running.values() >= Counter(payloads[: 20 * (generation + 1)]))  # noqa: B023
                if upstream.acknowledged() is not None:
                    await running.until(lambda: upstream.acknowledged() == 20 * (generation + 1))  # noqa: B023
                await running.stop()
        assert running.values() == Counter(payloads)

    async def test_closing_leaves_no_tasks(self, upstream: Upstream) -> None:
        before = asyncio.all_tasks()
        for _ in range(2):
            async with upstream.source.open(ResumeState()):
                await asyncio.sleep(0)
        await until(lambda: not _new_tasks(before))

    def check_records(self, upstream: Upstream, found: "Counter[bytes]", payloads: Sequence[bytes]) -> None:
        if upstream.source.guarantee is Guarantee.EXACTLY_ONCE:
            assert found == Counter(payloads)
        else:
            assert set(found) == set(payloads)

    def test_it_describes_its_guarantee(self, upstream: Upstream) -> None:
        source = upstream.source
        assert source.name
        assert source.guarantee in Guarantee
        assert source.description
        assert not source.description.endswith(".")


async def _received(intakes: AsyncIterator[Intake], count: int) -> list[bytes]:
    """The payloads of the next records; each intake is acknowledged."""
    found: list[bytes] = []
    async with asyncio.timeout(TIMEOUT):
        async for intake in intakes:
            found += [one.value for one in arrivals(intake)]
            await intake.settle(None)
            if len(found) >= count:
                break
    return found


class Running:
    """An ingest loop from a source into channels in memory, in a task. Without `stop()`, it ends like a crash."""

    def __init__(self, source: Source, channels: MemoryChannels) -> None:
        self._channels, self._stop = channels, asyncio.Event()
        self.loop = IngestLoop(
            source,
            "into",
            channels,
            heartbeats="heartbeats",
            bookmarks="bookmarks",
            bookmark_every=timedelta(milliseconds=20),
            delays=lambda: repeat(0.01),
        )
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Running":
        self._task = asyncio.create_task(self.loop.run(self._stop))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def stop(self) -> None:
        self._stop.set()
        task, self._task = self._task, None
        if task is not None:
            await task

    def values(self) -> "Counter[bytes]":
        return Counter(entry.value or b"" for entry in self._channels.entries("into"))

    def count(self) -> int:
        return len(self._channels.entries("into"))

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition. Raises the error of the ingest loop if it ends."""
        async with asyncio.timeout(TIMEOUT):
            while not condition():
                if self._task is not None and self._task.done() and not condition():
                    await self._task
                    raise AssertionError("the source has ended before the condition was true")
                await asyncio.sleep(0.002)


def skip_best_effort(source: Source) -> None:
    if source.guarantee is Guarantee.BEST_EFFORT:
        raise SkipTest("a source with best effort does not resume")


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(TIMEOUT):
        while not condition():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.002)


def anything(payload: bytes) -> bool:
    """Any bytes except none."""
    return bool(payload)


def text(payload: bytes) -> bool:
    """UTF-8."""
    try:
        return bool(payload.decode())
    except UnicodeDecodeError:
        return False


def lines(payload: bytes) -> bool:
    """One line that is not blank."""
    return bool(payload.strip()) and not {*b"\r\n"} & {*payload}


def plain(count: int) -> list[bytes]:
    return [b'{"n":%d}' % n for n in range(1, count + 1)]


def arrivals(intake: Intake) -> list[Arrival]:
    return [one for one in intake.arrivals if isinstance(one, Arrival)]


def _new_tasks(before: "set[asyncio.Task[Any]]") -> "set[asyncio.Task[Any]]":
    return {task for task in asyncio.all_tasks() if task is not asyncio.current_task() and task not in before}

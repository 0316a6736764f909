"""Records from standard input, one per line."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import BinaryIO

from penstock.collect.ingest import BATCH_RECORDS
from penstock.collect.registry import check_positive
from penstock.core.contracts import Arrival, Guarantee, Intake, ResumeState
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.framing import Found, Lines

CHUNK = 64 << 10


@dataclass(frozen=True)
class StdinSource:
    """Reads `stdin://` until it ends. A line beyond `max_size` becomes a dead letter with its first bytes.

    `stream`: another stream to read, with a file descriptor.
    """

    url: str
    name: str
    max_size: int = 900_000
    stream: BinaryIO | None = None

    def __post_init__(self) -> None:
        if self.url.partition("://")[2].strip("/"):
            raise Misconfigured(f"source {self.name}", "stdin:// has no path", "write stdin://")
        check_positive(self, "max_size")

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee.BEST_EFFORT

    @property
    def description(self) -> str:
        return "records that were read and are not durable at a crash are lost"

    @asynccontextmanager
    async def open(self, resume: ResumeState) -> AsyncIterator[AsyncIterator[Intake]]:
        stream = self.stream if self.stream is not None else getattr(sys.stdin, "buffer", None)
        try:
            descriptor = None if stream is None else stream.fileno()
        except (OSError, ValueError):
            descriptor = None
        if descriptor is None:
            fix = "start the collector with a standard input, or use another source"
            raise Misconfigured(f"source {self.name}", "the process has no standard input", fix)
        async with aclosing(self._intakes(descriptor)) as intakes:
            yield intakes

    async def _intakes(self, descriptor: int) -> AsyncGenerator[Intake, None]:
        lines = Lines(self.max_size)
        while data := await self._read(descriptor):
            for intake in _intakes(lines.push(data)):
                yield intake
        for intake in _intakes(lines.end()):
            yield intake

    async def _read(self, descriptor: int) -> bytes:
        """The next bytes; empty at the end."""
        while True:
            try:
                if await _readable(descriptor):
                    return os.read(descriptor, CHUNK)
                return await asyncio.to_thread(os.read, descriptor, CHUNK)
            except BlockingIOError:
                # Another process has read it.
                continue
            except OSError as error:
                raise Unavailable("standard input", error.strerror or str(error)) from error


async def _readable(descriptor: int) -> bool:
    """Wait for data. False if the descriptor does not support it and is always readable, such as a file."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    try:
        loop.add_reader(descriptor, ready.set)
    except PermissionError:
        return False
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
    return True


def _intakes(found: list[Found]) -> list[Intake]:
    arrivals = [Arrival(value, refused=why) for value, _, why in found]
    parts = (arrivals[at : at + BATCH_RECORDS] for at in range(0, len(arrivals), BATCH_RECORDS))
    return [Intake(part) for part in parts]

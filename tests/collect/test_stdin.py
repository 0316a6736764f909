"""Standard input."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pytest

from penstock.collect.stdin import StdinSource
from penstock.core.contracts import Arrival, Intake, ResumeState
from penstock.core.errors import Misconfigured
from penstock.testing.sources import SourceContract, lines, plain


@contextmanager
def pipe() -> Iterator[tuple[BinaryIO, BinaryIO]]:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as stream, os.fdopen(writing, "wb", buffering=0) as into:
        yield stream, into


async def heard(intakes: AsyncIterator[Intake]) -> list[Arrival]:
    """All, until the end."""
    async with asyncio.timeout(20):
        return [one async for intake in intakes for one in intake.arrivals if isinstance(one, Arrival)]


@dataclass
class Writer:
    source: StdinSource
    into: BinaryIO

    def payloads(self, count: int) -> list[bytes]:
        return plain(count)

    async def add_records(self, payloads: Sequence[bytes]) -> None:
        self.into.write(b"".join(payload + b"\n" for payload in payloads))

    async def disconnect(self) -> None:
        """A pipe that is cut is at its end."""

    def acknowledged(self) -> None:
        return None


@pytest.fixture
def upstream() -> Iterator[Writer]:
    with pipe() as (stream, into):
        yield Writer(StdinSource("stdin://", "in", stream=stream), into)


class TestContract(SourceContract):
    def supports(self, payload: bytes) -> bool:
        return lines(payload)


async def test_each_line_is_a_record_and_the_end_is_the_end() -> None:
    with pipe() as (stream, into):
        into.write(b"one\r\n\ntwo\nthree")
        into.close()
        async with StdinSource("stdin://", "in", stream=stream).open(ResumeState()) as intakes:
            assert [one.value for one in await heard(intakes)] == [b"one", b"two", b"three"]


async def test_a_file_can_be_standard_input_too_and_so_can_nothing(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"".join(b"%d\n" % n for n in range(100_000)))
    for path, expected in ((tmp_path / "lines", [b"%d" % n for n in range(100_000)]), (Path("/dev/null"), [])):
        with os.fdopen(os.open(path, os.O_RDONLY), "rb") as stream:
            async with StdinSource("stdin://", "in", stream=stream).open(ResumeState()) as intakes:
                assert [one.value for one in await heard(intakes)] == expected


async def test_a_line_that_is_too_long_has_a_receipt() -> None:
    with pipe() as (stream, into):
        into.write(b"x" * 11 + b"\nnext\n")
        into.close()
        async with StdinSource("stdin://", "in", max_size=10, stream=stream).open(ResumeState()) as intakes:
            found = await heard(intakes)
    assert [(one.value, one.refused is None) for one in found] == [(b"x" * 10, False), (b"next", True)]


async def test_who_waits_for_it_can_be_cancelled() -> None:
    with pipe() as (stream, into):
        source = StdinSource("stdin://", "in", stream=stream)
        async with source.open(ResumeState()) as intakes:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(intakes), 0.05)
        into.write(b"later\n")
        into.close()
        async with source.open(ResumeState()) as intakes:
            assert [one.value for one in await heard(intakes)] == [b"later"]


async def test_what_nobody_waits_for_stays_in_the_pipe() -> None:
    with pipe() as (stream, into):
        os.set_blocking(into.fileno(), False)
        async with StdinSource("stdin://", "in", stream=stream).open(ResumeState()):
            written = 0
            while into.write(b"x" * 999 + b"\n") is not None:
                written += 1
                await asyncio.sleep(0)
            assert written < 10_000


async def test_where_there_is_none_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(Misconfigured, match="standard input"):
        async with StdinSource("stdin://", "in").open(ResumeState()):
            pass


def test_it_has_no_address() -> None:
    with pytest.raises(Misconfigured, match="write stdin://"):
        StdinSource("stdin://file", "in")

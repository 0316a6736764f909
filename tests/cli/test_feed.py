import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

import orjson
from typer.testing import CliRunner
from websockets.asyncio.client import connect

from penstock.cli import app
from penstock.simulate.documents import KINDS

PROGRAM = "import typer; from penstock.cli.feed import feed; typer.run(feed)"


async def started(*options: str, name: str = "rsvps") -> tuple[asyncio.subprocess.Process, str]:
    """The command in a process of its own, and the address that it prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, name, "--port", "0", *options, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(30):
        line = (await process.stdout.readline()).decode()
    return process, line.split()[-1]


async def heard(url: str) -> list[dict[str, Any]]:
    async with connect(f"{url}?resume", proxy=None) as client:
        await client.send('{"after":{}}')
        found = []
        async for message in client:
            document = orjson.loads(message)
            if "end" in document:
                break
            if "feed" in document:
                found.append(document)
        return found


async def test_a_feed_prints_its_address_serves_and_stops_cleanly() -> None:
    process, url = await started("--count", "40", "--rate", "1000", "--senders", "4", "--epoch", "1700000000")
    try:
        found = await heard(url)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert len(found) == 40


async def test_each_kind_has_a_path_and_senders_of_its_own() -> None:
    process, url = await started("--count", "40", "--rate", "1000", "--epoch", "1700000000", name="updates")
    try:
        found = await heard(url)
    finally:
        process.kill()
        await process.wait()
    assert url.endswith("/updates")
    assert {document["feed"]["sender"] for document in found} == {f"sender-{n:02d}" for n in range(20)}
    assert all(document["sender"] == document["feed"]["sender"] for document in found)


def test_the_help_tells_what_can_be_simulated() -> None:
    told = CliRunner().invoke(app, ["feed", "--help"]).output
    for name, kind in KINDS.items():
        assert f"  {name:<13}{kind.description}\n" in told


def test_a_name_that_is_none_gets_what_was_meant() -> None:
    error = CliRunner().invoke(app, ["feed", "update"]).exception
    assert str(error) == 'penstock feed: there is no simulation "update"; did you mean "updates"?'


async def test_a_file_is_replayed_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_bytes(b"".join(b'{"n":%d}\n' % n for n in range(5)))
    process, url = await started("--file", str(path), "--epoch", "1700000000")
    try:
        assert [document["n"] for document in await heard(url)] == [0, 1, 2, 3, 4]
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(10):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

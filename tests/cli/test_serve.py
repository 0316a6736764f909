"""The commands that serve, in processes of their own."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from tests.collect.scripted import Events, listening
from typer.testing import CliRunner
from websockets.asyncio.client import connect

from penstock.channels.kafka import Kafka
from penstock.cli import app
from penstock.cli.serve import gateway, proxy
from penstock.core.contracts import Topic
from penstock.core.errors import Misconfigured
from penstock.simulate.documents import KINDS


@asynccontextmanager
async def serving(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The command in a process of its own, and the address that it prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock", *arguments, "--port", "0", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            line = (await process.stdout.readline()).decode()
        yield process, line.split()[-1]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def stopped(process: asyncio.subprocess.Process, number: signal.Signals = signal.SIGTERM) -> int:
    process.send_signal(number)
    async with asyncio.timeout(20):
        return await process.wait()


# --- penstock feed ----------------------------------------------------------------------------------------------------


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
    options = ["--count", "40", "--rate", "1000", "--senders", "4", "--epoch", "1700000000"]
    async with serving("feed", "rsvps", *options) as (process, url):
        assert len(await heard(url)) == 40
        assert await stopped(process) == 0


async def test_each_kind_has_a_path_and_senders_of_its_own() -> None:
    async with serving("feed", "updates", "--count", "40", "--rate", "1000", "--epoch", "1700000000") as (_, url):
        found = await heard(url)
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
    async with serving("feed", "--file", str(path), "--epoch", "1700000000") as (process, url):
        assert [document["n"] for document in await heard(url)] == [0, 1, 2, 3, 4]
        assert await stopped(process, signal.SIGINT) == 0


# --- penstock gateway -------------------------------------------------------------------------------------------------


async def test_a_gateway_prints_its_address_and_ends_when_all_is_acknowledged(
    kafka: Kafka, fresh: Callable[[str], str], tmp_path: Path
) -> None:
    channel, group = fresh("gateway"), fresh("group")
    kafka.ensure([Topic(channel)])
    async with (
        serving("gateway", "--servers", kafka.where, "--folder", str(tmp_path)) as (process, url),
        httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client,
    ):
        joined = await client.post(f"/groups/{group}/members", json={"channels": [channel]})
        member = joined.json()["url"]
        answer = await client.get(f"{member}/records?wait=5s&max=1")
        while not answer.json()["held"]:
            answer = await client.get(f"{member}/records?wait=1s&max=1")
        polling = asyncio.create_task(client.get(f"/channels/{channel}/records?from=end&wait=60s"))
        acknowledged = 0
        while acknowledged < 3:
            answer = await client.post(f"/channels/{channel}/records", json={"records": [{"value": 1}]})
            acknowledged += answer.json()["acknowledged"]
        process.send_signal(signal.SIGTERM)
        assert (await polling).status_code == 200
        async with asyncio.timeout(20):
            assert await process.wait() == 0
    assert kafka.bounds(channel) == {0: (0, 3)}
    assert group not in kafka.groups() or not kafka.group(group).members


@pytest.mark.parametrize(
    ("text", "said"), [("pols = 1", 'did you mean "polls"'), ("polls = 0", "greater than or equal to 1")]
)
def test_a_wrong_setting_of_the_gateway_has_its_place(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "penstock.toml").write_text(f"[gateway]\n{text}\n")
    with pytest.raises(Misconfigured, match=rf"penstock.toml, \[gateway\]: .*{said}"):
        gateway(folder=tmp_path)


# --- penstock proxy ---------------------------------------------------------------------------------------------------


async def test_a_proxy_prints_its_address_serves_and_stops_cleanly(tmp_path: Path) -> None:
    upstream = Events()
    await upstream.add_records([b"hello"])
    async with (
        listening(upstream.attend) as port,
        serving("proxy", f"http://127.0.0.1:{port}/", "--folder", str(tmp_path / "proxy")) as (process, url),
        httpx.AsyncClient(trust_env=False) as client,
        asyncio.timeout(30),
    ):
        async with client.stream("GET", url) as response:
            async for line in response.aiter_lines():
                if line == "data: hello":
                    break
        assert await stopped(process) == 0


def test_a_wrong_setting_of_the_proxy_has_its_place(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="--wake-again"):
        proxy("http://host/", tmp_path, wake_again="soon")
    with pytest.raises(Misconfigured, match="not an HTTP address"):
        proxy("host/", tmp_path)

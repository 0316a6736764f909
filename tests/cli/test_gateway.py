"""The command in a process of its own."""

import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from penstock.channels.kafka import Kafka
from penstock.cli.gateway import gateway
from penstock.core.contracts import Topic
from penstock.core.errors import Misconfigured

PROGRAM = "import typer; from penstock.cli.gateway import gateway; typer.run(gateway)"


async def started(*options: str) -> tuple[asyncio.subprocess.Process, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, "--port", "0", *options, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(30):
        line = (await process.stdout.readline()).decode()
    return process, line.split()[-1]


async def test_a_gateway_prints_its_address_and_ends_when_all_is_acknowledged(
    kafka: Kafka, fresh: Callable[[str], str], tmp_path: Path
) -> None:
    channel, group = fresh("gateway"), fresh("group")
    kafka.ensure([Topic(channel)])
    process, url = await started("--servers", kafka.where, "--folder", str(tmp_path))
    try:
        async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
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
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert kafka.bounds(channel) == {0: (0, 3)}
    assert group not in kafka.groups() or not kafka.group(group).members


@pytest.mark.parametrize(
    ("text", "said"), [("pols = 1", 'did you mean "polls"'), ("polls = 0", "greater than or equal to 1")]
)
def test_a_wrong_setting_has_its_place(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "penstock.toml").write_text(f"[gateway]\n{text}\n")
    with pytest.raises(Misconfigured, match=rf"penstock.toml, \[gateway\]: .*{said}"):
        gateway(folder=tmp_path)

"""The command in a process of its own."""

import asyncio
import signal
import sys
from pathlib import Path

import httpx
import pytest
from tests.collect.scripted import Events, listening

from penstock.cli.proxy import proxy
from penstock.core.errors import Misconfigured

PROGRAM = "import typer; from penstock.cli.proxy import proxy; typer.run(proxy)"


async def test_a_proxy_prints_its_address_serves_and_stops_cleanly(tmp_path: Path) -> None:
    upstream = Events()
    await upstream.add_records([b"hello"])
    async with listening(upstream.attend) as port:
        options = [f"http://127.0.0.1:{port}/", "--port", "0", "--folder", str(tmp_path / "proxy")]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PROGRAM, *options, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(30), httpx.AsyncClient(trust_env=False) as client:
                url = (await process.stdout.readline()).decode().split()[-1]
                async with client.stream("GET", url) as response:
                    async for line in response.aiter_lines():
                        if line == "data: hello":
                            break
                process.send_signal(signal.SIGTERM)
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def test_a_wrong_setting_has_its_place(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="--wake-again"):
        proxy("http://host/", tmp_path, wake_again="soon")
    with pytest.raises(Misconfigured, match="not an HTTP address"):
        proxy("host/", tmp_path)

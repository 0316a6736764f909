"""Idle senders: what each connection of a WebSocket sender costs a collector that waits for it.

    python benchmarks/idle.py [--senders 10000]

The senders connect, say who they are, and are silent; then each sends one record, which has to be acknowledged. Memory
is that of the collector's process: before the first connection, with all of them, and after their records.
"""

import argparse
import asyncio
import base64
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from penstock.channels.sqlite import SqliteChannels
from penstock.collect.ingest import IngestLoop
from penstock.collect.registry import source_at
from penstock.core.contracts import Topic

AT_ONCE = 200


def collect(url: str, folder: str) -> None:
    channels = SqliteChannels(Path(folder))
    channels.ensure([Topic(name) for name in ("idle", "idle.dead", "beats", "marks")])
    pump = IngestLoop(source_at(url, "intake"), "idle", channels, heartbeats="beats", bookmarks="marks")
    asyncio.run(pump.run(asyncio.Event()))


class Sender:
    """As little of a WebSocket as it takes: a client library in this process would be what is measured."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connected(cls, port: int, number: int) -> "Sender":
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 12)
        key = base64.b64encode(os.urandom(16)).decode()
        writer.write(
            f"GET /?sender=s{number}&epoch=1 HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 101 " in head, head
        one = cls(reader, writer)
        assert await one._frame() == b'{"after":0}'
        return one

    async def _frame(self) -> bytes:
        while True:
            kind, length = await self._reader.readexactly(2)
            assert length < 126
            payload = await self._reader.readexactly(length)
            if kind == 0x81:
                return payload
            if kind == 0x89:
                self._writer.write(bytes([0x8A, 0x80 | length]) + bytes(4) + payload)

    async def say(self) -> None:
        text = b'{"n":1}'
        self._writer.write(bytes([0x81, 0x80 | len(text)]) + bytes(4) + text)
        assert await self._frame() == b'{"safe":1}'


async def measure(port: int, collector: psutil.Process, count: int) -> None:
    before = collector.memory_info().rss
    began = time.perf_counter()
    senders: list[Sender] = []
    for first in range(0, count, AT_ONCE):
        some = range(first, min(count, first + AT_ONCE))
        senders += await asyncio.gather(*(Sender.connected(port, number) for number in some))
    connected = time.perf_counter() - began
    with_all = collector.memory_info().rss
    cpu, began = sum(collector.cpu_times()[:2]), time.perf_counter()
    await asyncio.sleep(10)
    idle = (sum(collector.cpu_times()[:2]) - cpu) / (time.perf_counter() - began)
    began = time.perf_counter()
    for first in range(0, count, AT_ONCE):
        await asyncio.gather(*(sender.say() for sender in senders[first : first + AT_ONCE]))
    print(f"{count:,} senders connected in {connected:.1f} s")
    print(f"memory before {before / 2**20:.0f} MiB, with all of them {with_all / 2**20:.0f} MiB: ", end="")
    print(f"{(with_all - before) / count / 1024:.1f} KiB for each")
    print(f"idle: {100 * idle:.1f} % of a core")
    print(f"one record of each, acknowledged, in {time.perf_counter() - began:.1f} s; ", end="")
    print(f"memory then {collector.memory_info().rss / 2**20:.0f} MiB")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--senders", type=int, default=10_000)
    options.add_argument("--collect", nargs=2, help=argparse.SUPPRESS)
    told = options.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    if told.collect:
        collect(*told.collect)
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--collect", f"listen+ws://127.0.0.1:{port}/", folder]
        with subprocess.Popen(command) as process:
            try:
                while not _listens(port):
                    assert process.poll() is None
                    time.sleep(0.05)
                asyncio.run(measure(port, psutil.Process(process.pid), told.senders))
            finally:
                process.kill()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


if __name__ == "__main__":
    main()

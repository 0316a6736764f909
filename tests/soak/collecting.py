"""A collector as a program of its own, for tests that measure it.

`collecting.py FOLDER SERVERS CHANNEL URL`: it says its figures on standard output, five times a second, as JSON lines.
"""

import asyncio
import json
import sys
from contextlib import suppress
from pathlib import Path

from penstock.channels.kafka import Kafka
from penstock.channels.sqlite import SqliteChannels
from penstock.collect.ingest import IngestLoop
from penstock.collect.registry import source_at
from penstock.collect.spool import Spool


async def collect(folder: Path, servers: str, channel: str, url: str) -> None:
    pump = IngestLoop(
        source_at(url, "feed"),
        channel,
        Kafka(servers),
        heartbeats=f"{channel}.beats",
        bookmarks=f"{channel}.marks",
        spool=Spool(SqliteChannels(folder), channel),
    )
    running = asyncio.create_task(pump.run(asyncio.Event()))
    while not running.done():
        sys.stdout.write(f"{json.dumps(pump.figures(), default=str)}\n")
        sys.stdout.flush()
        await asyncio.wait((running,), timeout=0.2)
    await running
    sys.stdout.write(f"{json.dumps(pump.figures(), default=str)}\n")


def main(folder: str, servers: str, channel: str, url: str) -> None:
    with suppress(KeyboardInterrupt):
        asyncio.run(collect(Path(folder), servers, channel, url))


if __name__ == "__main__":
    main(*sys.argv[1:])

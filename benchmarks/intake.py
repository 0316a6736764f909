"""Intake: records per second and CPU per record, by protocol, beside a plain confluent-kafka loop in the same run.

    python benchmarks/intake.py [--count 200000] [--size 100] [--rounds 3]

A collector in a process of its own takes records from one sender, which sends as fast as it is let, and has them
acknowledged: each is in Kafka with all replicas when its sender is told. The plain loop hands the same payloads to a
producer of confluent-kafka (acks=all, idempotent, as ours) and waits until all are acknowledged; it has
no headers, no numbers, no key, and no network before it. The same loop with the four headers that say where a record
comes from tells what these cost by themselves: no collector that writes them can be faster.
"""

import argparse
import asyncio
import gc
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import httpx
import orjson
import psutil
from broker import broker
from confluent_kafka import Producer
from websockets.asyncio.client import connect

from penstock.channels.kafka import Kafka
from penstock.channels.sqlite import SqliteChannels
from penstock.collect.ingest import IngestLoop
from penstock.collect.registry import source_at
from penstock.collect.spool import Spool
from penstock.core.contracts import Topic
from penstock.core.errors import Unavailable
from penstock.core.record import Origin

BATCH = 1_000


def payloads(count: int, size: int) -> list[bytes]:
    return [b'{"n":%d,"pad":"%s"}' % (n, b"x" * max(0, size - 20)) for n in range(count)]


# --- the collector, in a process of its own


def collect(url: str, servers: str, topic: str, folder: str) -> None:
    # As the collection tier does.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    pump = IngestLoop(
        source_at(url, "intake"), topic, Kafka(servers), heartbeats=f"{topic}.beats", bookmarks=f"{topic}.marks",
        spool=Spool(SqliteChannels(Path(folder)), topic),
    )  # fmt: skip
    asyncio.run(pump.run(asyncio.Event()))


# --- senders: each returns when all was acknowledged


async def by_websocket(port: int, given: Sequence[bytes]) -> None:
    async with connect(f"ws://127.0.0.1:{port}/?sender=bench&epoch=1", compression=None, max_queue=None) as connection:
        await connection.recv()

        async def send() -> None:
            for n, one in enumerate(given):
                await connection.send(one, text=True)
                if n % 100 == 0:
                    await asyncio.sleep(0)

        sending = asyncio.create_task(send())
        while orjson.loads(await connection.recv())["safe"] < len(given):
            pass
        await sending


async def by_tcp(port: int, given: Sequence[bytes]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b'{"sender":"bench","epoch":1}\n')
    await reader.readline()

    async def send() -> None:
        for first in range(0, len(given), BATCH):
            writer.write(b"\n".join(given[first : first + BATCH]) + b"\n")
            await writer.drain()

    sending = asyncio.create_task(send())
    while orjson.loads(await reader.readline())["safe"] < len(given):
        pass
    await sending
    writer.close()


async def by_http(port: int, given: Sequence[bytes]) -> None:
    """JSON lines, a thousand in each request, four requests at a time."""
    bodies = [b"\n".join(given[first : first + BATCH]) for first in range(0, len(given), BATCH)]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:

        async def post() -> None:
            while bodies:
                answer = await client.post("/", content=bodies.pop(), headers={"content-type": "application/x-ndjson"})
                answer.raise_for_status()

        await asyncio.gather(*(post() for _ in range(4)))


SCHEMES: dict[str, tuple[str, Callable[[int, Sequence[bytes]], Awaitable[None]]]] = {
    "websocket": ("listen+ws", by_websocket),
    "tcp, lines": ("listen+tcp", by_tcp),
    "http, JSON lines": ("listen+http", by_http),
}


# --- one round


PLAIN, WITH_HEADERS = "plain loop", "with headers"


def plain(servers: str, topic: str, given: Sequence[bytes], headers: bool = False) -> tuple[float, float]:
    """The loop that everybody writes; seconds, and seconds of CPU."""
    producer = Producer({"bootstrap.servers": servers, "acks": "all", "enable.idempotence": True, "linger.ms": 5})
    failed = 0

    def delivered(error: object, _: object) -> None:
        nonlocal failed
        failed += error is not None

    # Once, as the collector has done by now: who writes is asked for its number.
    producer.produce(f"{topic}.marks", b"first")
    producer.flush()
    began, cpu = time.perf_counter(), time.process_time()
    for n, one in enumerate(given, 1):
        origin = {"headers": Origin("bench", 1, n, n).headers()} if headers else {}
        while True:
            try:
                producer.produce(topic, one, on_delivery=delivered, **origin)
                break
            except BufferError:
                producer.poll(0.01)
        producer.poll(0)
    producer.flush()
    assert not failed
    return time.perf_counter() - began, time.process_time() - cpu


def through(
    kafka: Kafka, topic: str, scheme: str, send: Callable[[int, Sequence[bytes]], Awaitable[None]],
    given: Sequence[bytes], folder: Path,
) -> tuple[float, float, float]:  # fmt: skip
    """Seconds, seconds of CPU of the collector, and its peak memory in MiB."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"{scheme}://127.0.0.1:{port}" + ("" if scheme == "listen+tcp" else "/")
    command = [sys.executable, __file__, "--collect", url, kafka.servers, topic, str(folder / topic)]
    with subprocess.Popen(command) as process:
        try:
            used = psutil.Process(process.pid)
            while not _listens(port):
                assert process.poll() is None
                time.sleep(0.05)
            cpu = sum(used.cpu_times()[:2])
            began = time.perf_counter()
            asyncio.run(send(port, given))  # type: ignore[arg-type]
            took = time.perf_counter() - began
            return took, sum(used.cpu_times()[:2]) - cpu, _peak(process.pid)
        finally:
            process.kill()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _peak(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return 0.0


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--count", type=int, default=200_000)
    options.add_argument("--size", type=int, default=100, help="bytes of a payload")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--collect", nargs=4, help=argparse.SUPPRESS)
    told = options.parse_args()
    if told.collect:
        collect(*told.collect)
        return
    given = payloads(told.count, told.size)
    with tempfile.TemporaryDirectory() as folder, broker(Path(folder)) as kafka:
        rates: dict[str, list[float]] = {}
        print(f"{told.count:,} records of {told.size} bytes, {os.cpu_count()} cores\n")
        print(f"{'':18} {'records/s':>12} {'of plain':>9} {'CPU µs/record':>14} {'peak MiB':>9}")
        for number in range(told.rounds):
            base = 0.0
            for name in (PLAIN, WITH_HEADERS, *SCHEMES):
                topic = f"bench-{number}-{name.partition(',')[0].replace(' ', '-')}"
                _topics(kafka, topic)
                peak = 0.0
                if name in (PLAIN, WITH_HEADERS):
                    took, cpu = plain(kafka.servers, topic, given, headers=name == WITH_HEADERS)
                    base = base or len(given) / took
                else:
                    took, cpu, peak = through(kafka, topic, *SCHEMES[name], given, Path(folder))
                rate = len(given) / took
                rates.setdefault(name, []).append(rate / base)
                share, per = f"{rate / base:.2f}", f"{cpu / len(given) * 1e6:.1f}"
                print(f"{name:18} {rate:12,.0f} {share:>9} {per:>14} {peak:9.0f}", flush=True)
                found = _held(kafka, topic)
                assert found >= len(given), f"{len(given) - found:,} are not in the channel"
                if found > len(given):
                    print(f"{found - len(given):,} came twice, with the same number")
        print("\nof the plain loop, middle of all rounds:")
        for name, some in rates.items():
            print(f"{name:18} {statistics.median(some):.2f}")


def _topics(kafka: Kafka, topic: str) -> None:
    kafka.ensure([Topic(topic, 2), *(Topic(f"{topic}.{kind}") for kind in ("dead", "beats", "marks"))])
    while True:
        try:
            kafka.bounds(topic)
            return
        except Unavailable:
            time.sleep(0.1)


def _held(kafka: Kafka, topic: str) -> int:
    return sum(end - first for first, end in kafka.bounds(topic).values())


if __name__ == "__main__":
    main()

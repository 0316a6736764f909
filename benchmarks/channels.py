"""Records in and out of each binder, beside a plain loop of confluent-kafka in the same run.

    .venv/bin/python benchmarks/channels.py --records 200000 --bytes 200

Starts a broker and a Redis of its own. Each way is a process of its own: records/s, CPU of that process per record,
and its peak memory. In: batches of 500, each acknowledged, two of them under way. Out: all, from the beginning. At
the end a producer without a limit writes into a broker that stands still (SIGSTOP): its memory is what is measured.
"""

import argparse
import asyncio
import json
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from confluent_kafka import Consumer, Producer

from penstock.channels.binders import bind
from penstock.core.contracts import Channels, Topic
from penstock.core.record import Origin, Record
from penstock.run.warm import kafka_archive
from penstock.supervise.folder import LocalSettings, StateFolder
from penstock.supervise.java import ensure_jars, find_java
from penstock.supervise.kafka import kafka_services
from penstock.supervise.redis import redis_service
from penstock.supervise.supervisor import Supervisor

AT_ONCE = 500
UNDER_WAY = 2
PARTITIONS = 4
PLAIN = "a plain loop"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--bytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3, help="the median of so many is told")
    parser.add_argument("--way", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(one(*arguments.way, arguments.records, arguments.bytes)))
        return
    folder = Path(tempfile.mkdtemp(prefix="penstock-channels-"))
    try:
        with servers(folder) as (kafka, redis, brokers):
            compare(kafka, redis, folder, arguments)
            print(flow(kafka, brokers, arguments.bytes))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def servers(folder: Path) -> Iterator[tuple[str, str, list[int]]]:
    java = find_java()
    jars = ensure_jars(java)
    with StateFolder(folder / ".penstock").locked() as state:
        brokers, kafka = kafka_services(java, jars, state, LocalSettings(), kafka_archive(java, jars).use_flags())
        redis, url = redis_service(state, LocalSettings())
        supervisor = Supervisor([*brokers, redis], state)
        supervisor.start()
        pids = [used.pid for name, used in supervisor.processes().items() if name.startswith("kafka") and used.pid]
        yield kafka, url, pids
        supervisor.stop()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def compare(kafka: str, redis: str, folder: Path, arguments: argparse.Namespace) -> None:
    ways = {
        PLAIN: kafka,
        "kafka": f"kafka://{kafka}",
        "redis": redis,
        "file": f"file://{folder}/files",
        "file, sync=no": f"file://{folder}/unsynced?sync=no",
        "tcp": f"tcp://127.0.0.1:{free_port()}",
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for turn in range(arguments.rounds):
        for name, address in ways.items():
            sizes = ["--records", str(arguments.records), "--bytes", str(arguments.bytes)]
            command = [sys.executable, __file__, "--way", f"{name}:{turn}", address, *sizes]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{name}: {done.stderr}")
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{arguments.records:,} records of {arguments.bytes} bytes, {PARTITIONS} partitions")
    columns = f"{'in/s':>10}{'µs CPU':>8}{'out/s':>10}{'µs CPU':>8}{'peak MiB':>10}{'of the loop, in':>17}{'out':>6}"
    print(f"{'':16}{columns}")
    medians = {
        name: {key: sorted(some[key] for some in runs)[len(runs) // 2] for key in runs[0]}
        for name, runs in found.items()
    }
    for name, told in medians.items():
        rates = [told["in"] / medians[PLAIN]["in"], told["out"] / medians[PLAIN]["out"]]
        print(
            f"{name:16}{told['in']:>10,.0f}{told['in_cpu']:>8.1f}{told['out']:>10,.0f}{told['out_cpu']:>8.1f}"
            f"{told['peak']:>10,.0f}{rates[0]:>17.2f}{rates[1]:>6.2f}"
        )


def one(name: str, address: str, count: int, size: int) -> dict[str, float]:
    """One way, in this process."""
    way, _, turn = name.rpartition(":")
    channel = f"bench-{way.replace(' ', '-').replace(',', '').replace('=', '-')}-{turn}"
    if way == PLAIN:
        bind(f"kafka://{address}").ensure([Topic(channel, PARTITIONS)])
        told = {**measured("in", count, lambda: plain_in(address, channel, count, size))}
        told |= measured("out", count, lambda: plain_out(address, channel, count))
    elif way == "tcp":
        channels, seen = bind(address), threading.Event()
        reading = threading.Thread(target=lambda: (read(channels, channel, count), seen.set()))
        reading.start()
        told = measured("in", count, lambda: (asyncio.run(write(channels, channel, count, size)), seen.wait()))
        # Both ends are in this process, and nothing is read again: what is told for one is told for both.
        told |= {"out": told["in"], "out_cpu": told["in_cpu"]}
    else:
        channels = bind(address)
        channels.ensure([Topic(channel, PARTITIONS)])
        told = measured("in", count, lambda: asyncio.run(write(channels, channel, count, size)))
        told |= measured("out", count, lambda: read(channels, channel, count))
    return {**told, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def measured(name: str, count: int, work: Callable[[], object]) -> dict[str, float]:
    cpu, began = time.process_time(), time.monotonic()
    work()
    seconds = time.monotonic() - began
    return {name: count / seconds, f"{name}_cpu": (time.process_time() - cpu) / count * 1e6}


def batches(count: int, size: int) -> Iterator[list[Record]]:
    payload = b"x" * size
    for first in range(1, count + 1, AT_ONCE):
        numbers = range(first, min(first + AT_ONCE, count + 1))
        yield [Record(payload, Origin("bench", 1, n, 1_700_000_000_000_000), b"%d" % (n % 100)) for n in numbers]


async def write(channels: Channels, channel: str, count: int, size: int) -> None:
    async with channels.sender() as sender:
        under_way: set[asyncio.Task[None]] = set()
        for batch in batches(count, size):
            if len(under_way) == UNDER_WAY:
                done, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            under_way.add(asyncio.create_task(sender.send(channel, batch)))
            await asyncio.sleep(0)
        await asyncio.gather(*under_way)


def read(channels: Channels, channel: str, count: int) -> None:
    with channels.reader({channel: {}}) as reader:
        while count > 0:
            count -= len(reader.read(5_000, 1.0))


def plain_in(servers: str, channel: str, count: int, size: int) -> None:
    """What most people write: identity in headers, acknowledged by all replicas."""
    producer = Producer({"bootstrap.servers": servers, "acks": "all", "enable.idempotence": True, "linger.ms": 3})
    for batch in batches(count, size):
        for record in batch:
            while True:
                try:
                    producer.produce(channel, record.value, record.key, headers=record.headers())
                    break
                except BufferError:
                    producer.poll(0.01)
        producer.poll(0)
    producer.flush()


def plain_out(servers: str, channel: str, count: int) -> None:
    conf = {"bootstrap.servers": servers, "group.id": channel, "auto.offset.reset": "earliest"}
    consumer = Consumer({**conf, "fetch.queue.backoff.ms": 5, "enable.auto.commit": False})
    consumer.subscribe([channel])
    while count > 0:
        for message in consumer.consume(5_000, 1.0):
            if message.error() is None:
                message.key(), message.value(), message.headers(), message.timestamp()
                count -= 1
    consumer.close()


def flow(kafka: str, brokers: list[int], size: int) -> str:
    """A producer that never waits by itself, against a broker that does not answer for twenty seconds."""
    channels, channel = bind(f"kafka://{kafka}"), "bench-flow"
    channels.ensure([Topic(channel, PARTITIONS)])
    this, peak, sent = psutil.Process(), 0, 0

    async def produce() -> None:
        nonlocal peak, sent
        until = time.monotonic() + 20
        async with channels.sender() as sender:
            waiting: set[asyncio.Task[None]] = set()
            for batch in batches(10**9, size):
                waiting.add(asyncio.create_task(sender.send(channel, batch)))
                sent += len(batch)
                # Any number of calls may wait in a program; a pump keeps a few, and feels the broker.
                if len(waiting) >= UNDER_WAY * 100:
                    _, waiting = await asyncio.wait(waiting, timeout=0.2, return_when=asyncio.FIRST_COMPLETED)
                    while len(waiting) >= UNDER_WAY * 100 and time.monotonic() < until:
                        peak = max(peak, this.memory_info().rss)
                        _, waiting = await asyncio.wait(waiting, timeout=0.2, return_when=asyncio.FIRST_COMPLETED)
                if time.monotonic() >= until:
                    break
            for pid in brokers:
                psutil.Process(pid).send_signal(signal.SIGCONT)
            await asyncio.gather(*waiting)

    before = this.memory_info().rss
    for pid in brokers:
        psutil.Process(pid).send_signal(signal.SIGSTOP)
    try:
        asyncio.run(produce())
    finally:
        for pid in brokers:
            psutil.Process(pid).send_signal(signal.SIGCONT)
    kept = sum(end for _, end in channels.bounds(channel).values())
    return (
        f"a broker that stood still for 20 s: {sent:,} records were taken and waited, {kept:,} are in the channel;"
        f" the producer's memory went from {before / 2**20:,.0f} to {peak / 2**20:,.0f} MiB and stayed there"
    )


if __name__ == "__main__":
    main()

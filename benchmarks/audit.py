"""What the audit costs, beside what it audits: CPU, memory, and the size of the ledger.

    .venv/bin/python benchmarks/audit.py --senders 1000 --records 200000

Puts numbered RSVPs into a broker of its own. Then, over the same log: each query of the demo once, as a batch, which is
the least that the pipeline has to do; the audit by Python; the audit by Spark. CPU is that of this process and its JVM.
"""

import argparse
import asyncio
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from broker import broker

from penstock.analysis.audit_reader import SparkAuditReader
from penstock.analysis.engine import Engine
from penstock.analysis.frames import encoded
from penstock.audit.findings import Kind, Watched, reduced
from penstock.audit.ledger import Ledger
from penstock.channels.kafka import Kafka
from penstock.core.clock import SystemClock
from penstock.core.contracts import Topic
from penstock.core.record import Origin, Record
from penstock.demo.pipeline import app
from penstock.pipeline.config import Config
from penstock.run.analyse import engine
from penstock.simulate.rsvps import Rsvps

CHANNEL = "rsvps"
KINDS = {CHANNEL: Kind.SOURCE}
AT_ONCE = 10_000
PARTITIONS = 4


@dataclass
class Usage:
    cpu: float = 0
    seconds: float = 0
    memory: int = 0


def tree(apart: set[int]) -> list[psutil.Process]:
    """This process and those that it started, the broker apart."""
    me = psutil.Process()
    return [me, *(one for one in me.children(recursive=True) if one.pid not in apart)]


def spent(apart: set[int]) -> float:
    total = 0.0
    for process in tree(apart):
        times = process.cpu_times()
        total += times.user + times.system
    return total


@contextmanager
def measured(apart: set[int]) -> Iterator[Usage]:
    usage, done = Usage(), threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            usage.memory = max(usage.memory, sum(process.memory_info().rss for process in tree(apart)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    began, before = time.monotonic(), spent(apart)
    try:
        yield usage
    finally:
        usage.cpu, usage.seconds = spent(apart) - before, time.monotonic() - began
        done.set()
        watcher.join()


def fill(kafka: Kafka, senders: int, records: int) -> None:
    kafka.ensure([Topic(CHANNEL, PARTITIONS)])
    document, began = Rsvps(7), SystemClock().now()

    def record(number: int) -> Record:
        seq, sender = divmod(number, senders)
        time = began + number * 100
        return Record(document(sender, seq, time), Origin(f"sender-{sender}", 1, seq, time), b"%d" % (number % 797))

    async def go() -> None:
        async with kafka.sender() as sender:
            for first in range(0, records, AT_ONCE):
                await sender.send(CHANNEL, [record(n) for n in range(first, min(first + AT_ONCE, records))])

    asyncio.run(go())


def work(spark: Engine) -> None:
    """Every query of the demo over the log, up to the bytes that it would write."""
    for query in app.describe().queries:
        encoded(spark.recompute(query), query).write.format("noop").mode("overwrite").save()


def audit_by_python(kafka: Kafka, ledger: Ledger) -> None:
    ends = {partition: end for partition, (_, end) in kafka.bounds(CHANNEL).items()}
    start: dict[str, dict[int, int]] = {CHANNEL: {}}
    with kafka.reader(start) as reader:
        while start[CHANNEL] != ends:
            entries = reader.read(AT_ONCE, 1)
            touched = {entry.partition for entry in entries}
            end = {CHANNEL: {at: offset for at, offset in reader.positions(CHANNEL).items() if at in touched}}
            ledger.merge(reduced(entries, start, end, KINDS), SystemClock().now())
            start = {CHANNEL: {**start[CHANNEL], **end[CHANNEL]}}


def audit_by_spark(kafka: Kafka, tally: SparkAuditReader, ledger: Ledger, most: int) -> None:
    """In batches of at most so many records."""
    ends = {partition: end for partition, (_, end) in kafka.bounds(CHANNEL).items()}
    start: dict[str, dict[int, int]] = {CHANNEL: {}}
    while start[CHANNEL] != ends:
        at = {part: min(end, start[CHANNEL].get(part, 0) + most // len(ends)) for part, end in ends.items()}
        end = {CHANNEL: {part: to for part, to in at.items() if to > start[CHANNEL].get(part, 0)}}
        ledger.merge(tally.reduce(start, end, KINDS), SystemClock().now())
        start = {CHANNEL: at}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--senders", type=int, default=1_000)
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--batch", type=int, default=1_000_000, help="records that Spark audits at once")
    parser.add_argument("--rounds", type=int, default=3, help="the median of so many is told; one more warms up")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="penstock-audit-"))
    try:
        with broker(folder) as kafka:
            run(kafka, folder, arguments)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(kafka: Kafka, folder: Path, arguments: argparse.Namespace) -> None:
    apart = {process.pid for process in psutil.Process().children(recursive=True)}
    fill(kafka, arguments.senders, arguments.records)
    config = Config.read(folder, environ={"PENSTOCK_CHANNELS_ADDRESS": kafka.where})
    with engine(app.describe(), config, None) as spark:
        tally = SparkAuditReader(spark.spark, kafka.servers)
        ledgers: list[Path] = []

        @contextmanager
        def fresh_ledger() -> Iterator[Ledger]:
            ledgers.append(folder / f"ledger-{len(ledgers)}.db")
            with closing(Ledger(ledgers[-1])) as ledger:
                ledger.watch([Watched(CHANNEL, Kind.SOURCE)])
                yield ledger

        def by_python() -> None:
            with fresh_ledger() as ledger:
                audit_by_python(kafka, ledger)

        def by_spark() -> None:
            with fresh_ledger() as ledger:
                audit_by_spark(kafka, tally, ledger, arguments.batch)

        ways: dict[str, Callable[[], None]] = {
            "the demo's queries": lambda: work(spark),
            "the audit by Python": by_python,
            "the audit by Spark": by_spark,
        }
        found: dict[str, list[Usage]] = {name: [] for name in ways}
        for _ in range(arguments.rounds + 1):
            for name, way in ways.items():
                with measured(apart) as usage:
                    way()
                found[name].append(usage)
    million = arguments.records / 1_000_000
    medians = {name: sorted(some[1:], key=lambda one: one.cpu)[arguments.rounds // 2] for name, some in found.items()}
    pipeline = medians["the demo's queries"]
    print(f"{arguments.records:,} records of {arguments.senders:,} senders")
    for name, usage in medians.items():
        print(
            f"{name}: {usage.cpu / million:.1f} CPU seconds per million records, {usage.seconds:.1f} s,"
            f" {usage.cpu / pipeline.cpu:.2f} of the queries, peak memory {usage.memory / 2**20:,.0f} MiB"
        )
    print(f"the ledger: {ledgers[-1].stat().st_size / 2**10:,.0f} KiB")


if __name__ == "__main__":
    main()

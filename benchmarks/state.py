"""State that survives: a million keys, a driver that is killed by -9, and the time until it goes on.

    .venv/bin/python benchmarks/state.py --keys 1000000

Counts records by a number, in micro-batches, over a broker of its own: each number once; then each once more, and in
the middle of that the driver is killed. The next one has none of its local files: RocksDB is restored from the
checkpoint. Told are how long the state took to fill; what a start takes until the batch is finished that was under way,
and how much of that is restoring, by RocksDB's own log; and whether each count is right, as Spark reads the state.

Spark's metric of the load does not tell it: an aggregation opens its state twice in a batch, and the first time, which
is the one that restores, is not in it.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TextIO

from broker import broker
from pyspark.sql import SparkSession

from penstock.analysis.checkpoints.batches import batches, covered, unfinished
from penstock.analysis.connectors import KafkaConnector
from penstock.analysis.engine import Engine
from penstock.analysis.launch import failed, launch
from penstock.analysis.query import Mode, Query, Shape
from penstock.analysis.session import session
from penstock.analysis.settings import SparkSettings
from penstock.analysis.supervision import batch_figures
from penstock.channels.kafka import Kafka
from penstock.core.clock import SystemClock
from penstock.core.contracts import Topic
from penstock.core.record import Origin, Record
from penstock.run.warm import spark_archive
from penstock.supervise.java import ensure_jars, find_java

CHANNEL, INTO = "numbers", "counts"
QUERY = Query(INTO, (CHANNEL,), INTO, ("id",), f"SELECT id, seen() FROM {CHANNEL} GROUP BY id", Mode.MICRO_BATCH)
PARTITIONS, SLOTS = 4, 4
SENT_AT_ONCE, TAKEN_AT_ONCE = 10_000, 250_000
PATIENCE = 240.0
STATE = "org.apache.spark.sql.execution.streaming.state"
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, help="where the figures go, beside the table")
    parser.add_argument("--drive", nargs=3, metavar=("SERVERS", "FOLDER", "LOCAL"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.drive:
        drive(*arguments.drive)
        return
    folder = Path(tempfile.mkdtemp(prefix="penstock-state-"))
    try:
        with broker(folder) as kafka:
            found = measure(kafka, folder, arguments.keys)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{arguments.keys:,} keys, {found['state_mib']:,.0f} MiB of state in the checkpoint")
    for name, description in (
        ("filled", "filled, from the first record on, s"),
        ("up", "after the kill: until Spark is up, s"),
        ("again", "until the batch that was under way is finished, s"),
        ("restored", "of which the state was restored, s, the partitions side by side"),
        ("normal", "such a batch without a crash before it, s"),
        ("right", "keys whose count is right"),
        ("wrong", "keys whose count is wrong"),
    ):
        print(f"{description:66}{found[name]:>12,.6g}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2))
    else:
        print(json.dumps(found))
    if found["wrong"] or found["right"] != arguments.keys:
        raise SystemExit("the state is NOT whole")


def measure(kafka: Kafka, folder: Path, keys: int) -> dict[str, float]:
    kafka.ensure([Topic(CHANNEL, PARTITIONS), Topic(INTO, PARTITIONS)])
    checkpoint = folder / "checkpoints" / INTO
    fill(kafka, keys, 1)
    with driven(kafka, folder, "first") as first:
        wait(first, lambda: bool(first.batches))
        began = time.monotonic() - first.batches[0]["times"]["all"] / 1_000
        wait(first, lambda: covered(str(checkpoint)) == ends(kafka))
        filled = time.monotonic() - began
        normal = first.batches[-1]["times"]["all"] / 1_000
        fill(kafka, keys, 2)
        known = len(batches(str(checkpoint)))
        # One batch of the second round is finished, and the next one has begun.
        wait(first, lambda: len(batches(str(checkpoint))) > known and unfinished(str(checkpoint)) is not None)
    assert unfinished(str(checkpoint)) is not None, "the driver was killed between two batches; try again"
    size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    finished = len(batches(str(checkpoint)))
    killed = time.monotonic()
    with driven(kafka, folder, "second") as second:
        wait(second, lambda: second.up)
        up = time.monotonic() - killed
        wait(second, lambda: len(batches(str(checkpoint))) > finished)
        again = time.monotonic() - killed
        wait(second, lambda: bool(second.batches))
        restored = second.batches[0]["restored"]
        wait(second, lambda: covered(str(checkpoint)) == ends(kafka))
    right, wrong = judged(folder, checkpoint, keys)
    return {
        "keys": keys,
        "state_mib": size / MIB,
        "filled": filled,
        "up": up,
        "again": again,
        "restored": restored,
        "normal": normal,
        "right": right,
        "wrong": wrong,
    }


def fill(kafka: Kafka, keys: int, number: int) -> None:
    """Each key once more."""
    now = SystemClock().now()

    def record(key: int) -> Record:
        return Record(b'{"id":%d}' % key, Origin("s", number, key, now), b"%d" % key)

    async def go() -> None:
        async with kafka.sender() as sender:
            for first in range(0, keys, SENT_AT_ONCE):
                await sender.send(CHANNEL, [record(key) for key in range(first, min(first + SENT_AT_ONCE, keys))])

    asyncio.run(go())


def ends(kafka: Kafka) -> dict[str, dict[int, int]]:
    return {CHANNEL: {partition: end for partition, (_, end) in kafka.bounds(CHANNEL).items()}}


def judged(folder: Path, checkpoint: Path, keys: int) -> tuple[int, int]:
    """How many keys have been counted twice, as they should, and how many otherwise, by the state itself."""
    with spark(folder / "asking") as running:
        rows = running.read.format("statestore").load(str(checkpoint)).groupBy("value.count").count().collect()
    found = {row[0]: row[1] for row in rows}
    return found.get(2, 0), sum(found.values()) - found.get(2, 0) + max(0, keys - sum(found.values()))


# --- the driver -------------------------------------------------------------------------------------------------------


@contextmanager
def spark(local: Path, log: IO[bytes] | None = None) -> Iterator[SparkSession]:
    local.mkdir()
    java = find_java()
    jars = ensure_jars(java)
    settings = SparkSettings(every="100 ms", conf={"spark.local.dir": str(local)})
    with session(
        "state", settings, java.path, jars.spark, SLOTS, log, spark_archive(java, jars).use_flags()
    ) as running:
        yield running


def drive(servers: str, folder: str, local: str) -> None:
    """Run the query until somebody kills this process; each batch is told as a line of JSON."""
    reading, writing = os.pipe()
    restoring = Restoring()
    threading.Thread(target=restoring.follow, args=(os.fdopen(reading, errors="replace"),), daemon=True).start()
    with os.fdopen(writing, "wb") as log, spark(Path(local), log) as running:
        print(json.dumps("up"), flush=True)
        jvm: Any = running._jvm
        logging = jvm.org.apache.logging.log4j
        logging.core.config.Configurator.setLevel(STATE, logging.Level.INFO)
        shapes = {CHANNEL: Shape(CHANNEL, "id BIGINT NOT NULL")}
        connector = KafkaConnector(servers, most=TAKEN_AT_ONCE)
        engine = Engine(running, SparkSettings(every="100 ms"), connector, f"{folder}/checkpoints", shapes)
        query, _ = launch(engine, QUERY, 0, {})
        last = -1
        while (error := failed([query])) is None:
            for progress in query.recentProgress:
                if progress.batchId > last and progress.numInputRows:
                    last = progress.batchId
                    print(json.dumps({**batch_figures(progress), "restored": restoring.seconds}), flush=True)
            time.sleep(0.05)
        raise error


class Restoring:
    """How long the first load of each partition took, by when RocksDB says what it does."""

    def __init__(self) -> None:
        self._began: dict[str, float] = {}
        self._took: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        return max(self._took.values(), default=0.0)

    def follow(self, log: TextIO) -> None:
        for line in log:
            said = re.search(r" RocksDB .*partitionId=(\d+).*\]: (.*)", line)
            if said is None:
                if " ERROR " in line:
                    sys.stderr.write(line)
                continue
            partition, description = said.groups()
            began = self._began.setdefault(partition, time.monotonic())
            if description.startswith("Loaded ") and "uniqueId" in description:
                self._took.setdefault(partition, time.monotonic() - began)


class Driver:
    """A driver as it is seen from outside."""

    def __init__(self, process: "subprocess.Popen[bytes]", lines: Path) -> None:
        self._process, self._lines = process, lines

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def up(self) -> bool:
        return bool(self._told())

    @property
    def batches(self) -> list[dict[str, Any]]:
        """Those with records that it has finished."""
        return self._told()[1:]

    def _told(self) -> list[Any]:
        return [json.loads(line) for line in self._lines.read_text().splitlines(True) if line.endswith("\n")]


@contextmanager
def driven(kafka: Kafka, folder: Path, name: str) -> Iterator[Driver]:
    """A driver with local files of its own, killed at the end."""
    lines = folder / f"{name}.jsonl"
    command = [sys.executable, __file__, "--drive", kafka.servers, str(folder), str(folder / name)]
    with lines.open("wb") as out, subprocess.Popen(command, stdout=out) as process:
        try:
            yield Driver(process, lines)
        finally:
            process.kill()


def wait(driver: Driver, condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        if driver.ended:
            raise SystemExit("the driver has ended by itself")
        if time.monotonic() > until:
            raise SystemExit(f"it did not come that far in {PATIENCE:g} s")
        time.sleep(0.005)


if __name__ == "__main__":
    main()

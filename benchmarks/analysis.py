"""What queries cost: catching up, as keys grow, in real time, and idle; each case on a Spark of its own.

    .venv/bin/python benchmarks/analysis.py catchup --rounds 3
    .venv/bin/python benchmarks/analysis.py keys
    .venv/bin/python benchmarks/analysis.py latency --queries 4 --batches 6
    .venv/bin/python benchmarks/analysis.py idle

Starts a broker of its own, unless one is named that has the records of an earlier run. `--set` overrides settings of
[spark], as `--set profile=throughput`. CPU and memory are those of the driver: its Python and its JVM, the broker
apart. At the end all figures come as JSON.

catchup: records of about 120 bytes wait in four partitions, with the headers of a sender, and without. The time is
from the launch of a query until its last batch is done; in the first round the JVM is cold, so it is told apart.
latency: from the moment at which a record was due at its sender until a row that has it is read from the result, for
each record, those of the boundaries between batches among them.
"""

import argparse
import json
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import psutil
from broker import broker
from confluent_kafka import Consumer, Producer
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from penstock.analysis.connectors import KafkaConnector
from penstock.analysis.engine import Engine
from penstock.analysis.frames import seen
from penstock.analysis.launch import launch, warm_up
from penstock.analysis.operators import tables
from penstock.analysis.query import Json, Mode, Query, Shape
from penstock.analysis.session import session
from penstock.analysis.settings import SparkSettings
from penstock.channels.kafka import Kafka
from penstock.core.contracts import Topic
from penstock.core.record import Origin
from penstock.run.warm import spark_archive
from penstock.supervise.java import ensure_jars, find_java

PARTITIONS = 4
ADS, CAMPAIGNS, USERS = 1_000, 100, 1_000_000
EVENTS = "view", "click", "purchase"
BEGAN = 1_767_225_600_000
"""The time of the first record that waits, in milliseconds; each comes a tenth of a millisecond after the last."""
DDL = "user BIGINT NOT NULL, ad BIGINT NOT NULL, event STRING NOT NULL, page STRING, at BIGINT NOT NULL"
BARE = "events-bare"
TABLES = "prospects", "accounts", "enriched"
TABLE = "user BIGINT NOT NULL, name STRING, since BIGINT"
MIB = 2**20


def event(n: int, at: int) -> bytes:
    user = n * 7_919 % USERS
    return b'{"user": %d, "ad": %d, "event": "%s", "page": "https://example.org/page/%07d", "at": %d}' % (
        user, ad_of(n), EVENTS[n % 3].encode(), n % 9_999_991, at
    )  # fmt: skip


def ad_of(n: int) -> int:
    return n * 31 % ADS


def row(n: int) -> tuple[bytes, bytes]:
    """A change of a table: its key and its value."""
    user = n * 7_919 % (USERS // 10)
    return b"%d" % user, b'{"user": %d, "name": "somebody of the name %010d", "since": %d}' % (user, n, BEGAN + n)


# --- the queries ------------------------------------------------------------------------------------------------------


def views(events: DataFrame) -> DataFrame:
    return events.select("user", "ad", "page", "at", "origin")


def per_campaign(events: DataFrame) -> DataFrame:
    """As in the Yahoo benchmark: the campaign of each ad, counted in windows of ten seconds."""
    rows = ", ".join(f"({ad}L, {ad % CAMPAIGNS})" for ad in range(ADS))
    campaigns = events.sparkSession.sql(f"SELECT * FROM VALUES {rows} AS campaigns(ad, campaign)")
    joined = events.join(F.broadcast(campaigns), "ad")
    return joined.groupBy(F.window("event_time", "10 seconds"), "campaign").agg(F.count("*").alias("views"), seen())


def per_event(events: DataFrame) -> DataFrame:
    return events.groupBy("event").agg(F.count("*").alias("n"), seen())


def per_user(users: int, events: DataFrame) -> DataFrame:
    return events.groupBy(F.pmod("user", F.lit(users)).alias("user")).agg(F.count("*").alias("n"), seen())


def clients(*parts: DataFrame) -> DataFrame:
    joined = tables.join(**dict(zip(TABLES, parts, strict=True)))
    return joined.select("key", *(F.col(f"{name}.name").alias(name) for name in TABLES), "seen")


@dataclass(frozen=True)
class Case:
    query: Query
    unique: str | None = None
    json: Json = "strict"


WATERMARK = timedelta(seconds=10)
CASES = {
    "filter": Case(Query("filter", ("events",), "views", ("ad",), views, where="event = 'view'")),
    "filter, lenient JSON": Case(
        Query("lenient", ("events",), "lenient", ("ad",), views, where="event = 'view'"), json="lenient"
    ),
    "windowed count": Case(
        Query("campaigns", ("events",), "campaigns", ("window", "campaign"), per_campaign, watermark=WATERMARK,
              where="event = 'view'")
    ),
    "deduplication": Case(
        Query("once", ("events",), "once", ("event",), per_event, watermark=WATERMARK), unique="number"
    ),
    "three-table join": Case(Query("clients", TABLES, "clients", ("key",), clients)),
}  # fmt: skip


# --- the records ------------------------------------------------------------------------------------------------------


def ahead_of_time(kafka: Kafka, records: int) -> None:
    """Let the records wait that are not there yet, by two processes."""
    wanted = dict.fromkeys(("events", BARE), records) | dict.fromkeys(TABLES, records // 3)
    kafka.ensure([Topic(name, PARTITIONS) for name in wanted])
    for name, count in wanted.items():
        there = sum(end for _, end in kafka.bounds(name).values())
        if there not in (0, count):
            raise SystemExit(f"{name} has {there:,} records, not {count:,}: let this start a broker of its own")
        if there == count:
            continue
        half = count // 2
        ranges = [range(half), range(half, count)]
        workers = [multiprocessing.Process(target=send, args=(kafka.servers, name, part)) for part in ranges]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()


def send(servers: str, channel: str, numbers: range) -> None:
    producer = Producer(
        {"bootstrap.servers": servers, "linger.ms": 20, "batch.size": 500_000, "queue.buffering.max.messages": 500_000}
    )
    for n in numbers:
        at = BEGAN + n // 10
        headers: Any = Origin(f"sender-{n % 8}", 1, n // 8, at * 1_000 + n % 10 * 100).headers()
        key, value = row(n) if channel in TABLES else (None, event(n, at))
        bare = channel == BARE
        partition = crc32(key) % PARTITIONS if key else n % PARTITIONS
        while True:
            try:
                producer.produce(channel, value, key, partition, headers=None if bare else headers)
                break
            except BufferError:
                producer.poll(0.05)
        if n % 1_000 == 0:
            producer.poll(0)
    producer.flush()


# --- what is measured -------------------------------------------------------------------------------------------------


class Usage:
    """CPU and peak memory of this process and its JVM, from one moment on."""

    def __init__(self) -> None:
        me = psutil.Process()
        # The broker is a child of a child, and what paces the records is Python.
        self._processes = [me, *(one for one in me.children() if one.name().startswith("java"))]
        self._done = threading.Event()
        self._began, self._spent = time.monotonic(), self._cpu()
        self.peak = 0
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _cpu(self) -> float:
        return float(sum(sum(one.cpu_times()[:2]) for one in self._processes))

    def _watch(self) -> None:
        while not self._done.wait(0.1):
            self.peak = max(self.peak, sum(one.memory_info().rss for one in self._processes))

    def stop(self) -> tuple[float, float]:
        """Seconds, and seconds of CPU."""
        self._done.set()
        self._watcher.join()
        return time.monotonic() - self._began, self._cpu() - self._spent


@contextmanager
def driver(kafka: Kafka, folder: Path, settings: SparkSettings, slots: int, log: Path | None) -> Iterator[Engine]:
    java = find_java()
    jars = ensure_jars(java)
    out = log.open("wb") if log else None
    with session(
        "benchmark", settings, java.path, jars.spark, slots, out, spark_archive(java, jars).use_flags()
    ) as spark:
        event_time = "timestamp_millis(at)"
        shapes = {name: Shape(name, DDL, event_time) for name in ("events", BARE)}
        shapes |= {name: Shape(name, TABLE, table=True) for name in TABLES}
        yield Engine(
            spark,
            settings,
            KafkaConnector(kafka.servers, ahead=settings.reads_ahead),
            str(folder / "checkpoints"),
            shapes,
        )


def caught_up(running: StreamingQuery, records: int) -> int:
    """Wait until a query has done so many records; the number of its batches."""
    batches: dict[int, int] = {}
    while sum(batches.values()) < records:
        if not running.isActive:
            raise SystemExit(f"the query ended: {running.exception()}")
        last = running.lastProgress
        if last is not None and last.batchId not in batches:
            batches |= {one.batchId: one.numInputRows for one in running.recentProgress}
        time.sleep(0.01)
    return len(batches)


def once(
    engine: Engine, case: Case, kafka: Kafka, records: int, round_: str, channel: str = "events"
) -> dict[str, Any]:
    """One query over all records that wait."""
    inputs = tuple(channel if name == "events" else name for name in case.query.inputs)
    into = f"{case.query.into}-{round_}"
    query = replace(case.query, name=into, inputs=inputs, into=into, mode=Mode.MICRO_BATCH)
    shapes = dict(engine.shapes)
    if "events" in case.query.inputs:
        shapes[channel] = replace(shapes[channel], unique=case.unique, json=case.json)
    kafka.ensure([Topic(into, PARTITIONS)])
    usage = Usage()
    running, _ = launch(replace(engine, shapes=shapes), query, 0, {})
    batches = caught_up(running, records // 3 * 3 if len(inputs) > 1 else records)
    seconds, cpu = usage.stop()
    running.stop()
    return {"rate": records / seconds, "cpu": cpu / records * 1e6, "peak": usage.peak / MIB, "batches": batches}


def catchup(kafka: Kafka, folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for name, case in CASES.items():
        for channel in ("events", BARE)[: 1 if arguments.headers else 2]:
            left_out = arguments.only and name not in arguments.only
            if left_out or (channel == BARE and "events" not in case.query.inputs):
                continue
            with driver(kafka, folder, arguments.settings, PARTITIONS, arguments.log) as engine:
                rounds = [
                    once(engine, case, kafka, arguments.records, f"{time.time_ns()}", channel)
                    for _ in range(arguments.rounds)
                ]
            found.append(told(f"{name}{', no headers' if channel != 'events' else ''}", rounds))
    return found


def keys(kafka: Kafka, folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A count for each user, of so many."""
    found = []
    for users in (10_000, 100_000, 1_000_000):
        query = Query("users", ("events",), "users", ("user",), partial(per_user, users))
        with driver(kafka, folder, arguments.settings, PARTITIONS, arguments.log) as engine:
            rounds = [
                once(engine, Case(query), kafka, arguments.records, f"{time.time_ns()}")
                for _ in range(arguments.rounds)
            ]
        found.append(told(f"count of {users:,} keys", rounds))
    return found


def told(name: str, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first round, and the middle one of the others."""
    warm = sorted(rounds[1:] or rounds, key=lambda one: one["cpu"])
    middle = warm[len(warm) // 2]
    print(
        f"{name:32} cold {rounds[0]['rate']:>9,.0f}/s {rounds[0]['cpu']:6.2f} s CPU/million   warm"
        f" {middle['rate']:>9,.0f}/s {middle['cpu']:6.2f} s CPU/million   peak"
        f" {max(one['peak'] for one in rounds):,.0f} MiB", flush=True
    )  # fmt: skip
    return {"name": name, "cold": rounds[0], "warm": middle, "peak": max(one["peak"] for one in rounds)}


# --- real time --------------------------------------------------------------------------------------------------------


def pace(servers: str, channel: str, rate: int, began: float, stop: Any, sent: Any) -> None:
    """A record whenever one is due, from a moment on, until told to stop."""
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 0, "acks": "all"})
    n = 0
    while not stop.is_set():
        due = began + n / rate
        if (early := due - time.time()) > 0:
            time.sleep(early)
        headers: Any = Origin("sender", 1, n, int(due * 1e6)).headers()
        producer.produce(channel, event(n, int(due * 1000)), None, n % PARTITIONS, headers=headers)
        producer.poll(0)
        n += 1
    producer.flush()
    sent.value = n


@dataclass
class Read:
    """Which rows of results were read, and when."""

    servers: str
    channels: list[str]

    def __post_init__(self) -> None:
        self.rows: dict[str, dict[bytes, list[tuple[int, float]]]] = {name: {} for name in self.channels}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        consumer = Consumer(
            {"bootstrap.servers": self.servers, "group.id": "benchmark", "auto.offset.reset": "earliest",
             "fetch.wait.max.ms": 5, "fetch.queue.backoff.ms": 5, "enable.auto.commit": False}
        )  # fmt: skip
        consumer.subscribe(self.channels)
        while not self._done.is_set():
            for message in consumer.consume(500, 0.002):
                if message.error() is None:
                    headers: Any = message.headers()
                    newest = next(int(value) for name, value in headers if name == "time")
                    rows = self.rows[str(message.topic())].setdefault(message.key() or b"", [])
                    rows.append((newest, time.time()))
        consumer.close()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()


def waits(rows: dict[bytes, list[tuple[int, float]]], rate: int, began: float, first: int, last: int) -> list[float]:
    """For each record, how long until a row that has it was read, in milliseconds."""
    times: dict[bytes, list[int]] = {}
    moments: dict[bytes, list[float]] = {}
    for key, some in rows.items():
        newest = 0
        for time_, timestamp in sorted(some, key=lambda one: one[1]):
            if time_ > newest:
                newest = time_
                times.setdefault(key, []).append(time_)
                moments.setdefault(key, []).append(timestamp)
    found = []
    for n in range(first, last):
        if n % 3:
            continue
        due = began + n / rate
        start = int(due * 1000) // 10_000 * 10_000
        key = row_key(start, ad_of(n) % CAMPAIGNS)
        at = bisect_left(times.get(key, []), int(due * 1e6))
        # What never came waits for ever, and must not be overlooked.
        found.append((moments[key][at] - due) * 1000 if at < len(times.get(key, [])) else float("inf"))
    return found


def row_key(start: int, campaign: int) -> bytes:
    def text(milliseconds: int) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(milliseconds // 1000))

    window = {"start": text(start), "end": text(start + 10_000)}
    return json.dumps([window, campaign], separators=(",", ":")).encode()


def batch_of(running: StreamingQuery) -> int:
    return running.lastProgress.batchId if running.lastProgress else -1


def latency(kafka: Kafka, folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The windowed count in real time, over so many batches of each query."""
    settings = arguments.settings
    length, rate = settings.real_time_batch.total_seconds(), arguments.rate
    case, stamp = CASES["windowed count"], time.time_ns()
    channel = f"live-{stamp}"
    queries = [
        replace(case.query, name=f"live-{number}-{stamp}", inputs=(channel,), into=f"rows-{number}-{stamp}",
                mode=Mode.REAL_TIME)
        for number in range(arguments.queries)
    ]  # fmt: skip
    kafka.ensure([Topic(channel, PARTITIONS), *(Topic(query.into, 1) for query in queries)])
    slots = len(queries) * (PARTITIONS + settings.shuffle_partitions)
    with driver(kafka, folder, settings, slots, arguments.log) as engine:
        engine = replace(engine, shapes={channel: replace(engine.shapes["events"], channel=channel)})
        read = Read(kafka.servers, [query.into for query in queries])
        began, stop, sent = time.time() + 1, multiprocessing.Event(), multiprocessing.Value("q", 0)
        pacer = multiprocessing.Process(target=pace, args=(kafka.servers, channel, rate, began, stop, sent))
        pacer.start()
        running = [launch(engine, query, 1, {}, turn)[0] for turn, query in enumerate(queries)]
        # The start, and all that the JVM compiles in it, is not what is measured.
        until, never = time.monotonic() + arguments.warm_up, threading.Event()
        for query in queries:
            warm_up(engine, query, never)
        time.sleep(max(0, until - time.monotonic()))
        first, usage = int((time.time() - began) * rate), Usage()
        done = [batch_of(one) for one in running]
        until = time.monotonic() + arguments.batches * length + 1
        while time.monotonic() < until:
            time.sleep(0.5)
            if not all(one.isActive for one in running):
                raise SystemExit(f"a query ended: {[one.exception() for one in running]}")
        last = int((time.time() - began) * rate)
        seconds, cpu = usage.stop()
        progresses = [one.recentProgress for one in running]
        batches = min(batch_of(one) - before for one, before in zip(running, done, strict=True))
        time.sleep(3)
        stop.set()
        pacer.join()
        read.stop()
    taken = sorted(
        wait for query in queries for wait in waits(read.rows[query.into], rate, began, first, last)
    )  # fmt: skip
    figures = {f"p{share}": taken[int(len(taken) * share / 100)] for share in (50, 95, 99)} | {"max": taken[-1]}
    figures |= {"over_50": sum(wait > 50 for wait in taken) / len(taken)}
    phases = [{**one.durationMs} for one in progresses[0]]
    name = f"{len(queries)} in real time, {rate:,}/s, {batches} boundaries of batches of {length:g} s"
    print(f"{name}: " + ", ".join(f"{key} {value:.3g}" for key, value in figures.items()), end="")
    print(f"; {cpu / seconds:.0%} of a core, peak {usage.peak / MIB:,.0f} MiB", flush=True)
    return [{"name": name, **figures, "cores": cpu / seconds, "peak": usage.peak / MIB, "phases": phases}]


def idle(kafka: Kafka, folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Queries that have nothing to do: one and four in real time, and four in micro-batches."""
    found = []
    for number, mode in ((1, Mode.REAL_TIME), (4, Mode.REAL_TIME), (4, Mode.MICRO_BATCH)):
        stamp = time.time_ns()
        channel = f"quiet-{stamp}"
        case = CASES["windowed count"]
        queries = [
            replace(case.query, name=f"{channel}-{one}", inputs=(channel,), into=f"{channel}-rows-{one}", mode=mode)
            for one in range(number)
        ]
        kafka.ensure([Topic(channel, PARTITIONS), *(Topic(query.into, 1) for query in queries)])
        slots = number * (PARTITIONS + arguments.settings.shuffle_partitions)
        with driver(kafka, folder, arguments.settings, slots, arguments.log) as engine:
            engine = replace(engine, shapes={channel: replace(engine.shapes["events"], channel=channel)})
            for turn, query in enumerate(queries):
                launch(engine, query, 1, {}, turn)
            time.sleep(arguments.warm_up)
            usage = Usage()
            time.sleep(arguments.seconds)
            seconds, cpu = usage.stop()
        name = f"{number} idle, {mode}"
        print(f"{name}: {cpu / seconds:.1%} of a core, {usage.peak / MIB:,.0f} MiB", flush=True)
        found.append({"name": name, "cores": cpu / seconds, "peak": usage.peak / MIB})
    return found


# --- the run ----------------------------------------------------------------------------------------------------------

WAYS: dict[str, Callable[[Kafka, Path, argparse.Namespace], list[dict[str, Any]]]] = {
    "catchup": catchup,
    "keys": keys,
    "latency": latency,
    "idle": idle,
}


@contextmanager
def beside(folder: Path, servers: str | None) -> Iterator[Kafka]:
    if servers:
        yield Kafka(servers)
        return
    # In a process of its own: its CPU and memory are not the driver's.
    command = [sys.executable, __file__, "broker", "--folder", str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin
    assert process.stdout
    try:
        yield Kafka(process.stdout.readline().strip())
    finally:
        process.stdin.close()
        process.wait(60)


def serve(folder: Path) -> None:
    """A broker, until standard input ends."""
    with broker(folder) as kafka:
        print(kafka.servers, flush=True)
        sys.stdin.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="+", choices=[*WAYS, "broker"], help="what to measure")
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=3, help="in the same session; the first is cold")
    parser.add_argument("--only", action="append", choices=list(CASES), help="of catchup, this query alone")
    parser.add_argument("--headers", action="store_true", help="of catchup, with headers alone")
    parser.add_argument("--queries", type=int, default=1, help="in real time at once")
    parser.add_argument("--rate", type=int, default=1_000, help="records a second, in real time")
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--warm-up", type=float, default=60)
    parser.add_argument("--seconds", type=float, default=60, help="of doing nothing")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of [spark]")
    parser.add_argument("--conf", action="append", default=[], metavar="NAME=VALUE", help="a setting of Spark itself")
    parser.add_argument("--kafka", help="the address of a broker that is there, with the records of an earlier run")
    parser.add_argument("--log", type=Path, help="where the JVM of Spark logs")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ways == ["broker"]:
        serve(arguments.folder)
        return
    conf = dict(one.split("=", 1) for one in arguments.conf)
    arguments.settings = SparkSettings(conf=conf, **dict(one.split("=", 1) for one in arguments.set))
    folder = Path(tempfile.mkdtemp(prefix="penstock-analysis-"))
    found: dict[str, Any] = {}
    try:
        with beside(folder, arguments.kafka) as kafka:
            if {"catchup", "keys"} & set(arguments.ways):
                ahead_of_time(kafka, arguments.records)
            for way in arguments.ways:
                found[way] = WAYS[way](kafka, folder, arguments)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

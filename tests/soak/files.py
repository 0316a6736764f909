"""Damage to the files of a pipeline that runs: each is done, noticed by whoever reads the file, and undone."""

import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from tests.damaging import Damage, change, emptied, overwritten, truncated
from tests.running import Run

from penstock.supervise.kafka import batches

PidOf = Callable[[Run, str], int]


@contextmanager
def restored(file: Path) -> Iterator[None]:
    """The file as it was, afterwards; in place, for whoever has it open."""
    before = file.read_bytes()
    try:
        yield
    finally:
        file.write_bytes(before)


@contextmanager
def paused(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def state(run: Run) -> Path:
    return run.folder / ".penstock"


@contextmanager
def kafka_segment(run: Run, pid_of: PidOf, channel: str) -> Iterator[None]:
    """A bit of a batch changes that was appended while the auditor did not read."""
    file = max(state(run).glob(f"kafka/1/data/{channel}-0/*.log"))
    with paused(pid_of(run, "audit")):
        time.sleep(3)  # What it has fetched by now is no longer read from the file.
        size = file.stat().st_size
        while not (found := [one for one in batches(file.read_bytes()) if one.start >= size]):
            time.sleep(0.2)
        at = found[0].stop - 1
        change(file, at)
    try:
        yield
    finally:
        change(file, at)


@contextmanager
def ledger(run: Run, pid_of: PidOf, damage: Damage) -> Iterator[None]:
    """The auditor makes another one by itself. What SQLite keeps beside the file would heal what it covers."""
    file = state(run) / "audit" / "ledger.db"
    folded = False
    while not folded:
        with paused(pid_of(run, "audit")), closing(sqlite3.connect(file, timeout=1)) as db:
            busy, _, _ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if folded := not busy:
                damage(file, random.Random(1))
    try:
        yield
    finally:
        for copy in file.parent.glob("ledger.db.old-*"):
            copy.unlink()


@contextmanager
def redis_file(run: Run, pid_of: PidOf) -> Iterator[None]:
    """Redis reads its file when it starts. It is paused first: it could be started again before the damage is done."""
    folder, pid = state(run) / "redis", pid_of(run, "redis")
    os.kill(pid, signal.SIGSTOP)
    file = max([*folder.glob("appendonly.aof"), *folder.glob("appendonlydir/*.incr.aof")])
    with restored(file):
        overwritten(file, random.Random(1))
        os.kill(pid, signal.SIGKILL)
        yield


@contextmanager
def checkpoint(run: Run, pid_of: PidOf, query: str, kind: str, damage: Damage) -> Iterator[None]:
    """A query reads its checkpoint when it starts. The driver is paused first, as Redis is."""
    pids = pid_of(run, "jvm"), pid_of(run, "analyse")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    folder = state(run) / "checkpoints" / query
    files = {int(file.name): file for file in (folder / kind).iterdir() if file.name.isdigit()}
    with restored(files[max(files)]):
        damage(files[max(files)], random.Random(1))
        for pid in reversed(pids):
            os.kill(pid, signal.SIGKILL)
        yield


EVERY: dict[str, tuple[Callable[..., object], dict[str, object], tuple[str, ...]]] = {
    "a bit of a Kafka segment": (kafka_segment, {"channel": "rsvps"}, ("the channel rsvps", "audit")),
    "the ledger overwritten": (ledger, {"damage": overwritten}, ("audit", "/")),
    "the ledger emptied": (ledger, {"damage": emptied}, ("audit", "/")),
    "the ledger cut off": (ledger, {"damage": truncated}, ("audit", "/")),
    "the file of Redis": (redis_file, {}, ("redis", "store:redis")),
    "offsets of a checkpoint": (
        checkpoint,
        {"query": "trending_topics", "kind": "offsets", "damage": emptied},
        ("analyse", "query:"),
    ),
    "commits of a checkpoint": (
        checkpoint,
        {"query": "trending_topics", "kind": "commits", "damage": truncated},
        ("analyse", "query:"),
    ),
}
"""By name: how it is done, with what, and what a finding or a doubt then has to be about."""

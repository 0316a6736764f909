"""Many senders and many records: the ledger stays small, and so does the auditor; figures by Python and by Spark."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from tests.soak import auditing
from tests.soak.posting import post
from tests.soak.sizes import MANY, SENDERS, figure
from tests.soak.things import Placed

from penstock.audit.balance import balance
from penstock.audit.ledger import Ledger
from penstock.channels.kafka import Kafka
from penstock.core.clock import SystemClock
from penstock.core.contracts import Topic
from penstock.core.record import Origin, Record

CHANNEL = "crowd"
PARTITIONS = 4
LEDGER = 4 << 20
"""Bytes that the ledger may take: it grows with senders and gaps alone."""


@pytest.fixture(scope="module")
def crowd(kafka: Kafka) -> str:
    kafka.ensure([Topic(CHANNEL, PARTITIONS)])
    began = time.monotonic()
    assert post(kafka, CHANNEL, everybody()) == MANY
    took = time.monotonic() - began
    figure(f"{SENDERS:,} senders, {MANY:,} records", f"sent in {took:.0f} s, {MANY / took:,.0f} records/s")
    return CHANNEL


def everybody() -> Iterator[Placed]:
    now = time.time_ns() // 1_000
    for index in range(MANY):
        sender, seq = index % SENDERS, index // SENDERS + 1
        yield sender % PARTITIONS, Record(b"{}", Origin(f"sender {sender}", 1, seq, now))


@pytest.mark.parametrize("engine", ["python", "spark"])
def test_the_ledger_of_many_senders_stays_small(engine: str, crowd: str, kafka: Kafka, tmp_path: Path) -> None:
    command = [sys.executable, auditing.__file__, str(tmp_path), kafka.servers, crowd, engine, "end"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peak = 0
    while child.poll() is None:
        peak = max(peak, memory(child.pid))
        time.sleep(0.05)
    said, _ = child.communicate()
    assert child.returncode == 0
    size = sum(file.stat().st_size for file in tmp_path.glob("ledger.db*"))
    with closing(Ledger(auditing.ledger_in(tmp_path), read_only=True)) as ledger:
        [found] = balance(ledger.content(), SystemClock().now(), grace=0).channels
    assert (found.senders, found.records, found.distinct) == (SENDERS, MANY, MANY)
    assert (found.missing, found.duplicates, found.in_flight) == (0, 0, 0)
    assert {one.records for one in found.by_sender} == {MANY // SENDERS}
    assert not any(one.reordered for one in found.by_sender)
    assert size < LEDGER
    figure(
        f"  audited by {engine}",
        f"{MANY / float(said):,.0f} records/s, peak memory {peak / 2**20:,.0f} MB, ledger {size / 2**10:,.0f} KB",
    )


def memory(pid: int) -> int:
    """Bytes of a process and of all that it started."""
    try:
        process = psutil.Process(pid)
        return sum(one.memory_info().rss for one in [process, *process.children(recursive=True)])
    except psutil.NoSuchProcess:
        return 0

"""Records that a channel loses before their time, on a real broker; forged rows that are gone again."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from tests.run.test_audit import numbered, send

from penstock.audit.auditor import Auditor
from penstock.audit.balance import Balance, balance
from penstock.audit.findings import Findings, ForgedRow, Kind, Watched
from penstock.audit.judge import Verdict
from penstock.audit.ledger import Ledger
from penstock.audit.tampering import Losses
from penstock.channels.kafka import Kafka
from penstock.core.clock import SystemClock
from penstock.core.contracts import Topic
from penstock.testing import ManualClock, MemoryChannels

Fresh = Callable[[str], str]


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path / "ledger.db")
    yield ledger
    ledger.close()


def remove(kafka: Kafka, channel: str, before: int) -> None:
    """As `kafka-delete-records` does."""
    admin, gone = AdminClient({"bootstrap.servers": kafka.servers}), TopicPartition(channel, 0, before)
    admin.delete_records([gone])[gone].result(30)


def counted(kafka: Kafka, ledger: Ledger, channel: str, number: int) -> None:
    send(kafka, channel, *numbered(*range(1, number + 1)))
    notes = f"{channel}.notes"
    kafka.ensure([Topic(notes)])
    auditor = Auditor(kafka, ledger, [Watched(channel, Kind.SOURCE)], notes)
    while ledger.positions().get(channel, {}).get(0, 0) < number:
        auditor.step(1)
    auditor.close()


def judged(ledger: Ledger) -> Balance:
    return balance(ledger.content(), SystemClock().now(), grace=0)


def test_records_that_were_counted_and_removed_are_lost(kafka: Kafka, fresh: Fresh, ledger: Ledger) -> None:
    channel = fresh("rsvps")
    kafka.ensure([Topic(channel)])
    losses = Losses(kafka, ledger, SystemClock())
    counted(kafka, ledger, channel, 1_500)
    losses.look([channel])
    assert judged(ledger).verdict is Verdict.WHOLE
    remove(kafka, channel, 1_000)
    readers = {"query:q": {channel: {0: 400}}, "store:delta/x": {channel: {0: 1_500}}}
    losses.look([channel], lambda: readers)
    found = judged(ledger)
    (lost,) = found.discrepancies
    assert found.verdict is Verdict.MISSING
    assert (lost.kind, lost.stage, lost.count) == ("lost", f"channel:{channel}", 1_000)
    assert lost.examples == ("partition 0, offsets 0–999",)
    assert "query:q" in lost.text
    assert "store:delta/x" not in lost.text
    losses.look([channel])
    assert judged(ledger).discrepancies == (lost,)


def test_young_records_are_lost_although_the_channel_keeps_them_for_a_time(
    kafka: Kafka, fresh: Fresh, ledger: Ledger
) -> None:
    channel = fresh("rsvps")
    kafka.ensure([Topic(channel, retention=timedelta(days=1))])
    losses = Losses(kafka, ledger, SystemClock())
    losses.look([channel])
    counted(kafka, ledger, channel, 10)
    remove(kafka, channel, 4)
    losses.look([channel])
    (lost,) = judged(ledger).discrepancies
    assert (lost.kind, lost.count) == ("lost", 4)


def test_what_a_limit_in_bytes_removes_is_not_judged(kafka: Kafka, fresh: Fresh, ledger: Ledger) -> None:
    channel = fresh("rsvps")
    kafka.ensure([Topic(channel, config={"retention.bytes": "1000000"})])
    losses = Losses(kafka, ledger, SystemClock())
    counted(kafka, ledger, channel, 10)
    losses.look([channel])
    remove(kafka, channel, 4)
    losses.look([channel])
    assert not judged(ledger).discrepancies


class Kept(MemoryChannels):
    """Channels of which the first records can be removed, and that keep theirs for a time."""

    first = 0
    keep: timedelta | None = timedelta(hours=1)

    def bounds(self, channel: str) -> dict[int, tuple[int, int]]:
        return {at: (max(low, self.first), end) for at, (low, end) in super().bounds(channel).items()}

    def topic(self, channel: str) -> Topic:
        return Topic(channel, retention=self.keep)


def test_what_retention_removes_in_time_is_not_lost(ledger: Ledger) -> None:
    clock = ManualClock(now=10**15)
    channels = Kept(clock=clock)
    losses = Losses(channels, ledger, clock)
    channels.ensure([Topic("rsvps")])
    for _ in range(3):
        losses.look(["rsvps"])
        channels.append("rsvps", b"{}")
        clock.move(1_800)
    ledger.watch([Watched("rsvps", Kind.SOURCE)])
    ledger.merge(Findings({"rsvps": {0: 0}}, {"rsvps": {0: 3}}), clock.now())
    channels.first = 1
    losses.look(["rsvps"])
    assert not ledger.content().lost
    channels.first = 3
    losses.look(["rsvps"])
    (lost,) = ledger.content().lost
    assert (lost.first, lost.last) == (1, 2)
    clock.move(3_700)
    losses.look(["rsvps"])
    assert not ledger.content().lost, "they would be gone by now anyway"


def test_a_forged_row_that_is_gone_is_no_finding(ledger: Ledger) -> None:
    clock = ManualClock(now=10**15)
    channels = Kept(clock=clock)
    losses = Losses(channels, ledger, clock)
    for _ in range(2):
        channels.append("result", b"{}", b"k")
    ledger.watch([Watched("result", Kind.RESULT, ("query:q",))])
    found = Findings({"result": {0: 0}}, {"result": {0: 2}})
    found.forged["result"] = 1
    found.forged_rows.append(ForgedRow("result", 0, 0, "k", None))
    ledger.merge(found, clock.now())
    losses.look(["result"])
    assert [one.kind for one in balance(ledger.content(), clock.now()).discrepancies] == ["forged"]
    channels.first = 1
    losses.look(["result"])
    assert not ledger.content().forged

"""Aborted transactions leave offsets that hold no record: nobody may take them for a loss."""

from collections.abc import Iterator
from contextlib import closing

import pytest
from pyspark.sql import SparkSession
from tests.soak.line import Line, line, until
from tests.soak.posting import transactions
from tests.soak.things import things

from penstock.analysis.audit_reader import SparkAuditReader
from penstock.audit.account import Outcome
from penstock.audit.alarms import Alarms
from penstock.audit.auditor import Auditor
from penstock.audit.balance import Balance, balance
from penstock.audit.ledger import Ledger
from penstock.audit.rules import Snapshot
from penstock.audit.settings import AuditSettings
from penstock.channels.kafka import Kafka
from penstock.core.clock import SystemClock
from penstock.operate.deep_audit import absent
from penstock.run.audit import watched

PART = 1_000
TOTAL = 3 * PART


@pytest.fixture(scope="module")
def made(kafka: Kafka, spark: SparkSession, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    with line(kafka, spark, redis_url, tmp_path_factory.mktemp("aborted"), "aborted") as running:
        yield running


def part(number: int) -> range:
    return range(number * PART, (number + 1) * PART)


def all_taken(made: Line, number: int) -> bool:
    hops = [hop for hop in made.balance().hops if hop.reads != made.totals]
    return len(hops) == 3 and all(hop.taken == number for hop in hops)


def alarms_of(made: Line, found: Balance) -> list[str]:
    """The alarms of a whole hour in which nothing changes."""
    alarms, settings = Alarms(), AuditSettings()
    told = [alarms.look(Snapshot(found.at + 5_000_000 * step, 5.0 * step, settings, found, {})) for step in range(720)]
    return sorted({one.text for some in told for one in some})


def test_aborted_records_between_others_are_no_loss(made: Line, kafka: Kafka) -> None:
    with transactions(kafka, made.things) as producer:
        producer.commit(made.things, things(part(0), TOTAL, {}))
        producer.abort(made.things, things(part(1), TOTAL, {}))
        producer.commit(made.things, things(part(1), TOTAL, {}))
    until(lambda: all_taken(made, 2 * PART) and made.at_rest())
    assert_whole(made, made.balance(), 2 * PART)


def test_aborted_records_at_the_end_of_a_channel_are_no_loss(made: Line, kafka: Kafka) -> None:
    with transactions(kafka, made.things) as producer:
        producer.commit(made.things, things(part(2), TOTAL, {}))
        producer.abort(made.things, things(part(2), TOTAL, {}))
    # The query covers the aborted ones, too.
    until(lambda: all_taken(made, TOTAL) and made.at_rest())
    assert_whole(made, made.balance(), TOTAL)


def test_spark_takes_them_for_no_loss_either(made: Line, kafka: Kafka, spark: SparkSession) -> None:
    with closing(Ledger(made.config.folder / "second.db")) as ledger:
        auditor = Auditor(
            kafka,
            ledger,
            watched(made.description),
            made.description.heartbeats,
            bookmarks=made.description.bookmarks,
            catch_up_only=True,
        )
        while auditor.catch_up(SparkAuditReader(spark, kafka.servers)):
            pass
        notes = made.description.bookmarks
        while ledger.positions().get(notes) != made.ends(notes):
            auditor.step(1.0)
        auditor.close()
        unread = ledger.unread({made.things: kafka.bounds(made.things)})
        assert_whole(made, balance(ledger.content(), SystemClock().now(), 0, unread), TOTAL)


def assert_whole(made: Line, found: Balance, number: int) -> None:
    assert len(found.hops) == 4
    assert [
        (hop.stage, hop.missing, hop.in_flight, hop.note) for hop in found.hops if hop.missing or hop.in_flight
    ] == []
    for hop in found.hops:
        if hop.reads != made.totals:
            assert hop.taken == hop.due == hop.outcomes[Outcome.PASSED] == number, hop
    assert found.whole
    assert found.settled
    assert alarms_of(made, found) == []
    assert absent(made.lake, made.content(), made.things) == ()

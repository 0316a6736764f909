"""One record of each kind of harm, in a run of many: each is found with its stage and its number, and nothing else is.

One run has them all, at different records; the clean run beside it has none.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from tests.soak.line import Line, line, until
from tests.soak.posting import claim, post
from tests.soak.sizes import MUTATED, figure
from tests.soak.things import BEGIN, SENDERS, WINDOW, Change, Who, at, folded, things, who

from penstock.audit.account import Outcome
from penstock.audit.alarms import Alarms
from penstock.audit.balance import Balance, ChannelBalance
from penstock.audit.content import Content
from penstock.audit.hops import Gap, Hop
from penstock.audit.rules import Snapshot
from penstock.audit.settings import AuditSettings
from penstock.channels.kafka import Kafka
from penstock.core.contracts import Entry
from penstock.core.record import Origin, Record
from penstock.core.scan import scan
from penstock.operate.deep_audit import absent
from penstock.operate.recompute import Report

CHUNKS = 10
PAUSE = int(MUTATED * 0.85)
"""Here the query stands still, and its checkpoint is moved."""

DROPPED, DOUBLED, SWAPPED = at(0.30, 0, MUTATED), at(0.45, 1, MUTATED), at(0.55, 2, MUTATED)
CORRUPTED, LOST_BY_LAKE, DELAYED = at(0.65, 3, MUTATED), at(0.75, 0, MUTATED), at(0.95, 1, MUTATED)
SKIPPED = who(PAUSE)
CHANGES = {
    DROPPED: Change.DROPPED,
    DOUBLED: Change.DOUBLED,
    SWAPPED: Change.SWAPPED,
    CORRUPTED: Change.CORRUPTED,
    DELAYED: Change.DELAYED,
}
LAST = MUTATED // SENDERS
TAIL = ("s1", LAST + 1)
"""What its sender claims to have sent, and never came."""
LOST_BY_REDIS = 1
"""The window of a row, whose last version is lost."""


@dataclass(frozen=True)
class Told:
    """What there is to be known when all is at rest."""

    line: Line
    balance: Balance
    content: Content
    report: Report

    def hop(self, stage: str) -> Hop:
        [found] = [hop for hop in self.balance.hops if hop.stage == stage]
        return found

    @property
    def source(self) -> Hop:
        return self.hop(f"source:{self.line.things}")

    @property
    def query(self) -> Hop:
        return self.hop(f"query:{self.line.totals}")

    @property
    def lake(self) -> Hop:
        return self.hop(f"store:delta/{self.line.things}")

    @property
    def redis(self) -> Hop:
        return self.hop(f"store:redis/{self.line.totals}")

    def channel(self, name: str) -> ChannelBalance:
        [found] = [one for one in self.balance.channels if one.channel == name]
        return found


def gap(who: Who) -> Gap:
    return Gap(who[0], 1, who[1], who[1])


def is_lost_by_redis(entry: Entry) -> bool:
    row = json.loads(entry.value or b"{}")
    begins = datetime.fromisoformat(row["window"]["start"]).timestamp() * 1_000 - BEGIN
    if (row["name"], begins) != ("n0", LOST_BY_REDIS * WINDOW):
        return False
    return bool(row["seen"]["count"] == folded(LOST_BY_REDIS, MUTATED))


@pytest.fixture(scope="module")
def mutated(
    kafka: Kafka, spark: SparkSession, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Told]:
    folder, began = tmp_path_factory.mktemp("mutated"), time.monotonic()
    with line(kafka, spark, redis_url, folder, "mutated", LOST_BY_LAKE, is_lost_by_redis) as made:
        # What is late in a batch is so by the watermark of the batch before: two of them come first.
        flow(made, 0, MUTATED * 7 // 10)
        until(made.taken)
        flow(made, MUTATED * 7 // 10, PAUSE)
        until(made.taken)
        made.stop_query()
        flow(made, PAUSE, MUTATED)
        made.skip(partition=PAUSE % 2)
        made.start_query()
        until(made.at_rest)
        # The newest row comes once more, and after it one that was outdated long ago.
        rows = list(scan(kafka, made.totals))
        newer = {row.key for row in rows[-5:]}
        older = next(row for row in rows if row.key in newer)
        post(kafka, made.totals, [(0, Record(row.value, None, row.key, row.headers)) for row in (rows[-1], older)])
        claim(kafka, made.description.heartbeats, made.things, [*last_of_all(), TAIL])
        until(made.at_rest)
        yield told(made, f"one of each kind among {MUTATED:,} records", began)


@pytest.fixture(scope="module")
def clean(
    kafka: Kafka, spark: SparkSession, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Told]:
    folder, began = tmp_path_factory.mktemp("clean"), time.monotonic()
    with line(kafka, spark, redis_url, folder, "clean") as made:
        for part in range(CHUNKS):
            post(
                kafka,
                made.things,
                things(range(MUTATED * part // CHUNKS, MUTATED * (part + 1) // CHUNKS), MUTATED, {}),
            )
        claim(kafka, made.description.heartbeats, made.things, last_of_all())
        until(made.at_rest)
        yield told(made, f"a clean run of {MUTATED:,} records", began)


def told(made: Line, what: str, began: float) -> Told:
    rest = time.monotonic()
    found = Told(made, made.balance(), made.content(), made.recompute())
    took = time.monotonic() - rest
    figure(what, f"accounted for after {rest - began:.0f} s, recomputed and compared in {took:.0f} s")
    return found


def flow(made: Line, first: int, last: int) -> None:
    post(made.kafka, made.things, things(range(first, last), MUTATED, CHANGES))


def last_of_all() -> list[Who]:
    return [(f"s{sender}", LAST) for sender in range(SENDERS)]


def test_a_clean_run_gives_no_finding(clean: Told) -> None:
    assert [(hop.missing, hop.in_flight, hop.gaps, hop.late) for hop in clean.balance.hops] == [(0, 0, (), ())] * 4
    for hop in clean.balance.hops:
        assert hop.taken == hop.due == hop.outcomes[Outcome.PASSED], hop
    assert clean.source.taken == clean.query.taken == clean.lake.taken == MUTATED
    channel = clean.channel(clean.line.things)
    assert (channel.records, channel.distinct, channel.senders) == (MUTATED, MUTATED, SENDERS)
    assert (channel.duplicates, channel.refused, channel.without_identity) == (0, 0, 0)
    assert not any(one.reordered for one in channel.by_sender)
    assert clean.content.folded[clean.line.totals] == MUTATED
    assert absent(clean.line.lake, clean.content, clean.line.things) == ()
    assert clean.report.code == 0


def test_a_clean_run_raises_no_alarm(clean: Told) -> None:
    # How long a backlog took is another matter.
    alarms, settings = Alarms(), AuditSettings()
    now, balance = clean.balance.at, clean.balance
    for second in range(60):
        assert alarms.look(Snapshot(now + second * 1_000_000, float(second), settings, balance, {})) == []


def test_a_dropped_record_and_a_lost_tail_are_gaps_of_their_source(mutated: Told) -> None:
    assert set(mutated.source.gaps) == {gap(DROPPED), gap(TAIL)}
    assert (mutated.source.missing, mutated.source.in_flight) == (2, 0)
    assert mutated.source.due == mutated.source.taken + 2 == MUTATED + 2


def test_a_doubled_record_is_counted_and_absorbed_everywhere(mutated: Told) -> None:
    channel = mutated.channel(mutated.line.things)
    assert (channel.duplicates, channel.records - channel.distinct) == (1, 1)
    assert [one.sender for one in channel.by_sender if one.duplicates] == [DOUBLED[0]]
    assert mutated.query.outcomes[Outcome.DUPLICATE] == mutated.lake.outcomes[Outcome.DUPLICATE] == 1
    assert in_lake(mutated.line, DOUBLED) == 1


def test_a_reordered_record_is_counted(mutated: Told) -> None:
    sender, _ = SWAPPED
    channel = mutated.channel(mutated.line.things)
    assert [(one.sender, one.reordered) for one in channel.by_sender if one.reordered] == [(sender, 1)]


def test_a_corrupted_record_is_refused_and_lies_in_the_dead_letters_under_its_number(mutated: Told) -> None:
    assert mutated.query.outcomes[Outcome.REFUSED] == mutated.lake.outcomes[Outcome.REFUSED] == 1
    [letter] = scan(mutated.line.kafka, f"{mutated.line.things}.dead")
    origin = Origin.of(letter.headers)
    assert origin is not None
    assert (origin.sender, origin.seq) == CORRUPTED
    assert mutated.channel(mutated.line.things).refused == 1
    assert in_lake(mutated.line, CORRUPTED) == 0


def test_a_record_that_is_delayed_past_the_watermark_is_late_and_named(mutated: Told) -> None:
    assert mutated.query.outcomes[Outcome.LATE] == 1
    assert mutated.query.late == (gap(DELAYED),)
    assert in_lake(mutated.line, DELAYED) == 1


def test_a_record_that_the_query_skipped_is_missing_there_and_named_by_a_recomputation(mutated: Told) -> None:
    assert (mutated.query.missing, mutated.query.in_flight) == (1, 0)
    assert mutated.query.due == sum(mutated.query.outcomes.values()) + 1 == MUTATED
    assert mutated.query.outcomes[Outcome.PASSED] == MUTATED - 4
    [channel] = [one for one in mutated.report.judged if one.holder.startswith("channel:")]
    # The one that came too late is left out of the recomputation.
    assert {mutated.report.record_of(one) for one in channel.differences} == {f"lacks {SKIPPED[0]}/1: {SKIPPED[1]}"}
    assert mutated.report.code == 1


def test_rows_that_come_again_count_once(mutated: Told) -> None:
    assert mutated.redis.outcomes[Outcome.DUPLICATE] == 2
    assert mutated.content.folded[mutated.line.totals] == mutated.query.outcomes[Outcome.PASSED]


def test_a_record_that_the_lake_lost_is_missing_there_and_named(mutated: Told) -> None:
    assert (mutated.lake.missing, mutated.lake.in_flight) == (1, 0)
    assert mutated.lake.outcomes[Outcome.PASSED] == MUTATED - 3
    assert absent(mutated.line.lake, mutated.content, mutated.line.things) == (gap(LOST_BY_LAKE),)


def test_a_row_that_redis_lost_is_told_there_and_named_by_a_recomputation(mutated: Told) -> None:
    assert (mutated.redis.due, mutated.redis.in_flight) == (mutated.redis.taken, 0)
    # Compaction would take it away, too: the balance alone cannot call it a loss.
    assert mutated.redis.note == "1 rows were compacted away before it read them"
    lacking = {one.holder.partition("/")[0]: {row.key for row in one.differences} for one in mutated.report.judged}
    [key] = lacking["store:redis"] - lacking[f"channel:{mutated.line.totals}"]
    window, name = json.loads(key)
    assert (datetime.fromisoformat(window["start"]).timestamp() * 1_000, name) == (BEGIN + WINDOW, "n0")


def test_end_to_end_everything_adds_up(mutated: Told) -> None:
    for hop in (*mutated.balance.hops, *mutated.balance.paths):
        assert hop.due == sum(hop.outcomes.values()) + hop.in_flight + hop.missing, hop
    [path] = [one for one in mutated.balance.paths if f"query:{mutated.line.totals}" in one.stage]
    assert (path.due, path.missing) == (MUTATED + 2, 3)
    assert mutated.balance.missing == 2 + 1 + 1


def in_lake(made: Line, who: Who) -> int:
    """How often the lake holds a record."""
    sender, seq = who
    found = DeltaTable(made.lake.path).to_pyarrow_table(filters=[("_sender", "=", sender), ("_seq", "=", seq)])
    return int(found.num_rows)

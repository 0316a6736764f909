"""What becomes of records that come too late, and that the dead letters hold each of them once."""

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from tests.analysis.operators import oracles
from tests.analysis.operators.oracles import DDL, EVENT_TIME, generate, in_batches, placed
from tests.channels.traffic import send

from penstock import Pipeline, by_count, seen
from penstock.analysis.belated import Belated
from penstock.analysis.books import Books, standing
from penstock.analysis.checkpoints.batches import batches
from penstock.analysis.engine import Engine
from penstock.analysis.kafka import KafkaWire
from penstock.analysis.launching import launch
from penstock.analysis.query import Late, Mode, Query, Shape
from penstock.analysis.settings import SparkSettings
from penstock.audit.account import Account, Outcome
from penstock.audit.held import held
from penstock.channels.kafka import Kafka
from penstock.clock import SystemClock
from penstock.contracts import Topic
from penstock.errors import Misconfigured, Refused, Unavailable
from penstock.pipeline.letters import Letter, Selection
from penstock.pipeline.redrive import Verdict, redrive
from penstock.pipeline.tiers.analyse import run
from penstock.pipeline.wiring import Wiring
from penstock.record import Origin, Record
from penstock.testing.channels import MemoryChannels

Fresh = Callable[[str], str]
Eventually = Callable[..., None]
WATERMARK = timedelta(seconds=10)


def tumbling(events: DataFrame) -> DataFrame:
    return events.groupBy(F.window("event_time", "10 seconds"), "name").agg(seen())


def sliding(events: DataFrame) -> DataFrame:
    return events.groupBy(F.window("event_time", "10 seconds", "5 seconds"), "name").agg(seen())


def sessions(events: DataFrame) -> DataFrame:
    return events.groupBy(F.session_window("event_time", "3 seconds").alias("window"), "name").agg(seen())


def filtered(events: DataFrame) -> DataFrame:
    return tumbling(events.where("n > 5"))


def anyhow(events: DataFrame) -> DataFrame:
    return events.groupBy("name").agg(seen())


def fours(events: DataFrame) -> DataFrame:
    return by_count(events, 4)


class Kept:
    """A query whose late records lie in the dead letters, and its books."""

    def __init__(self, engine: Engine, kafka: Kafka, channel: str, into: str, build: Any) -> None:
        self.engine, self.kafka, self.channel = engine, kafka, channel
        kafka.ensure([Topic(into, compacted=True)])
        key = ("window", "name")
        self.query = Query(into, (channel,), into, key, build, Mode.MICRO_BATCH, WATERMARK, late=Late.DEAD)
        self.books = self.launched(None)

    def launched(self, before: Account | None) -> Books:
        stood = standing(self.engine, self.query, self.kafka.bounds)
        running, _ = launch(self.engine, self.query, 0, {})
        belated = Belated(self.query.name, self.kafka, before.at if before else 0)
        return Books(self.engine, self.query, running, before, stood, self.kafka, SystemClock(), belated)

    def crash(self, before: Account) -> None:
        """The driver dies after it has brought the letters, and before it has told of them."""
        self.books.running.stop()
        self.books = self.launched(before)
        assert self.books.look() is not None

    def until_taken(self, number: int, eventually: Eventually) -> None:
        def enough() -> bool:
            self.books.look()
            return self.books.account.shares[self.channel].taken >= number

        eventually(enough)

    def letters(self) -> list[Letter]:
        found = map(Letter.of, held(self.kafka, f"{self.channel}.dead"))
        return [letter for letter in found if letter.late_for == self.query.name]

    def taken(self) -> list[oracles.Taken]:
        lying = placed(held(self.kafka, self.channel))
        return in_batches(self.channel, lying, batches(self.engine.checkpoint(self.query.name)))


def test_each_late_record_lies_in_the_dead_letters_once(
    spark: SparkSession, kafka: Kafka, fresh: Fresh, eventually: Eventually, tmp_path: Path
) -> None:
    channel = fresh("events")
    kafka.ensure([Topic(channel, 2), Topic(f"{channel}.dead")])

    def kept(build: Any, unique: str | None) -> Kept:
        shapes = {channel: Shape(channel, DDL, EVENT_TIME, unique=unique)}
        engine = Engine(spark, SparkSettings(every="100 ms"), KafkaWire(kafka.servers), str(tmp_path), shapes)
        return Kept(engine, kafka, channel, fresh(build.__name__), build)

    # One that drops rows of closed windows, and one with a gate, which drops each record by its own time.
    overlapping, gated = both = kept(sliding, None), kept(sessions, "number")
    events = generate(seed=8, n=200, late=0.15)
    before: dict[str, Account] = {}
    sent = 0
    for part in (events[:80], events[80:120], events[120:]):
        before = {one.query.name: one.books.account for one in both}
        send(kafka, channel, [event.record() for event in part])
        sent += len(part)
        for one in both:
            one.until_taken(sent, eventually)
    for one in both:
        one.crash(before[one.query.name])
        one.books.running.stop()

    due = {
        overlapping.query.name: oracles.sliding(overlapping.taken(), 10_000, 5_000).late,
        gated.query.name: oracles.deduplicated(gated.taken())[2],
    }
    for one in both:
        late, letters = due[one.query.name], one.letters()
        assert late
        assert sorted(letter.origin.seq for letter in letters if letter.origin) == sorted(event.seq for event in late)
        assert one.books.account.shares[channel].outcomes[Outcome.LATE] == len(late)
        assert one.books.account.shares[channel].outcomes[Outcome.REFUSED] == 0
        # The letter is the record as it came, and what was added to it can be told apart.
        by_place = {f"{e.channel}:{e.partition}:{e.offset}": e for e in held(kafka, channel)}
        for letter in letters:
            record = by_place[letter.place or ""]
            assert (letter.value, letter.entry.key) == (record.value, record.key)
            assert list(letter.headers) == list(record.headers)
            assert letter.reason == f"late: its window was closed in query {one.query.name}"


@pytest.mark.parametrize(
    ("build", "unique", "why"),
    [
        (tumbling, None, None),
        (sliding, None, None),
        (sessions, "number", None),
        (fours, "number", None),
        (sessions, None, "its sessions grow together"),
        (anyhow, None, "its rows have no window"),
        (filtered, None, "its own where.. is not declared: say it as where= instead"),
        (fours, None, "its windows are not of time"),
    ],
)
def test_a_query_whose_late_records_cannot_be_told_is_refused(
    build: Any, unique: str | None, why: str | None, spark: SparkSession, tmp_path: Path
) -> None:
    shape = Shape("events", DDL, EVENT_TIME, unique=unique)
    engine = Engine(spark, SparkSettings(), KafkaWire("127.0.0.1:1"), str(tmp_path), {"events": shape})
    key = ("name",) if build is anyhow else ("window",)
    query = Query("q", ("events",), "q", key, build, watermark=WATERMARK, late=Late.DEAD)
    if why is None:
        assert "seen" in engine.columns(query)
        return
    with pytest.raises(Misconfigured, match=f"belong to the dead letters: {why}; say what makes .* unique"):
        engine.columns(query)
    with pytest.raises(Misconfigured, match=why):
        launch(engine, query, 0, {})


# --- letters, without Spark -------------------------------------------------------------------------------------------


def raw(offset: int, value: bytes | None = b"{}") -> dict[str, Any]:
    """A record as Spark reads it."""
    told = [{"key": name, "value": value} for name, value in Origin("s", 1, offset, 7).headers()]
    return {"topic": "events", "partition": 0, "offset": offset, "key": None, "value": value, "headers": told}


def places(channels: MemoryChannels) -> list[str | None]:
    return [Letter.of(entry).place for entry in channels.entries("events.dead")]


def test_letters_that_an_earlier_life_has_written_are_not_written_again() -> None:
    channels = MemoryChannels()
    Belated("q", channels, 0).bury("events", [raw(1), raw(2)])
    again = Belated("q", channels, SystemClock().now())
    again.bury("events", [raw(1), raw(2), raw(3)])
    assert places(channels) == ["events:0:1", "events:0:2", "events:0:3"]
    # For another query, the same record is late on its own.
    Belated("other", channels, 0).bury("events", [raw(1)])
    assert len(places(channels)) == 4


def test_a_record_of_a_channel_that_was_made_anew_is_another_one() -> None:
    channels = MemoryChannels()
    Belated("q", channels, 0).bury("events", [raw(1)])
    Belated("q", channels, 0).bury("events", [raw(1, b'{"other": 1}')])
    assert places(channels) == ["events:0:1", "events:0:1"]


def test_a_late_record_without_a_value_has_a_letter_without_one() -> None:
    channels = MemoryChannels()
    Belated("q", channels, 0).bury("events", [raw(1, None), raw(2, b"")])
    assert [entry.value for entry in channels.entries("events.dead")] == [None, b""]


def test_what_is_accounted_for_is_forgotten() -> None:
    channels = MemoryChannels()
    belated = Belated("q", channels, 0)
    belated.bury("events", [raw(1), raw(2)])
    belated.accounted({0: 2})
    belated.bury("events", [raw(2), raw(3)])
    assert places(channels) == ["events:0:1", "events:0:2", "events:0:3"]


class Flaky(MemoryChannels):
    """Channels that do not take everything at once."""

    def __init__(self, fails: Callable[[Sequence[Record]], Exception | None]) -> None:
        super().__init__()
        self.fails = fails

    @asynccontextmanager
    async def sender(self) -> AsyncIterator[Any]:
        async with super().sender() as inner:

            class Sender:
                async def send(_, channel: str, records: Sequence[Record]) -> None:
                    if error := self.fails(records):
                        raise error
                    await inner.send(channel, records)

            yield Sender()


def test_what_was_sent_before_a_failure_is_not_sent_again() -> None:
    calls: list[int] = []

    def fails(records: Sequence[Record]) -> Exception | None:
        calls.append(len(records))
        return Unavailable("Kafka", "it is away") if len(calls) == 2 else None

    channels = Flaky(fails)
    belated = Belated("q", channels, 0)
    with pytest.raises(Unavailable):
        belated.bury("events", map(raw, range(700)))
    belated.bury("events", map(raw, range(700)))
    assert calls == [500, 200, 200]
    assert len(set(places(channels))) == len(places(channels)) == 700


def test_a_record_too_large_for_a_letter_does_not_hold_up_the_others(caplog: pytest.LogCaptureFixture) -> None:
    def fails(records: Sequence[Record]) -> Exception | None:
        return Refused("a record", "it is too large") if any(one.value == b"large" for one in records) else None

    channels = Flaky(fails)
    Belated("q", channels, 0).bury("events", [raw(1), raw(2, b"large"), raw(3)])
    assert places(channels) == ["events:0:1", "events:0:3"]
    assert "the late record events:0:2 gets no dead letter: it is too large" in caplog.text


def test_what_came_too_late_is_redriven_into_other_channels_only() -> None:
    """Queries that were in time have counted it where it lies; sent there again, it would count twice."""
    channels = MemoryChannels()
    own = [{"key": "query", "value": b"its own"}]
    Belated("q", channels, 0).bury("events", [{**raw(7), "headers": raw(7)["headers"] + own}])
    (outcome,) = redrive(channels, "events.dead", Selection(), "events")
    assert outcome.verdict is Verdict.LATE
    assert outcome.why == "it lies in its channel, and came too late for query q; send it --into another channel"
    assert not channels.entries("events")
    redrive(channels, "events.dead", Selection(), "again")
    (sent,) = channels.entries("again")
    marks = [("query", b"its own"), ("redriven", b"1"), ("from", b"events.dead:0:0")]
    assert list(sent.headers) == [*Origin("s", 1, 7, 7).headers(), *marks]


def test_a_result_has_no_dead_letters_for_late_records(tmp_path: Path) -> None:
    app = Pipeline("p")
    app.channel("events", schema=DDL, event_time=EVENT_TIME)
    app.query("counted", key="name")(lambda events: anyhow(events))
    app.query("again", key="window", watermark="1 second", late="dead letters")(lambda counted: tumbling(counted))
    with pytest.raises(Misconfigured, match=r"query again: .* it reads a result, which has none; leave late= out"):
        run(app.describe(), Wiring.read(tmp_path), threading.Event(), lambda: None)


def test_the_oracles_agree_with_themselves() -> None:
    """In one batch nothing is late: the windows hold every record, and those by time add up."""
    events = generate(seed=1, n=300)
    one = [oracles.Taken(0, 0, events)]
    whole = sum(event.n for event in events), len(events)
    for found in (oracles.tumbling(one, 10_000), oracles.sessions(one, 3_000)):
        assert (sum(n for n, _ in found.rows.values()), sum(n for _, n in found.rows.values())) == whole
        assert not found.late
    passed, doubled, late = oracles.deduplicated(one)
    assert (len(passed[0].events) + len(doubled), late) == (len(events), [])
    assert events == generate(seed=1, n=300)
    assert len({event.seq for event in events}) == len({*events}) < len(events)
    assert any(after.at < before.at for before, after in pairwise(events))

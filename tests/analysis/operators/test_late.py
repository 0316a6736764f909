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
from tests.analysis.operators.oracles import DDL, EVENT_TIME, generate

from penstock import Pipeline, count_window, seen
from penstock.analysis.connectors import KafkaConnector
from penstock.analysis.dead_letters import LateRecords
from penstock.analysis.engine import Engine
from penstock.analysis.launch import launch
from penstock.analysis.query import Late, Query, Shape
from penstock.analysis.settings import SparkSettings
from penstock.core.clock import SystemClock
from penstock.core.errors import Misconfigured, Refused, Unavailable
from penstock.core.record import Origin, Record
from penstock.operate.dead_letters import Letter, Selection, Verdict, redrive
from penstock.pipeline.config import Config
from penstock.run.analyse import run
from penstock.testing import MemoryChannels

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
    return count_window(events, 4)


@pytest.mark.parametrize(
    ("build", "unique", "why"),
    [
        (tumbling, None, None),
        (sliding, None, None),
        (sessions, "number", None),
        (fours, "number", None),
        (sessions, None, "its sessions are merged"),
        (anyhow, None, "its rows have no window"),
        (filtered, None, "it uses where..: declare the condition as where= instead"),
        (fours, None, "its windows do not end in time"),
    ],
)
def test_a_query_whose_late_records_cannot_be_told_is_refused(
    build: Any, unique: str | None, why: str | None, spark: SparkSession, tmp_path: Path
) -> None:
    shape = Shape("events", DDL, EVENT_TIME, unique=unique)
    engine = Engine(spark, SparkSettings(), KafkaConnector("127.0.0.1:1"), str(tmp_path), {"events": shape})
    key = ("name",) if build is anyhow else ("window",)
    query = Query("q", ("events",), "q", key, build, watermark=WATERMARK, late=Late.DEAD)
    if why is None:
        assert "seen" in engine.columns(query)
        return
    with pytest.raises(Misconfigured, match=f"for the dead letters: {why}; declare unique="):
        engine.columns(query)
    with pytest.raises(Misconfigured, match=why):
        launch(engine, query, 0, {})


# --- letters, without Spark -------------------------------------------------------------------------------------------


def raw(offset: int, value: bytes | None = b"{}") -> dict[str, Any]:
    """A record as Spark reads it."""
    told = [{"key": name, "value": value} for name, value in Origin("s", 1, offset, 7).headers()]
    return {"topic": "events", "partition": 0, "offset": offset, "key": None, "value": value, "headers": told}


def locations(channels: MemoryChannels) -> list[str | None]:
    return [Letter.of(entry).location for entry in channels.entries("events.dead")]


def test_letters_that_an_earlier_life_has_written_are_not_written_again() -> None:
    channels = MemoryChannels()
    LateRecords("q", channels, 0).write("events", [raw(1), raw(2)])
    again = LateRecords("q", channels, SystemClock().now())
    again.write("events", [raw(1), raw(2), raw(3)])
    assert locations(channels) == ["events:0:1", "events:0:2", "events:0:3"]
    # For another query, the same record is late on its own.
    LateRecords("other", channels, 0).write("events", [raw(1)])
    assert len(locations(channels)) == 4


def test_a_record_of_a_channel_that_was_made_anew_is_another_one() -> None:
    channels = MemoryChannels()
    LateRecords("q", channels, 0).write("events", [raw(1)])
    LateRecords("q", channels, 0).write("events", [raw(1, b'{"other": 1}')])
    assert locations(channels) == ["events:0:1", "events:0:1"]


def test_a_late_record_without_a_value_has_a_letter_without_one() -> None:
    channels = MemoryChannels()
    LateRecords("q", channels, 0).write("events", [raw(1, None), raw(2, b"")])
    assert [entry.value for entry in channels.entries("events.dead")] == [None, b""]


def test_what_is_accounted_for_is_forgotten() -> None:
    channels = MemoryChannels()
    late_records = LateRecords("q", channels, 0)
    late_records.write("events", [raw(1), raw(2)])
    late_records.accounted({0: 2})
    late_records.write("events", [raw(2), raw(3)])
    assert locations(channels) == ["events:0:1", "events:0:2", "events:0:3"]


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
    late_records = LateRecords("q", channels, 0)
    with pytest.raises(Unavailable):
        late_records.write("events", map(raw, range(700)))
    late_records.write("events", map(raw, range(700)))
    assert calls == [500, 200, 200]
    assert len(set(locations(channels))) == len(locations(channels)) == 700


def test_a_record_too_large_for_a_letter_does_not_hold_up_the_others(caplog: pytest.LogCaptureFixture) -> None:
    def fails(records: Sequence[Record]) -> Exception | None:
        return Refused("a record", "it is too large") if any(one.value == b"large" for one in records) else None

    channels = Flaky(fails)
    LateRecords("q", channels, 0).write("events", [raw(1), raw(2, b"large"), raw(3)])
    assert locations(channels) == ["events:0:1", "events:0:3"]
    assert "the record events:0:2 gets no dead letter: it is too large" in caplog.text


def test_what_came_too_late_is_redriven_into_other_channels_only() -> None:
    """Queries that were in time have counted it where it lies; sent there again, it would count twice."""
    channels = MemoryChannels()
    own = [{"key": "query", "value": b"its own"}]
    LateRecords("q", channels, 0).write("events", [{**raw(7), "headers": raw(7)["headers"] + own}])
    (outcome,) = redrive(channels, "events.dead", Selection(), "events")
    assert outcome.verdict is Verdict.LATE
    assert "was late for query q" in outcome.why
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
        run(app.describe(), Config.read(tmp_path), threading.Event(), lambda: None)


def test_the_oracles_agree_with_themselves() -> None:
    """In one batch nothing is late: the windows hold every record, and those by time add up."""
    events = generate(seed=1, n=300)
    one = [oracles.Snapshot(0, 0, events)]
    whole = sum(event.n for event in events), len(events)
    for found in (oracles.tumbling(one, 10_000), oracles.sessions(one, 3_000)):
        assert (sum(n for n, _ in found.rows.values()), sum(n for _, n in found.rows.values())) == whole
        assert not found.late
    passed, doubled, late = oracles.deduplicated(one)
    assert (len(passed[0].events) + len(doubled), late) == (len(events), [])
    assert events == generate(seed=1, n=300)
    assert len({event.seq for event in events}) == len({*events}) < len(events)
    assert any(after.at < before.at for before, after in pairwise(events))

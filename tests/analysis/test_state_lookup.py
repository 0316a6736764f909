"""The state of queries that run: a real broker, a real Spark."""

import asyncio
import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import orjson
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from penstock.analysis.checkpoints.batches import covered
from penstock.analysis.connectors import KafkaConnector
from penstock.analysis.engine import Engine
from penstock.analysis.frames import encoded, seen
from penstock.analysis.query import Query, Shape
from penstock.analysis.settings import SparkSettings
from penstock.analysis.state_lookup import LONGEST, get, opened, parse_key, scan
from penstock.channels.kafka import Kafka
from penstock.core.contracts import Topic
from penstock.core.errors import Refused
from penstock.core.record import Origin, Record

ODD = 'a/b "c" ñ☃'
"""A key that has to be quoted everywhere."""
DAY = 1_700_000_000_000_000
WINDOW = {"start": "2023-11-14T22:13:20.000Z", "end": "2023-11-14T22:13:30.000Z"}
LONG = 10**29
LATER = 4_000_000_000_000


def windowed(things: DataFrame) -> DataFrame:
    long = F.max(F.expr(f"CAST(n AS DECIMAL(30, 0)) + {LONG}")).alias("long")
    return things.groupBy(F.window("event_time", "10 seconds"), "name").agg(F.sum("n").alias("total"), long, seen())


def sessions(things: DataFrame) -> DataFrame:
    who = F.struct("name").alias("who")
    return things.groupBy(who, F.session_window("event_time", "10 seconds").alias("session")).agg(seen())


def remembering(things: DataFrame) -> DataFrame:
    class Remember(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.handle = handle
            self.last = handle.getValueState("last", "n BIGINT")
            self.brief = handle.getValueState("brief", "n BIGINT", 3_600_000)
            self.recent = handle.getListState("recent", "n BIGINT")
            self.times = handle.getMapState("times", "odd BOOLEAN", "n BIGINT")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
            self.handle.registerTimer(LATER)
            for row in sorted(rows, key=lambda row: row.n):
                self.last.update((row.n,))
                self.brief.update((row.n,))
                self.recent.appendValue((row.n,))
                odd = (row.n % 2 == 1,)
                before = self.times.getValue(odd)[0] if self.times.containsKey(odd) else 0
                self.times.updateValue(odd, (before + 1,))
                yield Row(name=key[0], n=row.n)

        def close(self) -> None: ...

    grouped = things.select("name", "n").groupBy("name")
    return grouped.transformWithState(Remember(), "name STRING, n BIGINT", "update", "processingTime")


def once(things: DataFrame) -> DataFrame:
    return things.dropDuplicates(["name"]).select("name", "origin")


SWAPPED = "SELECT n % 2 AS odd, upper(name) AS name, sum(n) AS t, max(n) AS a, max(n + 1) AS b FROM {} GROUP BY 2, 1"


def started(engine: Engine, query: Query) -> StreamingQuery:
    rows = encoded(engine.frame(query, engine.stream), query)
    writer = engine.connector.into(rows, query.into).option("checkpointLocation", engine.checkpoint(query.name))
    mode = "append" if query.name == "sessions" else "update"
    # An earlier query of the session may have allowed batches without data: with timers they never end.
    engine.spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "false")
    running = writer.outputMode(mode).trigger(processingTime="1 second").start()
    running.processAllAvailable()
    return running


@pytest.fixture(scope="module")
def asked(
    spark: SparkSession, kafka: Kafka, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, dict[str, Query]]]:
    """Queries that have read the same twelve records, and still run."""
    things, folder = "asked-things", str(tmp_path_factory.mktemp("asked"))
    queries = {
        "windowed": Query("windowed", (things,), "asked-a", ("window", "name"), windowed, watermark=timedelta(hours=1)),
        "swapped": Query("swapped", (things,), "asked-b", ("name", "odd"), SWAPPED.format("`asked-things`")),
        "remembering": Query("remembering", (things,), "asked-c", ("name",), remembering),
        "sessions": Query("sessions", (things,), "asked-g", ("who", "session"), sessions, watermark=timedelta(hours=1)),
        "once": Query("once", (things,), "asked-d", ("name",), once),
        "plain": Query("plain", (things,), "asked-e", ("n",), lambda frame: frame.select("n", "origin")),
    }
    kafka.ensure([Topic(things, 2), *(Topic(query.into) for query in queries.values())])
    records = [
        Record(json.dumps({"name": name, "n": n}).encode(), Origin("s", 1, n, DAY + n), name.encode())
        for n, name in enumerate(["ann", "bob", ODD] * 4)
    ]

    async def send() -> None:
        async with kafka.sender() as sender:
            await sender.send(things, records)

    asyncio.run(send())
    shapes = {things: Shape(things, "name STRING, n BIGINT")}
    engine = Engine(spark, SparkSettings(every="200 ms"), KafkaConnector(kafka.servers), folder, shapes)
    running = [started(engine, query) for query in queries.values()]
    yield engine, queries
    for one in running:
        one.stop()


Asked = tuple[Engine, dict[str, Query]]


def test_the_state_of_a_key_comes_with_the_position_that_it_reflects(asked: Asked) -> None:
    engine, queries = asked
    found = get(engine, queries["windowed"], json.dumps([WINDOW, ODD]))
    assert found["key"] == [WINDOW, ODD]
    assert found["state"]["sum"] == 2 + 5 + 8 + 11
    assert found["state"]["count"] == 4
    # To the last digit, which numbers in JSON would lose.
    assert found["state"]["max"] == str(LONG + 11)
    assert orjson.dumps(found)
    position = found["position"]
    told = {name: {int(part): end for part, end in ends.items()} for name, ends in position["reads"].items()}
    assert told == covered(engine.checkpoint("windowed"))
    assert sum(told["asked-things"].values()) == 12
    assert position["at"] > DAY


def test_a_session_is_found_by_its_window_and_its_keys(asked: Asked) -> None:
    engine, queries = asked
    (entry,) = scan(engine, queries["sessions"], '{"name":"ann"', 10)["entries"]
    who, session = entry["key"]
    assert (who, session.keys()) == ({"name": "ann"}, {"start", "end"})
    assert get(engine, queries["sessions"], json.dumps(entry["key"]))["state"]["count"] == 4


def test_a_question_takes_one_slot(asked: Asked) -> None:
    engine, queries = asked
    _, (part,) = opened(engine, queries["windowed"])
    assert part.frame._jdf.rdd().getNumPartitions() == 1


def test_an_expression_is_known_by_the_name_that_the_result_gives_it(asked: Asked) -> None:
    engine, queries = asked
    found = get(engine, queries["swapped"], '["ANN", 1]')
    assert found["state"] == {"sum": 3 + 9, "max": 9, "max_2": 10}


def test_variables_of_ones_own_are_told_by_their_names(asked: Asked) -> None:
    engine, queries = asked
    expected: dict[str, Any] = {
        "last": {"n": 9},
        "brief": {"n": 9},
        "recent": [{"n": 0}, {"n": 3}, {"n": 6}, {"n": 9}],
        "timers": ["2096-10-02T07:06:40.000Z"],
        "times": [{"key": {"odd": odd}, "value": {"n": 2}} for odd in (False, True)],
    }
    assert get(engine, queries["remembering"], "ann")["state"] == expected
    some = get(engine, queries["remembering"], "ann", most=3)
    assert some["state"] == {**expected, "recent": expected["recent"][:3]}
    assert some["note"] == "recent has more than 3 entries"


def test_where_there_is_nothing_some_keys_are_named(asked: Asked) -> None:
    engine, queries = asked
    found = get(engine, queries["remembering"], "nobody")
    assert found["state"] is None
    assert sorted(found["keys"]) == sorted([["ann"], ["bob"], [ODD]])
    elsewhere = get(engine, queries["windowed"], '[{"start": "2020-01-01T00:00:00Z", "end": null}, "ann"]')
    assert elsewhere["keys"][0][0] == WINDOW


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("ann", "the state has the key name and odd: write a JSON array of 2 values"),
        ('["ann"]', "write a JSON array of 2 values"),
        ('["ann", "two"]', 'its odd cannot be read: "two" is not a bigint'),
        (f'["ann", {2**70}]', "its odd cannot be read"),
        ('["ann", 1e400]', "write a JSON array of 2 values"),
        ("[" * 5_000, "write a JSON array of 2 values"),
        ("a" * (LONGEST + 1), "8,193 characters"),
    ],
)
def test_what_cannot_be_a_key_is_refused_with_the_reason(asked: Asked, key: str, reason: str) -> None:
    engine, queries = asked
    with pytest.raises(Refused, match=reason):
        get(engine, queries["swapped"], key)


def test_a_scan_ends_at_its_limit(asked: Asked) -> None:
    engine, queries = asked
    whole = scan(engine, queries["swapped"], "", 100)
    sums = {(*entry["key"],): entry["value"]["sum"] for entry in whole["entries"]}
    shout = ODD.upper()
    assert sums == {
        ("ANN", 0): 6, ("ANN", 1): 12, ("BOB", 0): 14, ("BOB", 1): 8, (shout, 0): 10, (shout, 1): 16
    }  # fmt: skip
    assert not whole["more"]
    some = scan(engine, queries["swapped"], "", 4)
    assert len(some["entries"]) == 4
    assert some["more"]
    begun = scan(engine, queries["swapped"], "B", 10)
    assert {entry["key"][0] for entry in begun["entries"]} == {"BOB"}
    with pytest.raises(Refused, match="from 1 to 10,000"):
        scan(engine, queries["swapped"], "", 0)


def test_a_scan_of_ones_own_state_names_the_variables(asked: Asked) -> None:
    engine, queries = asked
    entries = scan(engine, queries["remembering"], "bo", 100)["entries"]
    assert [entry["value"]["n"] for entry in entries if entry["variable"] == "recent"] == [1, 4, 7, 10]
    assert {"key": ["bob"], "variable": "times", "of": {"odd": True}, "value": {"n": 2}} in entries


def test_what_cannot_be_asked_says_why(asked: Asked) -> None:
    engine, queries = asked
    assert "known records, to find duplicates" in get(engine, queries["once"], "ann")["note"]
    assert "it has no state" in scan(engine, queries["plain"], "", 10)["note"]
    new = Query("new", ("asked-things",), "asked-f", ("name",), windowed)
    assert get(engine, new, "ann")["note"] == "it has no committed batch"


@pytest.mark.parametrize(
    ("key", "columns", "expected"),
    [
        ("nl", 1, ["nl"]),
        ('["nl"]', 1, ["nl"]),
        ("[1, 2]", 1, ["[1, 2]"]),
        ("[1, 2]", 2, [1, 2]),
        ("nl", 2, None),
        ("", 1, [""]),
        ("[]", 0, []),
        ('["\\ud800"]', 1, ['["\\ud800"]']),
        ("[" * 100_000, 1, ["[" * 100_000]),
        ("[NaN]", 1, ["[NaN]"]),
    ],
)
def test_a_key_is_an_array_or_a_bare_value(key: str, columns: int, expected: list[object] | None) -> None:
    assert parse_key(key, columns) == expected

"""Queries that somebody looks at: what their rows look like, how they come, and that they come."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import orjson
import pytest
from pyspark.sql import SparkSession
from tests.channels.traffic import send

from penstock.analysis.connectors import KafkaConnector
from penstock.analysis.engine import Engine
from penstock.analysis.interactive import InteractiveQuery, Result, exactly, inferred, result
from penstock.analysis.query import Query, Shape
from penstock.analysis.settings import SparkSettings
from penstock.channels.kafka import Kafka
from penstock.core.contracts import Topic
from penstock.core.errors import Misconfigured
from penstock.core.record import Origin, Record


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        (f"{2**64 - 1}", 2**64 - 1),
        (f"{-(2**63)}", -(2**63)),
        (f"{2**64}", f"{2**64}"),
        (f"{-(2**63) - 1}", f"{-(2**63) - 1}"),
        ("1.5", 1.5),
        ("1.0E10", 1e10),
        ("0.10", 0.1),
        ("1E-7", 1e-7),
        ("1E400", "1E400"),
        ("12345678901234567890.123456789", "12345678901234567890.123456789"),
        ("99999999999999.999", "99999999999999.999"),
    ],
)
def test_a_number_is_told_to_the_last_digit(text: str, value: object) -> None:
    assert exactly(text) == value
    assert exactly(f'{{"a": [{text}]}}') == {"a": [value]}
    assert orjson.loads(orjson.dumps(exactly(text))) == value


COLUMNS = "city STRING NOT NULL, n BIGINT"


def asked(
    spark: SparkSession, sql: str, late: int | None = None, servers: str = "127.0.0.1:1", name: str = "a"
) -> Result:
    shapes = {name: Shape(name, COLUMNS), "b": Shape("b", COLUMNS)}
    engine = Engine(spark, SparkSettings(), KafkaConnector(servers), "/nowhere", shapes)
    watermark = None if late is None else timedelta(seconds=late)
    inputs = (name, "b") if "JOIN b" in sql else (name,)
    return result(engine, Query("SQL", inputs, "SQL", (), sql, watermark=watermark), {name: {0: 0}, "b": {0: 0}})


@pytest.mark.parametrize(
    ("sql", "columns", "keys", "output"),
    [
        ("SELECT city, n FROM a WHERE n > 1", "city n", "", "update"),
        ("SELECT count(1) AS n, city FROM a GROUP BY city", "n city", "city", "update"),
        ("SELECT city AS town, n % 2 AS odd, sum(n) FROM a GROUP BY 1, n % 2", "town odd sum(n)", "town odd", "update"),
        ("SELECT x, m FROM (SELECT city AS x, max(n) AS m FROM a GROUP BY city) WHERE m > 1", "x m", "x", "update"),
        ("SELECT window(event_time, '5 seconds') AS w, count(1) c FROM a GROUP BY 1", "w c", "w", "update"),
        ("SELECT city, n, city FROM a", "city n city_2", "", "update"),
        ("SELECT city, count(1) AS c FROM a GROUP BY city ORDER BY c DESC LIMIT 3", "city c", "", "complete"),
    ],
)  # fmt: skip
def test_what_rows_look_like_and_how_they_come(
    sql: str, columns: str, keys: str, output: str, spark: SparkSession
) -> None:
    found = asked(spark, sql)
    assert (found.columns, found.keys, found.output) == (tuple(columns.split()), tuple(keys.split()), output)


def test_what_is_final_comes_with_a_watermark_and_needs_one(spark: SparkSession) -> None:
    sessions = "SELECT session_window(event_time, '5 seconds') AS s, count(1) AS n FROM a GROUP BY 1"
    assert asked(spark, sessions, late=10).output == "append"
    assert asked(spark, sessions).output == "complete"
    twice = "SELECT n, count(1) FROM (SELECT city, count(1) AS n FROM a GROUP BY city) GROUP BY n"
    with pytest.raises(Misconfigured, match=r"it needs a watermark.*--watermark"):
        asked(spark, twice)


def test_streams_are_joined_within_a_bound(spark: SparkSession) -> None:
    sql = """SELECT a.city, a.n, b.n, seen(a, b) FROM a JOIN b
             ON a.city = b.city AND b.event_time BETWEEN a.event_time AND a.event_time + INTERVAL 1 HOUR"""
    found = asked(spark, sql, late=10)
    assert (found.columns, found.keys) == (("city", "n", "n_2", "seen"), ())


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("SELEC city\nFROM a", r"query SQL, line 1, column 1: Syntax error at or near 'SELEC'"),
        ("SELECT city,\n  seen(), cty\nFROM a", r"query SQL, line 2, column 11: A column, .* `cty` cannot be resolved"),
        ("SELECT * FROM a ORDER BY n", "query SQL: Spark cannot run it over streams: .* cannot be sorted"),
    ],
)
def test_what_is_wrong_with_a_query_is_told_in_a_line(sql: str, said: str, spark: SparkSession) -> None:
    with pytest.raises(Misconfigured, match=said) as caught:
        asked(spark, sql)
    assert "\n" not in str(caught.value)


def test_a_schema_is_seen_in_records(spark: SparkSession) -> None:
    values = [b'{"a": 1, "b": {"x-y": "z"}, "origin": 1}', b'{"a": 2.5, "c d": [null]}', b"not JSON", None]
    assert inferred(spark, values) == "a DOUBLE,b STRUCT<`x-y`: STRING>,`c d` ARRAY<STRING>"
    assert inferred(spark, [b'{"a": 2.5, "A": 1}']) == "A BIGINT"
    deep = b'{"a": ' + b"[" * 1_010 + b"]" * 1_010 + b"}"
    for none in ([], [b"1", b"[1]", b'"x"'], [b"{}"], [b'{"a": 1}', b"x", b"y"], [b'{"event_time": 1}'], [deep]):
        assert inferred(spark, none) is None


@pytest.fixture
def channel(kafka: Kafka, fresh: Callable[[str], str]) -> str:
    name = fresh("a")
    kafka.ensure([Topic(name)])
    return name


@contextmanager
def followed(
    spark: SparkSession, kafka: Kafka, channel: str, sql: str, folder: Path, late: int | None = None
) -> Iterator[tuple[InteractiveQuery, list[dict[str, object]]]]:
    """A query that runs, and the rows that it has handed over so far."""
    found = asked(spark, sql.format(channel=f"`{channel}`"), late, kafka.servers, channel)
    rows: list[dict[str, object]] = []
    following = InteractiveQuery(found, [channel], str(folder), lambda some: rows.extend(map(json.loads, some)))
    try:
        yield following, rows
    finally:
        following.stop()


def records(*values: bytes) -> list[Record]:
    return [Record(value, Origin("s", 1, seq, 1)) for seq, value in enumerate(values)]


def test_rows_are_handed_over_as_they_change_and_what_is_left_out_is_counted(
    spark: SparkSession, kafka: Kafka, channel: str, eventually: Callable[..., None], tmp_path: Path
) -> None:
    groups = kafka.groups()
    some = records(b'{"city": "skipped", "n": 1}', b'{"city": "x", "n": 1}', b'{"n": 1}', b'{"city": "x\\n", "n": 2}')
    send(kafka, channel, some)
    sql = "SELECT city, sum(n) AS n FROM {channel} GROUP BY city"
    with followed(spark, kafka, channel, sql, tmp_path) as (it, rows):
        eventually(lambda: len(rows) == 3)
        send(kafka, channel, records(b'{"city": "x", "n": 41}'))
        eventually(lambda: rows[3:] == [{"city": "x", "n": 42}])
        eventually(lambda: it.look() is None and it.reads and it.refused == 1)
    assert it.late == 0
    assert kafka.groups() == groups


def test_rows_that_are_final_come_without_another_record(
    spark: SparkSession, kafka: Kafka, channel: str, eventually: Callable[..., None], tmp_path: Path
) -> None:
    times = [1_700_000_000_000_000, 1_700_000_001_000_000, 1_700_000_060_000_000]
    value = b'{"city": "x", "n": 1}'
    send(kafka, channel, [Record(value, Origin("s", 1, seq, at)) for seq, at in enumerate(times)])
    sql = "SELECT city, session_window(event_time, '5 seconds') AS s, count(1) AS n FROM {channel} GROUP BY 1, 2"
    with followed(spark, kafka, channel, sql, tmp_path, late=10) as (it, rows):
        eventually(lambda: it.look() or rows)
        assert it.look() is None
    assert [row["n"] for row in rows] == [2]

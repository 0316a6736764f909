"""From bytes to the frame of a query, and back, on a real Spark."""

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType

from penstock.analysis.connectors import KafkaConnector
from penstock.analysis.engine import Engine
from penstock.analysis.frames import (
    MARK,
    RAW,
    Spelled,
    built,
    dead_letters,
    encoded,
    query_input,
    schema_of,
    seen,
    typed,
)
from penstock.analysis.plans import empty_stream, operators
from penstock.analysis.query import Query, Shape
from penstock.analysis.settings import SparkSettings
from penstock.core.errors import Misconfigured

DDL = "id BIGINT NOT NULL, name STRING, tags ARRAY<STRING>, at BIGINT NOT NULL"
SHAPE = Shape("things", DDL, "timestamp_millis(at)")
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
MILLIS = int(NOW.timestamp() * 1000)


def raw(spark: SparkSession, *values: bytes | None, origin: bool = True) -> DataFrame:
    """Records as Spark's Kafka source gives them."""
    told = [("sender", b"s"), ("epoch", b"1"), ("time", b"%d" % (MILLIS * 1000))]
    rows = [
        (b"k", value, "things", 0, at, NOW, 0, [*told, ("seq", b"%d" % at)] if origin else None)
        for at, value in enumerate(values, start=1)
    ]
    return spark.createDataFrame(rows, RAW)


def thing(**fields: Any) -> bytes:
    return json.dumps({"id": 1, "at": MILLIS, **fields}).encode()


def told(frame: DataFrame, name: str) -> list[str]:
    """What a header says in each row."""
    headers = [header for row in frame.collect() for header in row["headers"]]
    return [bytes(header["value"]).decode() for header in headers if header["key"] == name]


def reasons(frame: DataFrame) -> list[str]:
    return told(frame, "reason")


def test_a_query_sees_columns_origin_and_event_time(spark: SparkSession) -> None:
    (row,) = typed(raw(spark, thing(name="a", tags=["x"])), SHAPE).collect()
    assert (row["id"], row["name"], row["tags"]) == (1, "a", ["x"])
    told = {"sender": "s", "epoch": 1, "seq": 1, "time": MILLIS * 1000, "appended": MILLIS * 1000}
    assert row["origin"].asDict() == {**told, "partition": 0, "offset": 1}
    assert row["event_time"].timestamp() == NOW.timestamp()


def test_fields_that_nobody_declared_are_ignored(spark: SparkSession) -> None:
    assert typed(raw(spark, thing(more={"deep": [1]})), SHAPE).columns == [
        "id",
        "name",
        "tags",
        "at",
        "origin",
        "event_time",
    ]


UNFIT = {
    "the value is null": None,
    "it is not a JSON object": b"",
    "it is not JSON": b'{"id": 1, "at": ',
    'the field "id" is missing or null': b'{"at": 1}',
    'the field "id" is not bigint': thing(id="one"),
    'the field "tags" is not array<string>': thing(tags={"a": 1}),
    "its event time lies in the future": thing(at=MILLIS + 2 * 3_600_000),
    # Spark's function fails with it; that must not end the query.
    f"its event time ({SHAPE.event_time}) is null": thing(at=2**63 - 1),
}


@pytest.mark.parametrize(("reason", "value"), UNFIT.items(), ids=list(UNFIT))
def test_what_does_not_fit_has_a_reason(spark: SparkSession, reason: str, value: bytes | None) -> None:
    assert reasons(dead_letters(raw(spark, value), SHAPE)) == [reason]
    assert typed(raw(spark, value), SHAPE).count() == 0


ODD = [
    b"[]",
    b"null",
    b'"text"',
    b"\xff\xfe{",
    b"{" * 1_000,
    b'{"id": NaN, "at": 1}',
    b'{"id": 1e400, "at": 1}',
    b'{"id": 9223372036854775808, "at": 1}',
    b'{"id": 1, "at": -99999999999999999999}',
    thing(name="\x00\ud800"),
    thing(id=None),
    thing(at=-(2**63)),
]


def test_every_record_is_either_seen_or_refused(spark: SparkSession) -> None:
    good = [thing(id=n) for n in range(5)]
    frame = raw(spark, *good, *ODD, *UNFIT.values()).cache()
    seen_ids = {row["seq"] for row in typed(frame, SHAPE).select("origin.seq").collect()}
    refused = {int(location.split(":")[2]) for location in told(dead_letters(frame, SHAPE), "place")}
    assert seen_ids | refused == set(range(1, len(good) + len(ODD) + len(UNFIT) + 1))
    assert not seen_ids & refused
    assert set(range(1, 6)) <= seen_ids


def test_a_dead_letter_keeps_its_bytes_key_and_headers(spark: SparkSession) -> None:
    (row,) = dead_letters(raw(spark, b"\xff\x00 raw"), SHAPE).collect()
    headers = {header["key"]: bytes(header["value"]) for header in row["headers"]}
    assert (bytes(row["key"]), bytes(row["value"])) == (b"k", b"\xff\x00 raw")
    assert headers["sender"] == b"s"
    assert headers["place"] == b"things:0:1"


def test_foreign_headers_do_no_harm(spark: SparkSession) -> None:
    rows = [(b"k", thing(), "things", 0, 1, NOW, 0, [("traceparent", b"00-1")])]
    (row,) = typed(spark.createDataFrame(rows, RAW), SHAPE).collect()
    assert [row["origin"][name] for name in ("sender", "epoch", "seq", "time")] == [None] * 4


def test_an_origin_is_found_wherever_its_headers_lie(spark: SparkSession) -> None:
    own = [("sender", b"s"), ("epoch", b"1"), ("seq", b"7"), ("time", b"9")]
    other, late = ("traceparent", b"00-1"), ("seq", b"8")
    ways = [own, own[::-1], [other, *own], [*own, other], [*own, late], own[:3], [*own[:2], ("seq", b"07"), own[3]]]
    rows = [(b"k", thing(), "things", 0, at, NOW, 0, headers) for at, headers in enumerate(ways)]
    found = typed(spark.createDataFrame(rows, RAW), SHAPE).select("origin.*").orderBy("offset").collect()
    assert [tuple(row)[:4] for row in found] == [("s", 1, 7, 9)] * 5 + [("s", 1, 7, None), ("s", 1, None, 9)]


def test_without_a_schema_records_are_text(spark: SparkSession) -> None:
    (row,) = typed(raw(spark, b"plain text"), Shape("lines")).collect()
    assert row["value"] == "plain text"
    assert row["event_time"].timestamp() == NOW.timestamp()


def test_without_origin_and_event_time_a_record_is_refused(spark: SparkSession) -> None:
    assert reasons(dead_letters(raw(spark, b"x", origin=False), Shape("lines"))) == [
        "it has no origin, and the channel declares no event time"
    ]


def test_a_schema_that_cannot_be_read_is_misconfigured() -> None:
    with pytest.raises(Misconfigured, match="channel things: its schema cannot be read"):
        schema_of(Shape("things", "id BIGGEST"))


def test_a_column_that_penstock_adds_cannot_be_declared() -> None:
    with pytest.raises(Misconfigured, match='"origin" is a column that Penstock adds'):
        schema_of(Shape("things", "origin STRING"))


def counted(things: DataFrame) -> DataFrame:
    return things.groupBy("name").agg(F.sum("id").alias("total"), seen())


COUNTED = Query("counted", ("things",), "totals", ("name",), counted)


def test_a_result_carries_its_key_row_and_version(spark: SparkSession) -> None:
    frame = typed(raw(spark, thing(id=1, name="a"), thing(id=2, name="a")), SHAPE)
    (row,) = encoded(built(COUNTED, [frame]), COUNTED).collect()
    headers = {header["key"]: bytes(header["value"]) for header in row["headers"]}
    assert json.loads(bytes(row["key"])) == ["a"]
    assert json.loads(bytes(row["value"])) == {
        "name": "a",
        "total": 3,
        "seen": {"count": 2, "newest": MILLIS * 1000},
    }
    timestamp = b"%d" % (MILLIS * 1000)
    assert {name: headers[name] for name in headers if name != "mark"} == {
        "query": b"counted", "version": b"2", "time": timestamp, "appended": timestamp
    }  # fmt: skip


def test_the_marks_of_two_rows_differ_by_the_one_record_that_one_of_them_lacks(spark: SparkSession) -> None:
    def mark(*things: bytes) -> int:
        (row,) = encoded(built(COUNTED, [typed(raw(spark, *things), SHAPE)]), COUNTED).collect()
        return int(next(bytes(header["value"]) for header in row["headers"] if header["key"] == "mark"))

    two = [thing(id=1, name="a"), thing(id=2, name="a")]
    (third,) = typed(raw(spark, *two, thing(id=3, name="a")), SHAPE).where("id = 3").selectExpr(MARK).collect()
    assert mark(*two, thing(id=3, name="a")) ^ mark(*two) == third[0]


def test_keys_of_any_type_are_json(spark: SparkSession) -> None:
    columns = "struct(1 AS a, 'x' AS b) AS s, cast(NULL AS STRING) AS n, 'q\"uote' AS t, 1.5D AS d, -7L AS l"
    frame = spark.sql(f"SELECT {columns}, cast(NULL AS INT) AS i")
    query = Query("q", (), "o", ("s", "n", "t", "d", "l", "i"), lambda frame: frame)
    (row,) = encoded(frame, query).collect()
    assert json.loads(bytes(row["key"])) == [{"a": 1, "b": "x"}, None, 'q"uote', 1.5, -7, None]


def test_a_row_of_one_record_keeps_its_origin(spark: SparkSession) -> None:
    query = Query("names", ("things",), "names", ("id",), lambda things: things.select("id", "name", "origin"))
    (row,) = encoded(built(query, [typed(raw(spark, thing(name="a")), SHAPE)]), query).collect()
    headers = {header["key"]: bytes(header["value"]) for header in row["headers"]}
    assert (headers["sender"], headers["seq"]) == (b"s", b"1")
    assert json.loads(bytes(row["value"])) == {"id": 1, "name": "a"}


def test_sql_is_a_query_too(spark: SparkSession) -> None:
    query = Query("q", ("things",), "o", ("name",), "SELECT name, sum(id) AS total, seen() FROM things GROUP BY name")
    frame = built(query, [typed(raw(spark, thing(id=4, name="b")), SHAPE)])
    (row,) = frame.collect()
    assert (row["name"], row["total"], row["seen"]["count"]) == ("b", 4, 1)


def test_a_key_that_the_result_lacks_is_named(spark: SparkSession) -> None:
    query = Query("counted", ("things",), "totals", ("nam",), counted)
    with pytest.raises(Misconfigured, match=r"query counted: its key has nam, and its result only name, total, seen"):
        encoded(built(query, [typed(raw(spark), SHAPE)]), query)


def test_a_query_that_returns_no_frame_is_named(spark: SparkSession) -> None:
    query = Query("q", ("things",), "o", ("id",), lambda things: 7)  # type: ignore[arg-type,return-value]
    with pytest.raises(Misconfigured, match="query q: it returns int; return a DataFrame"):
        built(query, [typed(raw(spark), SHAPE)])


def test_a_column_that_is_not_there_is_told_with_its_line(spark: SparkSession) -> None:
    query = Query("counted", ("things",), "o", ("id",), lambda things: things.where(F.col("nam") == "a"))
    with pytest.raises(Misconfigured, match=r"test_frames.py:\d+, query counted: .*`nam` cannot be resolved.*`name`"):
        built(query, [typed(raw(spark), SHAPE)])


def test_what_a_query_raises_is_told_with_its_line(spark: SparkSession) -> None:
    def broken(things: DataFrame) -> DataFrame:
        raise ValueError("boom")

    query = Query("broken", ("things",), "o", ("id",), broken)
    with pytest.raises(Misconfigured, match=r"test_frames.py:\d+, query broken: ValueError: boom"):
        built(query, [typed(raw(spark), SHAPE)])


def test_sql_that_cannot_be_read_is_told_with_its_place(spark: SparkSession) -> None:
    things = [typed(raw(spark), SHAPE)]
    query = Query("q", ("things",), "o", ("id",), "SELECT idd FROM things")
    with pytest.raises(Misconfigured, match=r"query q, line 1, column 8: .*`idd` cannot be resolved"):
        built(query, things)
    text = "-- key: id\nSELECT id, seen()\nFROM things\nGROP BY id"
    filed = Query("q", ("things",), "o", ("id",), text, file="a/q.sql")
    with pytest.raises(Misconfigured, match=r"a/q.sql:4, query q: Syntax error at or near 'BY'"):
        built(filed, things)


def test_a_channel_may_have_a_name_that_is_no_word(spark: SparkSession) -> None:
    query = Query("q", ("my-things.dead",), "o", ("id",), "SELECT id, origin FROM `my-things.dead`")
    assert built(query, [typed(raw(spark), SHAPE)]).columns == ["id", "origin"]


def test_an_event_time_that_cannot_be_computed_is_told_with_the_columns(spark: SparkSession) -> None:
    with pytest.raises(
        Misconfigured,
        match=r"channel things: its event time \(timestamp_millis\(att\)\) cannot .* use its columns: id, name",
    ):
        typed(raw(spark), Shape("things", DDL, "timestamp_millis(att)"))


def seen_by(spark: SparkSession, query: Query, shape: Shape, *values: bytes | None) -> list[tuple[Any, ...]]:
    """The ids that a gated query sees of these values, in order."""
    frame = query_input(raw(spark, *values), shape, query, gated=True)
    return sorted((row["id"], row["name"]) for row in frame.collect())


def test_a_query_sees_what_fits_and_what_it_wants(spark: SparkSession) -> None:
    values = [thing(id=1, name="a"), thing(id=2, name="b"), b"not JSON", thing(id=3)]
    for where in ("name = 'a'", lambda frame: frame["name"] == "a"):
        assert seen_by(spark, replace(COUNTED, where=where), SHAPE, *values) == [(1, "a")]
    assert len(seen_by(spark, COUNTED, SHAPE, *values)) == 3


def test_a_where_that_cannot_be_understood_is_told_with_its_query(spark: SparkSession) -> None:
    with pytest.raises(Misconfigured, match=r"query counted.*nmae"):
        seen_by(spark, replace(COUNTED, where="nmae = 'a'"), SHAPE, thing())
    with pytest.raises(Misconfigured, match="its where= gives bool"):
        seen_by(spark, replace(COUNTED, where=cast(Any, lambda frame: True)), SHAPE, thing())


@pytest.mark.parametrize(
    ("unique", "left"),
    [("number", 4), ("id", 2), ("payload", 3), (None, 4)],
)
def test_a_duplicate_is_what_the_channel_says(unique: str | None, left: int, spark: SparkSession) -> None:
    """Four records with numbers of their own; two ids, three payloads."""
    values = [thing(id=1, name="a"), thing(id=1, name="b"), thing(id=2, name="a"), thing(id=2, name="a")]
    assert len(seen_by(spark, COUNTED, replace(SHAPE, unique=unique), *values)) == left


def test_a_number_that_comes_twice_is_seen_once(spark: SparkSession) -> None:
    twice, shape = raw(spark, thing(id=1)).union(raw(spark, thing(id=1))), replace(SHAPE, unique="number")
    assert query_input(twice, shape, COUNTED, gated=True).count() == 1
    assert query_input(twice, shape, COUNTED, gated=False).count() == 2


TABLE = Shape("things", "id BIGINT NOT NULL, name STRING", table=True)


def keyed(spark: SparkSession, key: bytes | None, value: bytes | None) -> DataFrame:
    return spark.createDataFrame([(key, value, "things", 3, 7, NOW, 0, [])], RAW)


def test_a_row_of_a_table_has_its_key_and_needs_no_time(spark: SparkSession) -> None:
    (row,) = typed(keyed(spark, b"1", b'{"id": 1, "name": "a"}'), TABLE).collect()
    assert (row["_key"], row["_deleted"], row["id"], row["event_time"]) == ("1", False, 1, None)
    assert (row["origin"]["partition"], row["origin"]["offset"]) == (3, 7)


def test_a_record_of_a_table_without_a_value_deletes_its_row(spark: SparkSession) -> None:
    (row,) = typed(keyed(spark, b'["x"]', None), TABLE).collect()
    assert (row["_key"], row["_deleted"], row["id"]) == ("x", True, None)


@pytest.mark.parametrize(
    ("key", "text"),
    [(b'["a"]', "a"), (b"[7]", "7"), *((same, same.decode()) for same in (b"[null]", b"[]", b"[1,2]", b"["))],
)
def test_a_key_is_a_text_whatever_it_holds(spark: SparkSession, key: bytes, text: str) -> None:
    (row,) = typed(keyed(spark, key, b'{"id": 1}'), TABLE).collect()
    assert row["_key"] == text


def test_rows_of_a_table_are_not_remembered_by_their_time(spark: SparkSession) -> None:
    query = Query("q", ("things",), "o", ("name",), "", watermark=timedelta(seconds=1))
    with pytest.raises(Misconfigured, match=r"rows of the table things may have no time, .* leave out its watermark="):
        query_input(keyed(spark, b"1", None), replace(TABLE, unique="number"), query, gated=True)


@pytest.mark.parametrize("value", [b'{"id": 1}', None])
def test_a_record_of_a_table_without_a_key_is_refused_with_the_value_that_it_has(
    spark: SparkSession, value: bytes | None
) -> None:
    frame = keyed(spark, None, value)
    assert typed(frame, TABLE).collect() == []
    (letter,) = dead_letters(frame, TABLE).collect()
    assert letter["value"] == value
    headers = {header["key"]: bytes(header["value"]).decode() for header in letter["headers"]}
    assert headers["reason"] == "it has no key, and its channel is a table"


def test_a_row_that_is_deleted_has_no_value_and_a_version_knows_the_life_of_its_query(spark: SparkSession) -> None:
    gone = "named_struct('count', 3L, 'newest', 5L, 'deleted', true)"
    result = spark.sql(f"SELECT 'a' AS name, {gone} AS seen")
    (row,) = encoded(result, Query("q", (), "o", ("name",), ""), generation=2).collect()
    headers = {header["key"]: bytes(header["value"]).decode() for header in row["headers"]}
    assert (bytes(row["key"]), row["value"], headers["version"]) == (b'["a"]', None, str(2 * 2**44 + 3))


# Made while no session is there, as in a pipeline's own file.
shout = F.udf(lambda text: text.upper(), StringType())


def loud(things: DataFrame) -> DataFrame:
    return things.select(shout("name").alias("name"), "origin")


def around(function: Callable[..., object]) -> Callable[[DataFrame], DataFrame]:
    return lambda things: things.select(function("name").alias("name"), "origin")  # type: ignore[attr-defined]


def test_a_function_of_the_file_and_one_around_the_query_get_columns(spark: SparkSession) -> None:
    engine = Engine(
        spark, SparkSettings(), KafkaConnector("127.0.0.1:1"), "/nowhere", {"things": Shape("things", "name STRING")}
    )
    pickled = F.udf(lambda text: text.upper(), "string", useArrow=False)
    for build in (loud, around(pickled)):
        query = Query("loud", ("things",), "loud", ("name",), build)
        assert "ArrowEvalPython" in operators(engine.frame(query, lambda _: empty_stream(spark)))


def test_settings_of_spark_can_forbid_it(spark: SparkSession) -> None:
    pickled = F.udf(lambda text: text.upper(), "string", useArrow=False)
    setting = "spark.sql.execution.pythonUDF.arrow.enabled"
    spark.conf.set(setting, "false")
    try:
        query = Query("loud", ("things",), "loud", ("name",), around(pickled))
        frame = spark.createDataFrame([("a", 1)], "name STRING, origin INT")
        assert "BatchEvalPython" in operators(built(query, [frame]))
    finally:
        spark.conf.set(setting, "true")


def test_the_function_still_works(spark: SparkSession) -> None:
    # Of the library: workers cannot import the module of a test.
    upper = F.udf(str.upper, "string", useArrow=False)
    query = Query("loud", ("things",), "loud", ("name",), around(upper))
    frame = spark.createDataFrame([("a", 1)], "name STRING, origin INT").coalesce(1)
    assert [row["name"] for row in built(query, [frame]).collect()] == ["A"]


def spelled(text: str) -> Spelled:
    return Spelled.out(text, lambda names: f"<{'+'.join(names)}>")


@pytest.mark.parametrize(
    ("own", "text"),
    [
        ("SELECT a, seen() FROM t", "SELECT a, <> FROM t"),
        ("SELECT SEEN( ) as Seen FROM t", "SELECT <> FROM t"),
        ("SELECT seen(i), seen(i, c)", "SELECT <i>, <i+c>"),
        ("SELECT 'seen()', \"seen()\", `seen()` -- seen()\n/* seen() */", None),
        ("SELECT overseen(), f.seen(), seen FROM t", None),
    ],
)
def test_seen_is_spelled_out_where_it_is_a_word_of_its_own(own: str, text: str | None) -> None:
    assert spelled(own).text == (own if text is None else text)


@pytest.mark.parametrize(
    ("said", "location"),
    [
        ("Syntax error (line 1, pos 0)", (1, 1)),
        ("unresolved; line 2 pos 2;", (2, 3)),
        ("within what was put in; line 1 pos 11", (1, 11)),
        ("behind it on the same line; line 1 pos 15", (1, 20)),
        ("behind the second; line 2 pos 5", (2, 10)),
        ("nothing of a position", None),
    ],
)
def test_a_position_of_sparks_is_told_in_the_users_text(said: str, location: tuple[int, int] | None) -> None:
    # 1: SELECT a, seen(x), b     2: , seen() c
    assert spelled("SELECT a, seen(x), b\n, seen() c").location(said) == location

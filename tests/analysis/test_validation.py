"""What is JSON and what fits, on a real Spark: the same for queries, accounts and dead letters."""

from datetime import UTC, datetime

import pytest
from pyspark.sql import DataFrame, SparkSession

from penstock.analysis.frames import RAW, dead_letters, outcome_counts, typed, validated
from penstock.analysis.query import Query, Shape
from penstock.testing.sources import DOCUMENTS

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def raw(spark: SparkSession, *values: bytes | None) -> DataFrame:
    headers = [("sender", b"s"), ("epoch", b"1")]
    rows = [
        (b"k", value, "things", 0, at, NOW, 0, [*headers, ("seq", b"%d" % at), ("time", b"1767323045000000")])
        for at, value in enumerate(values)
    ]
    return spark.createDataFrame(rows, RAW).coalesce(1).cache()


def split(spark: SparkSession, shape: Shape, *values: bytes | None) -> tuple[set[int], dict[int, str]]:
    """The offsets of what a query sees, and the reasons of what is in the dead letters; the account says the same."""
    frame = raw(spark, *values)
    seen = {row["offset"] for row in typed(frame, shape).select("origin.offset").collect()}
    dead: dict[int, str] = {}
    for row in dead_letters(frame, shape).collect():
        told = {header["key"]: bytes(header["value"]).decode() for header in row["headers"]}
        dead[int(told["place"].split(":")[2])] = told["reason"]
    query = Query("q", ("things",), "into", ("k",), "SELECT 1")
    (counted,) = validated(frame, shape, query).agg(*outcome_counts()).collect()
    assert (counted["taken"], counted["refused"]) == (len(values), len(dead))
    assert seen | dead.keys() == set(range(len(values)))
    assert not seen & dead.keys()
    return seen, dead


@pytest.mark.parametrize("ddl", ["v STRING", "other BIGINT"], ids=["declared", "undeclared"])
def test_what_rfc_8259_allows_is_taken_and_nothing_else(spark: SparkSession, ddl: str) -> None:
    seen, _ = split(spark, Shape("things", ddl), *(one.payload for one in DOCUMENTS))
    assert [one.name for at, one in enumerate(DOCUMENTS) if (at in seen) != one.accepted] == []
    assert len({one.name for one in DOCUMENTS}) == len(DOCUMENTS)


FOUND = {
    "two objects": b'{"v":1}{"v":2}',
    "a word": b'{"v":1} x',
    "a brace": b'{"v":1}}',
    "a comma": b'{"v":1},',
    "a null byte": b'{"v":1}\x00',
    "a comment": b'{"v":1}/* c */',
}


@pytest.mark.parametrize("value", FOUND.values(), ids=list(FOUND))
def test_what_follows_an_object_is_not_lost_but_refused(spark: SparkSession, value: bytes) -> None:
    assert split(spark, Shape("things", "v BIGINT"), value) == (set(), {0: "something follows the JSON object"})


NUMBERS = {
    "NaN": b'{"v":NaN}',
    "Infinity": b'{"v":Infinity}',
    "NaN as text": b'{"v":"NaN"}',
    "400 digits": b'{"v":' + b"9" * 400 + b"}",
    "a large exponent": b'{"v":1e400}',
    "5,000 digits": b'{"v":0.' + b"1" * 5_000 + b"}",
}


@pytest.mark.parametrize("ddl", ["v DOUBLE", "v FLOAT", "v BIGINT", "v ARRAY<DOUBLE>", "v STRUCT<a: DOUBLE>"])
def test_a_number_that_the_column_cannot_hold_is_refused(spark: SparkSession, ddl: str) -> None:
    wrap = {"v ARRAY<DOUBLE>": b"[%s]", "v STRUCT<a: DOUBLE>": b'{"a":%s}'}.get(ddl, b"%s")
    values = [b'{"v":%s}' % (wrap % value[5:-1]) for value in NUMBERS.values()]
    assert split(spark, Shape("things", ddl), *values, b'{"v":%s}' % (wrap % b"1"))[0] == {len(values)}


@pytest.mark.parametrize(
    ("ddl", "least", "most"),
    [
        ("TINYINT", -128, 127),
        ("SMALLINT", -32_768, 32_767),
        ("INT", -(2**31), 2**31 - 1),
        ("BIGINT", -(2**63), 2**63 - 1),
    ],
)
def test_an_integer_beyond_its_type_is_refused(spark: SparkSession, ddl: str, least: int, most: int) -> None:
    values = [b'{"v":%d}' % number for number in (least, most, least - 1, most + 1)]
    assert split(spark, Shape("things", f"v {ddl}"), *values)[0] == {0, 1}
    rows = typed(raw(spark, *values[:2]), Shape("things", f"v {ddl}")).collect()
    assert [row["v"] for row in rows] == [least, most]


def test_a_tinyint_within_others_is_judged_too(spark: SparkSession) -> None:
    shape = Shape("things", "v STRUCT<a: ARRAY<TINYINT>, m: MAP<STRING, TINYINT>>")
    values = [b'{"v":{"a":[1,null,%d],"m":{"k":%d}}}' % one for one in ((127, 127), (128, 127), (127, 128))]
    assert split(spark, shape, *values)[0] == {0}
    (row,) = typed(raw(spark, values[0]), shape).collect()
    assert (row["v"]["a"], row["v"]["m"]) == ([1, None, 127], {"k": 127})


def test_a_decimal_beyond_its_digits_is_refused(spark: SparkSession) -> None:
    shape = Shape("things", "v DECIMAL(3,1)")
    assert split(spark, shape, b'{"v":99.9}', b'{"v":100.0}', b'{"v":1.25}')[0] == {0, 2}


def test_of_a_member_that_is_there_twice_the_last_counts(spark: SparkSession) -> None:
    (row,) = typed(raw(spark, b'{"v":1,"v":2}'), Shape("things", "v BIGINT")).collect()
    assert row["v"] == 2


def test_a_map_with_a_key_twice_is_refused(spark: SparkSession) -> None:
    shape = Shape("things", "v MAP<STRING, BIGINT>")
    assert split(spark, shape, b'{"v":{"a":1,"a":2}}', b'{"v":{"a":1,"b":2}}', b'{"v":{}}', b"{}")[0] == {1, 2, 3}


def test_bytes_that_are_no_utf8_are_refused_and_kept(spark: SparkSession) -> None:
    shape, value = Shape("things", "v STRING"), b'{"v":"caf\xe9"}'
    assert split(spark, shape, value) == (set(), {0: "it is not UTF-8"})
    assert [bytes(row["value"]) for row in dead_letters(raw(spark, value), shape).collect()] == [value]


def test_a_lenient_channel_takes_what_spark_reads(spark: SparkSession) -> None:
    values = [*FOUND.values(), b'{"v":NaN}', b"{'v':1}", b'{"v":1,"t":"\xff"}', b'{"v":1e400}']
    shape = Shape("things", "v DOUBLE, t STRING", json="lenient")
    seen, dead = split(spark, shape, *values, b'{"v":"x"}', b"[]")
    assert seen == set(range(len(values)))
    assert list(dead.values()) == ['the field "v" is not double', "it is not a JSON object"]

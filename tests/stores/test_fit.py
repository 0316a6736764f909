"""The verdicts in these tables are those of Spark 4.3's from_json, as it gave them."""

import datetime
import json
import math
from decimal import Decimal
from typing import Any

import pytest

from penstock.errors import Refused
from penstock.stores.ddl import schema_of
from penstock.stores.fit import fitting


def fitted(kind: str, payload: bytes | None) -> Any:
    return fitting(schema_of(f"a {kind}"))(payload)["a"]


def micros(year: int, month: int, day: int, hour: int = 0, minute: int = 0, second: int = 0) -> int:
    return int(datetime.datetime(year, month, day, hour, minute, second, tzinfo=datetime.UTC).timestamp()) * 1_000_000


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("BIGINT", b"1", 1),
        ("BIGINT", b"-0", 0),
        ("BIGINT", b"-9223372036854775808", -(2**63)),
        ("BIGINT", b"null", None),
        ("INT", b"2147483647", 2**31 - 1),
        ("SMALLINT", b"32767", 32767),
        ("TINYINT", b"127", 127),
        ("DOUBLE", b"1", 1.0),
        ("DOUBLE", b"1.5", 1.5),
        ("DOUBLE", b"1e400", math.inf),
        ("DOUBLE", b"Infinity", math.inf),
        ("DOUBLE", b'"+INF"', math.inf),
        ("DOUBLE", b'"-Infinity"', -math.inf),
        ("DOUBLE", b"123456789012345678901234567890", 1.2345678901234568e29),
        ("STRING", b'"x"', "x"),
        ("STRING", b'""', ""),
        ("STRING", b"1", "1"),
        ("STRING", b"1e3", "1000.0"),
        ("STRING", b"true", "true"),
        ("STRING", b'{"b" : 1}', '{"b":1}'),
        ("STRING", b"[1, 2]", "[1,2]"),
        ("STRING", b'"\\u0000"', "\x00"),
        ("STRING", b'"\\ud800"', "?"),
        ("STRING", b'"\xff"', "�"),
        ("BOOLEAN", b"true", True),
        ("TIMESTAMP", b'"2024-01-02T03:04:05Z"', micros(2024, 1, 2, 3, 4, 5)),
        ("TIMESTAMP", b'"2024-01-02T03:04:05.123456789Z"', micros(2024, 1, 2, 3, 4, 5) + 123_456),
        ("TIMESTAMP", b'"2024-01-02T03:04:05.5+02:00"', micros(2024, 1, 2, 1, 4, 5) + 500_000),
        ("TIMESTAMP", b'"2024-01-02T03:04:05-0230"', micros(2024, 1, 2, 5, 34, 5)),
        ("TIMESTAMP", b'"2024-01-02 03:04:05"', micros(2024, 1, 2, 3, 4, 5)),
        ("TIMESTAMP", b'"2024-01-02T03:04:05 UTC"', micros(2024, 1, 2, 3, 4, 5)),
        ("TIMESTAMP", b'"2024-01-02T03:04"', micros(2024, 1, 2, 3, 4)),
        ("TIMESTAMP", b'" 2024-1-2"', micros(2024, 1, 2)),
        ("TIMESTAMP", b'"2024-01"', micros(2024, 1, 1)),
        ("TIMESTAMP", b'"2024"', micros(2024, 1, 1)),
        ("TIMESTAMP", b"1700000000", 1_700_000_000_000_000),
        ("TIMESTAMP", b"-1", -1_000_000),
        ("TIMESTAMP_NTZ", b'"2024-01-02T03:04:05"', micros(2024, 1, 2, 3, 4, 5)),
        ("DATE", b'"2024-01-02"', datetime.date(2024, 1, 2)),
        ("DATE", b'"2024-1-2"', datetime.date(2024, 1, 2)),
        ("DATE", b'"2024-01-02T03:04:05Z"', datetime.date(2024, 1, 2)),
        ("BINARY", b'"eA=="', b"x"),
        ("BINARY", b'""', b""),
        ("DECIMAL(5,2)", b"1", Decimal("1.00")),
        ("DECIMAL(5,2)", b"1.005", Decimal("1.01")),
        ("DECIMAL(5,2)", b"999.99", Decimal("999.99")),
        ("DECIMAL(5,2)", b'"1.5"', Decimal("1.50")),
        ("DECIMAL(5,2)", b"1e2", Decimal("100.00")),
        ("ARRAY<INT>", b"[1, null]", [1, None]),
        ("ARRAY<INT>", b"[]", []),
        ("MAP<STRING, INT>", b'{"x": 1, "y": null}', [("x", 1), ("y", None)]),
        ("STRUCT<b: INT NOT NULL, c: STRING>", b'{"b": 1, "z": 2}', {"b": 1, "c": None}),
        ("STRUCT<b: INT NOT NULL, c: STRING>", b"{}", {"b": None, "c": None}),
        ("ARRAY<STRUCT<b: INT>>", b'[{"b": 1}, null]', [{"b": 1}, None]),
    ],
)
def test_what_spark_takes_fits(kind: str, value: bytes, expected: object) -> None:
    assert fitted(kind, b'{"a": %s}' % value) == expected


@pytest.mark.parametrize("value", [b'"NaN"', b"NaN"])
def test_not_a_number_is_a_double(value: bytes) -> None:
    assert math.isnan(fitted("DOUBLE", b'{"a": %s}' % value))


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("BIGINT", [b"1.0", b'"1"', b"9223372036854775808", b"true", b'""', b"1e2", b"[1]", b"{}"]),
        ("INT", [b"2147483648", b"-2147483649"]),
        ("SMALLINT", [b"32768"]),
        ("TINYINT", [b"256", b"-129"]),
        ("DOUBLE", [b'"1.5"', b'"INF"', b"true", b'""']),
        ("BOOLEAN", [b'"true"', b"1"]),
        (
            "TIMESTAMP",
            [
                b"1700000000.5",
                b'"soon"',
                b'"20240102"',
                b'"2024-13-01"',
                b'"1700000000"',
                b'"2024-W01"',
                b'""',
                b"true",
            ],
        ),
        ("TIMESTAMP_NTZ", [b'"2024-01-02T03:04:05Z"', b"1700000000"]),
        ("DATE", [b"19000", b'"2024-02-30"']),
        ("BINARY", [b'"eA"', b'"?"', b"1", b'"e A=="']),
        ("DECIMAL(5,2)", [b"999.995", b"1000", b'"x"', b'"1,000.5"', b'""', b'" 1"', b"true", b'"NaN"']),
        ("ARRAY<INT>", [b'[1, "x"]', b"1", b"{}"]),
        ("MAP<STRING, INT>", [b'{"x": "1"}', b"[]"]),
        ("STRUCT<b: INT>", [b'{"b": "x"}', b"[]", b'[{"b": 1}]', b'""']),
        ("ARRAY<STRUCT<b: INT>>", [b'[{"b": "x"}]', b'{"b": 1}']),
    ],
)
def test_what_spark_sends_to_the_dead_letters_is_refused(kind: str, values: list[bytes]) -> None:
    for value in values:
        with pytest.raises(Refused, match='the field "a" is not'):
            fitted(kind, b'{"a": %s}' % value)


@pytest.mark.parametrize(
    "payload",
    [
        b' {"a":1} ',
        b'{"a":1} x',
        b'{"a":1}{"a":2}',
        b'{"a":2,"a":1}',
        b'{"a":1}\x00',
        b'{"b":1e400,"a":1}',
        b'{"b":NaN,"a":1}',
        b'{"b":"\xff","a":1}',
        b'{"b":"\\ud800","a":1}',
        b'{"b":123456789012345678901234567890,"a":1}',
        b'{"b":' + b"[" * 600 + b"]" * 600 + b',"a":1}',
        b"{" + b",".join(b'"k%d":0' % n for n in range(100_000)) + b',"a":1}',
    ],
)
def test_odd_documents_that_spark_reads_are_read(payload: bytes) -> None:
    assert fitted("BIGINT", payload) == 1


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (None, "the value is null"),
        (b"", "it is not JSON"),
        (b" ", "it is not JSON"),
        (b"null", "it is not a JSON object"),
        (b"1", "it is not a JSON object"),
        (b'[{"a":1}]', "it is not a JSON object"),
        (b"{a:1}", "it is not JSON"),
        (b'{"a":01}', "it is not JSON"),
        (b'{"a":+1}', "it is not JSON"),
        (b'{"a":1,}', "it is not JSON"),
        (b'{"a":1', "it is not JSON"),
        (b'{"b":"\n","a":1}', "it is not JSON"),
        (b'{"b":"\\x","a":1}', "it is not JSON"),
        (b'\xef\xbb\xbf{"a":1}', "it is not JSON"),
        (b"\xff\x00", "it is not JSON"),
        (b'{"b":' + b"[" * 100_000, "it is not JSON"),
        (b'{"b":' + b"[" * 1_100 + b"]" * 1_100 + b',"a":1}', "it is not JSON"),
    ],
)
def test_documents_that_spark_cannot_read_are_refused(payload: bytes | None, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        fitted("BIGINT", payload)


def test_a_column_that_must_be_there_must_be_there() -> None:
    fit = fitting(schema_of("a BIGINT NOT NULL, b STRING"))
    assert fit(b'{"a": 1}') == {"a": 1, "b": None}
    for payload in (b'{"b": "x"}', b'{"a": null}', b'{"A": 1}'):
        with pytest.raises(Refused, match='the field "a" is missing'):
            fit(payload)


def test_fields_that_the_schema_does_not_name_are_left_out() -> None:
    assert fitting(schema_of("a BIGINT"))(json.dumps({"a": 1, "z": [1]}).encode()) == {"a": 1}


@pytest.mark.parametrize("value", [b"[" * 300 + b"]" * 300, b"123456789012345678901234567890"])
def test_what_cannot_be_written_as_text_is_refused_and_stops_nobody(value: bytes) -> None:
    with pytest.raises(Refused, match='the field "name" is not string'):
        fitting(schema_of("name STRING, x DOUBLE"))(b'{"name": ' + value + b', "x": NaN}')

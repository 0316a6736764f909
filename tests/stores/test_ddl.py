import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pytest

from penstock.errors import Misconfigured
from penstock.stores.ddl import schema_of

UTC_MICROS = pa.timestamp("us", tz="UTC")


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("BIGINT", pa.int64()),
        ("long", pa.int64()),
        ("INT", pa.int32()),
        ("integer", pa.int32()),
        ("SMALLINT", pa.int16()),
        ("TINYINT", pa.int8()),
        ("DOUBLE", pa.float64()),
        ("float", pa.float32()),
        ("STRING", pa.string()),
        ("VARCHAR(20)", pa.string()),
        ("BOOLEAN", pa.bool_()),
        ("BINARY", pa.binary()),
        ("DATE", pa.date32()),
        ("TIMESTAMP", UTC_MICROS),
        ("TIMESTAMP_NTZ", pa.timestamp("us")),
        ("DECIMAL", pa.decimal128(10, 0)),
        ("DECIMAL(5)", pa.decimal128(5, 0)),
        ("decimal(38, 18)", pa.decimal128(38, 18)),
        ("ARRAY<INT>", pa.list_(pa.int32())),
        ("MAP<STRING, ARRAY<BIGINT>>", pa.map_(pa.string(), pa.list_(pa.int64()))),
        ("STRUCT<a: INT, `b c`: STRING>", pa.struct([("a", pa.int32()), ("b c", pa.string())])),
    ],
)
def test_a_type_of_spark_has_a_type_of_arrow(word: str, kind: pa.DataType) -> None:
    assert schema_of(f"x {word}") == pa.schema([pa.field("x", kind)])


def test_columns_may_be_required_named_in_backquotes_and_commented() -> None:
    schema = schema_of("id BIGINT NOT NULL COMMENT 'it''s', `a``b, c` STRING,\n  when: TIMESTAMP not null")
    assert schema.names == ["id", "a`b, c", "when"]
    assert [column.nullable for column in schema] == [False, True, False]


def test_what_is_inside_of_a_column_may_always_be_absent() -> None:
    (column,) = schema_of("venue STRUCT<id: BIGINT NOT NULL, name: STRING> NOT NULL")
    assert not column.nullable
    assert all(field.nullable for field in column.type)


def test_the_rsvp_document_can_be_described() -> None:
    schema = schema_of(
        "rsvp_id BIGINT NOT NULL, response STRING, guests INT, venue STRUCT<lat: DOUBLE, lon: DOUBLE>, "
        "group STRUCT<group_id: BIGINT, group_topics: ARRAY<STRUCT<urlkey: STRING, topic_name: STRING>>>"
    )
    assert schema.field("group").type.field("group_topics").type.value_type.field("urlkey").type == pa.string()


@pytest.mark.parametrize(
    ("ddl", "problem"),
    [
        ("", "a name is expected where the end stands"),
        ("a", "the end is not a type"),
        ("a NUMBER", '"NUMBER" is not a type that a lake can hold'),
        ("a INT b INT", '"," is expected where "B" stands'),
        ("a INT,", "a name is expected where the end stands"),
        ("a ARRAY<INT", '">" is expected where the end stands'),
        ("a ARRAY", '"<" is expected where the end stands'),
        ("a INT>", '"," is expected where ">" stands'),
        ("a MAP<INT, INT>", "the keys of a map in JSON are STRING"),
        ("a DECIMAL(39)", "at most 38 digits"),
        ("a DECIMAL(5,6)", "not more behind the point"),
        ("a DECIMAL(x)", "cannot be"),
        ("a INT, a INT", '"a" is there twice'),
        ("a INT; DROP", "it cannot be read from"),
        ("a STRUCT<>", "a name is expected"),
    ],
)
def test_a_schema_that_cannot_be_read_is_answered_with_the_place(ddl: str, problem: str) -> None:
    with pytest.raises(Misconfigured) as caught:
        schema_of(ddl)
    assert problem in str(caught.value)
    assert str(caught.value).startswith("the schema ")

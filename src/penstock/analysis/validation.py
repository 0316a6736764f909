"""Whether a payload is JSON and fits its schema: one expression for queries, the lake and the dead letters.

Spark's `from_json` reads the first value of a text and ignores the rest. To see the end, the last brace of the payload
is replaced by one more member and a brace. The parser finds this member only if the payload is one object and nothing
else. So the whole payload is checked without parsing it twice.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from uuid import uuid4

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    ByteType,
    DataType,
    DoubleType,
    FloatType,
    MapType,
    ShortType,
    StructField,
    StructType,
)

from penstock.analysis.query import Json

CORRUPT = "_corrupt"
_WHOLE = str(uuid4())
"""The name of the added member. It is random, so no payload can contain it; fingerprints of plans leave it out."""
_BYTE = ByteType()
_TEXT = "CAST(value AS STRING)"
_BLANKS = (" ", r"\t", r"\r", r"\n")
"""As they are written in SQL."""
_EMPTY = r"^[ \t\r\n]*\{[ \t\r\n]*\}[ \t\r\n]*$"
_LENIENT = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": CORRUPT}
_STRICT = {
    **_LENIENT,
    "allowSingleQuotes": "false",
    "allowNonNumericNumbers": "false",
    "allowComments": "false",
    "allowUnquotedFieldNames": "false",
    "allowUnquotedControlChars": "false",
    "allowNumericLeadingZeros": "false",
    "allowBackslashEscapingAnyCharacter": "false",
}


def parsed(schema: StructType, json: Json) -> Column:
    """The column `value` as a struct of the schema's columns; whether it fits is for `objections` to say."""
    columns = StructType([StructField(column.name, optional(column.dataType, ShortType())) for column in schema])
    return _read(columns, json)


def declared(column: Column, kind: DataType) -> Column:
    """A column of what was parsed, with the type that its schema declares."""
    return column if optional(kind, ShortType()) == optional(kind) else column.try_cast(optional(kind))


def payload(schema: StructType) -> list[Column]:
    """The columns of a schema, from a payload that was parsed as the column `doc`."""
    return [declared(F.col(f"doc.`{one.name}`"), one.dataType).alias(one.name) for one in schema]


def optional(kind: DataType, byte: DataType = _BYTE) -> DataType:
    """A type as the parser gives it: NOT NULL holds for columns, not inside of them.

    `byte` replaces TINYINT, because the parser wraps 128 to 255.
    """
    match kind:
        case ByteType():
            return byte
        case StructType():
            return StructType([StructField(field.name, optional(field.dataType, byte)) for field in kind])
        case ArrayType():
            return ArrayType(optional(kind.elementType, byte))
        case MapType():
            return MapType(kind.keyType, optional(kind.valueType, byte))
    return kind


Objection = tuple[Column, Callable[[], Column]]
"""A condition, and the reason. The reason is made on demand: Spark takes long to make one, and queries need none."""


def because(condition: Column, reason: str) -> Objection:
    return condition, lambda: F.lit(reason)


def first_reason(objections: Sequence[Objection]) -> Column:
    """The reason of the first condition that is true; null when none is."""
    reason = F.lit(None).cast("string")
    for condition, description in reversed(objections):
        reason = F.when(condition, description()).otherwise(reason)
    return reason


def objections(doc: Column, schema: StructType, json: Json) -> list[Objection]:
    """Why a payload does not fit its schema, given what was parsed: conditions in order, and the reason for each."""
    found = [
        because(~_starts(), "it is not a JSON object"),
        (~_sound(doc, json), lambda: what_is_wrong(schema, json)),
    ]
    if json == "strict":
        text = F.expr(_TEXT)
        found.insert(0, because(~F.is_valid_utf8(text), "it is not UTF-8"))
        found.append(because(_half_surrogate(text), "it has half of a surrogate pair"))
    for column in schema:
        if (beyond := _beyond(doc[column.name], column.dataType, json)) is not None:
            reason = f'the field "{column.name}" holds what {_type(column)} cannot hold'
            found.append(because(F.coalesce(beyond, F.lit(False)), reason))
    found += [
        because(doc[column.name].isNull(), f'the field "{column.name}" is missing or null')
        for column in schema
        if not column.nullable
    ]
    return found


def what_is_wrong(schema: StructType, json: Json) -> Column:
    """Why a payload cannot be parsed: its syntax, what follows it, or the first field of another type."""
    syntax = F.from_json(F.expr(_TEXT), StructType().add(CORRUPT, "string"), _LENIENT if json == "lenient" else _STRICT)
    wrong = [
        F.when(
            ~_sound(_read(StructType().add(column.name, column.dataType), json), json),
            F.lit(f'the field "{column.name}" is not {_type(column)}'),
        )
        for column in schema
    ]
    return (
        F.when(syntax[CORRUPT].isNotNull(), F.lit("it is not JSON"))
        .when(~_sound(_read(StructType(), json), json), F.lit("something follows the JSON object"))
        .otherwise(F.coalesce(*wrong, F.lit("it does not fit the schema")))
    )


def _read(columns: StructType, json: Json) -> Column:
    added = StructType(columns.fields).add(CORRUPT, "string")
    if json == "lenient":
        return F.from_json(F.expr(_TEXT), added, _LENIENT)
    return F.from_json(_marked(), added.add(_WHOLE, "boolean"), _STRICT)


def _sound(doc: Column, json: Json) -> Column:
    sound = doc.isNotNull() & doc[CORRUPT].isNull()
    return sound if json == "lenient" else sound & doc[_WHOLE].isNotNull()


def _marked() -> Column:
    """The payload with the added member at its end; as it is when it does not end with a brace.

    One SQL text: each PySpark function call is several messages to the JVM, and every query needs this.
    """

    def marked(whole: str) -> str:
        body = f"substring(CAST({whole} AS BINARY), 1, octet_length({whole}) - 1)"
        # A suffix is compared at once; only a payload that may be empty is matched as a whole.
        blank = " OR ".join(f"endswith({whole}, '{before}}}')" for before in ("{", *_BLANKS))
        member = f'"{_WHOLE}":true}}'
        end = f"CASE WHEN ({blank}) AND {whole} RLIKE r'{_EMPTY}' THEN '{member}' ELSE ',{member}' END"
        return f"CAST(concat({body}, CAST({end} AS BINARY)) AS STRING)"

    trimmed = f"rtrim('{''.join(_BLANKS)}', {_TEXT})"
    return F.expr(
        f"CASE WHEN endswith({_TEXT}, '}}') THEN {marked(_TEXT)}"
        f" WHEN endswith({trimmed}, '}}') THEN {marked(trimmed)} ELSE {_TEXT} END"
    )


def _starts() -> Column:
    return F.expr(f"startswith({_TEXT}, '{{') OR startswith(ltrim('{''.join(_BLANKS)}', {_TEXT}), '{{')")


def _half_surrogate(text: Column) -> Column:
    """Whether an escape names half of a character beyond the basic plane: no text can hold it."""
    others = F.regexp_replace(text, r"\\[^u]", "")
    single = F.regexp_replace(others, r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..", "")
    return (text.contains(r"\ud") | text.contains(r"\uD")) & single.rlike(r"\\u[dD][89a-fA-F]")


def _beyond(column: Column, kind: DataType, json: Json) -> Column | None:
    """Whether a value differs from the payload: a number beyond its type, a map with a key twice."""
    match kind:
        case ByteType():
            return ~column.between(-128, 127)
        case DoubleType() | FloatType():
            return F.abs(column) == float("inf") if json == "strict" else None
        case StructType():
            inner = [_beyond(column[field.name], field.dataType, json) for field in kind]
            some = [F.coalesce(one, F.lit(False)) for one in inner if one is not None]
            return reduce(or_, some) if some else None
        case ArrayType():
            return _any(column, kind.elementType, json)
        case MapType():
            values = _any(F.map_values(column), kind.valueType, json)
            twice = F.size(F.array_distinct(F.map_keys(column))) < F.size(column)
            return twice if values is None else twice | values
    return None


def _any(items: Column, kind: DataType, json: Json) -> Column | None:
    if _beyond(F.lit(None), kind, json) is None:
        return None

    def beyond(item: Column) -> Column:
        found = _beyond(item, kind, json)
        assert found is not None
        return F.coalesce(found, F.lit(False))

    return F.exists(items, beyond)


def _type(column: StructField) -> str:
    return column.dataType.simpleString()[:60]

"""A schema in the words of Spark's DDL, as an Arrow schema."""

import re

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types

from penstock.errors import Misconfigured

_SIMPLE = {
    "BOOLEAN": pa.bool_(),
    "TINYINT": pa.int8(),
    "BYTE": pa.int8(),
    "SMALLINT": pa.int16(),
    "SHORT": pa.int16(),
    "INT": pa.int32(),
    "INTEGER": pa.int32(),
    "BIGINT": pa.int64(),
    "LONG": pa.int64(),
    "FLOAT": pa.float32(),
    "REAL": pa.float32(),
    "DOUBLE": pa.float64(),
    "STRING": pa.string(),
    "BINARY": pa.binary(),
    "DATE": pa.date32(),
    "TIMESTAMP": pa.timestamp("us", tz="UTC"),
    "TIMESTAMP_LTZ": pa.timestamp("us", tz="UTC"),
    "TIMESTAMP_NTZ": pa.timestamp("us"),
}
_DECIMAL = ("DECIMAL", "DEC", "NUMERIC")
_TOKEN = re.compile(r"\s*(`(?:[^`]|``)+`|'(?:[^'\\]|\\.|'')*'|\w+|[<>(),:])")


def schema_of(ddl: str) -> pa.Schema:
    """The columns. `NOT NULL` holds for columns and not inside of them: so it is with Spark's from_json, too."""
    words = _Words(ddl)
    columns = _columns(words, "")
    words.take("")
    return pa.schema(columns)


class _Words:
    """The words of a DDL, one after the other."""

    def __init__(self, ddl: str) -> None:
        self._ddl = ddl
        self._words: list[str] = []
        at = 0
        while ddl[at:].strip():
            match = _TOKEN.match(ddl, at)
            if not match:
                raise self.wrong(f"it cannot be read from {ddl[at : at + 20].strip()!r} on")
            self._words.append(match[1])
            at = match.end()
        self._at = 0

    @property
    def next(self) -> str:
        """The word that comes, in capitals; empty at the end."""
        return self._words[self._at].upper() if self._at < len(self._words) else ""

    def pop(self) -> str:
        word = self._words[self._at] if self._at < len(self._words) else ""
        self._at += 1
        return word

    def take(self, *expected: str) -> None:
        for word in expected:
            if self.next != word:
                raise self.wrong(f"{_quoted(word)} is expected where {_quoted(self.next)} stands")
            self.pop()

    def took(self, *words: str) -> bool:
        """Take these words if they come."""
        coming = [word.upper() for word in self._words[self._at : self._at + len(words)]]
        if coming != list(words):
            return False
        self._at += len(words)
        return True

    def wrong(self, problem: str) -> Misconfigured:
        shown = self._ddl if len(self._ddl) < 80 else f"{self._ddl[:77]}…"
        return Misconfigured(f'the schema "{shown}"', problem, 'write it as "name TYPE, name TYPE NOT NULL"')


def _columns(words: _Words, end: str) -> list[pa.Field]:
    columns: list[pa.Field] = []
    while words.next != end or not columns:
        if columns:
            words.take(",")
        name = _name(words)
        words.took(":")
        kind = _type(words)
        required = words.took("NOT", "NULL")
        if words.took("COMMENT"):
            words.pop()
        if name in [column.name for column in columns]:
            raise words.wrong(f'"{name}" is there twice')
        columns.append(pa.field(name, kind, nullable=bool(end) or not required))
    return columns


def _name(words: _Words) -> str:
    word = words.pop()
    if word.startswith("`"):
        return word[1:-1].replace("``", "`")
    if not re.fullmatch(r"\w+", word):
        raise words.wrong(f"a name is expected where {_quoted(word)} stands")
    return word


def _type(words: _Words) -> pa.DataType:
    word = words.pop().upper()
    if word in _SIMPLE:
        return _SIMPLE[word]
    if word in _DECIMAL:
        return _decimal(words)
    if word in ("VARCHAR", "CHAR", "CHARACTER"):
        words.take("(")
        words.pop()
        words.take(")")
        return pa.string()
    if word == "ARRAY":
        words.take("<")
        item = _type(words)
        words.take(">")
        return pa.list_(item)
    if word == "MAP":
        words.take("<")
        if not pa.types.is_string(_type(words)):
            raise words.wrong("the keys of a map in JSON are STRING")
        words.take(",")
        item = _type(words)
        words.take(">")
        return pa.map_(pa.string(), item)
    if word == "STRUCT":
        words.take("<")
        fields = _columns(words, ">")
        words.take(">")
        return pa.struct(fields)
    raise words.wrong(f"{_quoted(word)} is not a type that a lake can hold")


def _decimal(words: _Words) -> pa.DataType:
    precision, scale = "10", "0"
    if words.took("("):
        precision = words.pop()
        if words.took(","):
            scale = words.pop()
        words.take(")")
    if not (precision.isdecimal() and scale.isdecimal() and int(scale) <= int(precision) and 1 <= int(precision) <= 38):
        raise words.wrong(f"DECIMAL({precision},{scale}) cannot be: at most 38 digits, not more behind the point")
    return pa.decimal128(int(precision), int(scale))


def _quoted(word: str) -> str:
    return f'"{word}"' if word else "the end"

"""Records as JSON: decodes request bodies, encodes responses.

A body with one bad record is rejected whole, with the place of that record.
"""

import base64
import binascii
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NoReturn

import orjson

from penstock.core.clock import Micros
from penstock.core.contracts import ChannelPartition, Entry
from penstock.core.record import Headers, Origin, Record
from penstock.core.text import did_you_mean
from penstock.gateway.settings import GatewaySettings
from penstock.web.requests import LARGEST, Query
from penstock.web.responses import Problem

IDENTITY = ("sender", "epoch", "seq", "time")
RESERVED = ("redriven", "replay", "from")
"""Headers of records that Penstock itself sends again."""
FIELDS = ("key", "value", "headers", "base64", *IDENTITY)
_MAX_SENDER = 256


class Format(StrEnum):
    """The encoding of keys and values in JSON."""

    JSON = "json"
    TEXT = "text"
    BASE64 = "base64"

    @classmethod
    def of(cls, query: Query) -> "Format":
        return cls(query.choice("format", [*cls], cls.JSON))


# --- JSON with the text of its values ---------------------------------------------------------------------------------


def _reject_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder(parse_constant=_reject_constant)


@dataclass(frozen=True, slots=True)
class Part:
    """A value and its text."""

    value: object
    text: str


class JsonReader:
    """Steps through an object or an array. Read each value before the next name or item.

    A value keeps its exact text: parsers change numbers (`0.10`, `1e400`) and drop duplicate fields. Raises
    JSONDecodeError.
    """

    def __init__(self, text: str) -> None:
        self._text, self.at = text, 0

    def members(self) -> Iterator[str]:
        """The names in an object, each of them once."""
        seen: set[str] = set()
        for _ in self._entries("{", "}"):
            self._skip()
            start, name = self.at, self.part().value
            if not isinstance(name, str):
                raise self._error("Expecting a name in quotes", start)
            if name in seen:
                raise self._error(f"Duplicate field {json.dumps(name)}", start)
            seen.add(name)
            self._expect(":")
            yield name

    def items(self) -> Iterator[int]:
        """The indexes of an array."""
        return self._entries("[", "]")

    def part(self) -> Part:
        self._skip()
        start = self.at
        try:
            value, self.at = _DECODER.raw_decode(self._text, start)
        except json.JSONDecodeError:
            raise
        except RecursionError as error:
            raise self._error("Nested too deeply", start) from error
        except ValueError as error:
            raise self._error(str(error), start) from error
        return Part(value, self._text[start : self.at])

    def end(self) -> None:
        self._skip()
        if self.at != len(self._text):
            raise self._error("Extra data", self.at)

    def _entries(self, opening: str, closing: str) -> Iterator[int]:
        self._expect(opening)
        index = 0
        while not self._passed(closing):
            if index:
                self._expect(",")
            yield index
            index += 1

    def _skip(self) -> None:
        if (space := _SPACE.match(self._text, self.at)) is not None:
            self.at = space.end()

    def _passed(self, character: str) -> bool:
        self._skip()
        passed = self._text.startswith(character, self.at)
        self.at += passed
        return passed

    def _expect(self, character: str) -> None:
        if not self._passed(character):
            raise self._error(f'Expecting "{character}"', self.at)

    def _error(self, problem: str, at: int) -> json.JSONDecodeError:
        return json.JSONDecodeError(problem, self._text, at)


# --- decode -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decoder:
    """Decodes bodies, within the limits of the settings."""

    settings: GatewaySettings
    now: Callable[[], Micros]

    def document(self, body: bytes, form: Format) -> list[Record]:
        """`{"records": [{"key": …, "value": …}, …]}`"""
        reader = JsonReader(_decoded(body))
        found: list[Record] | None = None
        where = "the body"
        try:
            for name in reader.members():
                if name != "records":
                    raise Problem(400, where, f'"{name}" is not a field', 'the only field is "records"')
                found = []
                for index in reader.items():
                    where = f"records[{index}]"
                    self._require_room(found)
                    found.append(self._record(reader, where, form))
            reader.end()
        except json.JSONDecodeError as error:
            at = f"{where}, line {error.lineno}, column {error.colno}"
            raise Problem(400, at, error.msg, "nothing was sent") from error
        if found is None:
            raise Problem(400, "the body", '"records" is missing', 'write {"records": [{"value": …}]}')
        return found

    def lines(self, body: bytes, form: Format) -> list[Record]:
        """A record on each line. Empty lines are skipped."""
        found: list[Record] = []
        for number, line in enumerate(body.split(b"\n"), 1):
            where = f"line {number}"
            text = _decoded(line, where)
            if not text.strip(" \t\r"):
                continue
            self._require_room(found)
            reader = JsonReader(text)
            try:
                found.append(self._record(reader, where, form))
                reader.end()
            except json.JSONDecodeError as error:
                raise Problem(400, f"{where}, column {error.colno}", error.msg, "nothing was sent") from error
        return found

    def raw(self, body: bytes, where: str, key: str | None, form: Format) -> list[Record]:
        """The body itself is the value; the format applies to the key."""
        record = Record(body, None, None if key is None else _bytes(where, key, form is Format.BASE64))
        self._check_size("the body", record)
        return [record]

    def _require_room(self, found: Sequence[Record]) -> None:
        if len(found) == (limit := self.settings.records):
            raise Problem(413, "the body", f"it has more than {limit} records", "send them in several requests")

    def _record(self, reader: JsonReader, where: str, form: Format) -> Record:
        parts: dict[str, Part] = {}
        for name in reader.members():
            if name not in FIELDS:
                fix = did_you_mean(name, FIELDS, f"the fields are {', '.join(FIELDS)}")
                raise Problem(400, where, f'"{name}" is not a field of a record', fix)
            parts[name] = reader.part()
        if "value" not in parts:
            raise Problem(400, where, '"value" is missing', 'write {"value": …}; null deletes its key')
        coded = _base64_parts(where, parts.get("base64"), form)
        record = Record(
            _content(f"{where}.value", parts["value"], Format.BASE64 if "value" in coded else form),
            self._origin(where, parts),
            self._key(f"{where}.key", parts.get("key"), Format.BASE64 if "key" in coded else form),
            _headers(f"{where}.headers", parts.get("headers"), "headers" in coded),
        )
        self._check_size(where, record)
        return record

    def _key(self, where: str, part: Part | None, form: Format) -> bytes | None:
        is_text = part is not None and isinstance(part.value, str)
        return _content(where, part, Format.TEXT if is_text and form is Format.JSON else form)

    def _origin(self, where: str, parts: dict[str, Part]) -> Origin | None:
        if not any(name in parts for name in IDENTITY):
            return None
        if missing := [name for name in ("sender", "epoch", "seq") if name not in parts]:
            fix = "give sender, epoch and seq; or none of them, then the gateway numbers the record"
            raise Problem(400, where, f"the identity lacks {' and '.join(missing)}", fix)
        sender = parts["sender"].value
        if not isinstance(sender, str) or not sender.isprintable() or not 0 < len(sender) <= _MAX_SENDER:
            raise Problem(400, f"{where}.sender", f"a sender has 1 to {_MAX_SENDER} printable characters")
        if sender == self.settings.sender:
            raise Problem(400, f"{where}.sender", f'"{sender}" is the gateway itself', "choose another name")
        epoch, seq = (_number(f"{where}.{name}", parts[name].value) for name in ("epoch", "seq"))
        time = _number(f"{where}.time", parts["time"].value) if "time" in parts else self.now()
        return Origin(sender, epoch, seq, time)

    def _check_size(self, where: str, record: Record) -> None:
        headers = sum(len(name.encode()) + len(value) for name, value in record.extra)
        key = len(record.key or b"")
        for what, size, limit in (
            (f"{where}.key", key, self.settings.key),
            (f"{where}.headers", headers, self.settings.headers),
            (where, headers + key + len(record.value or b""), self.settings.record),
        ):
            if size > limit:
                raise Problem(413, what, f"{size} bytes are too many", f"send at most {limit}; nothing was sent")


def _content(where: str, part: Part | None, form: Format) -> bytes | None:
    if part is None or part.value is None:
        return None
    if form is Format.JSON:
        return _encoded(where, part.text)
    return _bytes(where, part.value, form is Format.BASE64)


def _base64_parts(where: str, part: Part | None, form: Format) -> Sequence[str]:
    """The parts of a record that are base64."""
    parts = ("key", "value", "headers")
    if form is Format.BASE64:
        return parts
    if part is None:
        return ()
    names = part.value
    if not isinstance(names, list) or not all(name in parts for name in names):
        raise Problem(400, f"{where}.base64", "it must name the parts that are base64", 'such as ["key", "value"]')
    return names


def _headers(where: str, part: Part | None, coded: bool) -> tuple[tuple[str, bytes], ...]:
    if part is None or part.value is None:
        return ()
    if not isinstance(part.value, dict):
        raise Problem(400, where, "headers must be an object", 'write {"name": "text"}')
    reader = JsonReader(part.text)
    found: list[tuple[str, bytes]] = []
    try:
        for name in reader.members():
            found += _header(f"{where}.{name}", name, reader.part().value, coded)
    except json.JSONDecodeError as error:
        raise Problem(400, where, error.msg, 'write several values of a header as {"name": ["a", "b"]}') from error
    return tuple(found)


def _header(where: str, name: str, value: object, coded: bool) -> list[tuple[str, bytes]]:
    if name in IDENTITY:
        raise Problem(400, where, "this header is part of the identity", f'write "{name}" beside "value"')
    if name in RESERVED:
        raise Problem(400, where, "this header is reserved for records that Penstock sends again", "use another name")
    _encoded(where, name)
    return [(name, _bytes(where, one, coded)) for one in (value if isinstance(value, list) else [value])]


def _bytes(where: str, value: object, coded: bool) -> bytes:
    if not isinstance(value, str):
        raise Problem(400, where, "it is not a text", "write a text, or choose another ?format=")
    if not coded:
        return _encoded(where, value)
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Problem(400, where, "it is not base64", "use the alphabet with + and /, padded with =") from error


def _encoded(where: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise Problem(400, where, "it has half of a surrogate pair, which is not UTF-8", "send base64") from error


def _decoded(body: bytes, where: str = "the body") -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise Problem(400, f"{where}, byte {error.start + 1}", "it is not UTF-8", "send bytes as base64") from error


def _number(where: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST:
        raise Problem(400, where, "it is not an integer from 0 to 2^63-1")
    return value


# --- encode -----------------------------------------------------------------------------------------------------------


def entry_json(entry: Entry, form: Format) -> dict[str, object]:
    """An entry as JSON. `base64` names the parts that do not fit the format and are base64 instead."""
    origin = Origin.read(entry.headers)
    extra = [one for one in entry.headers if origin is None or one[0] not in IDENTITY]
    key, key_coded = _text(entry.key, form)
    value, value_coded = _value(entry.value, form)
    headers, headers_coded = _header_texts(extra, form)
    coded = {"key": key_coded, "value": value_coded, "headers": headers_coded}
    return {
        "channel": entry.channel,
        "partition": entry.partition,
        "offset": entry.offset,
        "appended": entry.appended,
        **({name: getattr(origin, name) for name in IDENTITY} if origin else {}),
        "key": key,
        "value": value,
        "headers": headers,
        **({"base64": [name for name, is_coded in coded.items() if is_coded]} if any(coded.values()) else {}),
    }


def size(entry: Entry) -> int:
    return len(entry.key or b"") + len(entry.value or b"") + sum(len(name) + len(text) for name, text in entry.headers)


def partitions_json(partitions: Iterable[ChannelPartition]) -> list[dict[str, object]]:
    return [{"channel": channel, "partition": partition} for channel, partition in partitions]


def _value(value: bytes | None, form: Format) -> tuple[object, bool]:
    if value is None or form is not Format.JSON:
        return _text(value, form)
    try:
        # The JSON value null would look like a deletion.
        if orjson.loads(value) is not None:
            return orjson.Fragment(value), False
    except orjson.JSONDecodeError:
        pass
    return base64.b64encode(value).decode(), True


def _text(value: bytes | None, form: Format) -> tuple[str | None, bool]:
    """The text, and whether it is base64 although the format is another."""
    if value is None:
        return None, False
    if form is Format.BASE64:
        return base64.b64encode(value).decode(), False
    try:
        return value.decode(), False
    except UnicodeDecodeError:
        return base64.b64encode(value).decode(), True


def _header_texts(headers: Headers, form: Format) -> tuple[dict[str, object], bool]:
    coded = any(_text(value, form)[1] for _, value in headers)
    found: dict[str, list[str | None]] = {}
    for name, value in headers:
        found.setdefault(name, []).append(_text(value, Format.BASE64 if coded else form)[0])
    return {name: texts[0] if len(texts) == 1 else texts for name, texts in found.items()}, coded

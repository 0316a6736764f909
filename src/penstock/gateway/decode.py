"""Decodes bodies to records. A body with one bad record is rejected whole, with the place of that record."""

import base64
import binascii
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NoReturn

from penstock.core.clock import Micros
from penstock.core.record import Origin, Record
from penstock.core.text import did_you_mean
from penstock.gateway.settings import GatewaySettings
from penstock.web.query import LARGEST, Query
from penstock.web.responses import Problem

_SPACE = re.compile(r"[ \t\n\r]*")


def _no_json(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_json)


class Unreadable(ValueError):
    """Raised where a text is not the JSON that it has to be."""

    def __init__(self, why: str, at: int) -> None:
        super().__init__(why, at)
        self.why, self.at = why, at


@dataclass(frozen=True, slots=True)
class Part:
    """A value and its text."""

    value: object
    text: str


class JsonScanner:
    """A cursor over JSON text that returns parts as they are written. Read each value before the next name or item."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.at = 0

    def members(self) -> Iterator[str]:
        """The names in an object, in order."""
        self._expect("{", "an object")
        seen: set[str] = set()
        closed = self._passed("}")
        while not closed:
            self._skip()
            begins = self.at
            name = self.part().value if self._text.startswith('"', self.at) else None
            if not isinstance(name, str):
                raise Unreadable("a name in quotes is expected", begins)
            if name in seen:
                raise Unreadable(f"the field {json.dumps(name)} is there twice", begins)
            seen.add(name)
            self._expect(":", "a colon")
            yield name
            closed = self._closed("}")

    def items(self) -> Iterator[int]:
        """The places in an array."""
        self._expect("[", "a list")
        index, closed = 0, self._passed("]")
        while not closed:
            yield index
            index, closed = index + 1, self._closed("]")

    def part(self) -> Part:
        self._skip()
        begins = self.at
        try:
            value, self.at = _DECODER.raw_decode(self._text, begins)
        except json.JSONDecodeError as error:
            raise Unreadable(error.msg[:1].lower() + error.msg[1:], error.pos) from error
        except RecursionError as error:
            raise Unreadable("it is nested too deeply", begins) from error
        except ValueError as error:
            raise Unreadable(str(error), begins) from error
        return Part(value, self._text[begins : self.at])

    def end(self) -> None:
        self._skip()
        if self.at != len(self._text):
            raise Unreadable("nothing more is expected", self.at)

    def _skip(self) -> None:
        if (space := _SPACE.match(self._text, self.at)) is not None:
            self.at = space.end()

    def _passed(self, character: str) -> bool:
        self._skip()
        if self._text.startswith(character, self.at):
            self.at += 1
            return True
        return False

    def _expect(self, character: str, what: str) -> None:
        if not self._passed(character):
            raise Unreadable(f"{what} is expected", self.at)

    def _closed(self, character: str) -> bool:
        if self._passed(character):
            return True
        self._expect(",", f'"," or "{character}"')
        return False


class Format(StrEnum):
    """How keys and values are written in JSON."""

    JSON = "json"
    TEXT = "text"
    BASE64 = "base64"

    @classmethod
    def of(cls, query: Query) -> "Format":
        return cls(query.choice("format", [*cls], cls.JSON))


IDENTITY = ("sender", "epoch", "seq", "time")
MARKS = ("redriven", "replay", "from")
"""Headers by which Penstock knows what it has sent again itself."""
FIELDS = ("key", "value", "headers", "base64", *IDENTITY)
_LONGEST_SENDER = 256


@dataclass(frozen=True)
class Decoder:
    """Decodes bodies, within the limits of the settings."""

    settings: GatewaySettings
    now: Callable[[], Micros]

    def document(self, body: bytes, form: Format) -> list[Record]:
        """`{"records": [{"key": …, "value": …}, …]}`"""
        text = _decoded(body)
        scan = JsonScanner(text)
        found: list[Record] | None = None
        place = "the body"
        try:
            for name in scan.members():
                if name != "records":
                    raise Problem(400, place, f'"{name}" is not a field', 'the only one is "records"')
                found = []
                for index in scan.items():
                    place = f"records[{index}]"
                    self._more(found)
                    found.append(self._record(scan, place, form))
            scan.end()
        except Unreadable as error:
            raise _unreadable(place, text, error) from error
        if found is None:
            raise Problem(400, "the body", 'it has no "records"', 'write {"records": [{"value": …}]}')
        return found

    def lines(self, body: bytes, form: Format) -> list[Record]:
        """A record on each line; empty lines are none."""
        found: list[Record] = []
        for number, line in enumerate(body.split(b"\n"), 1):
            place = f"line {number}"
            text = _decoded(line, place)
            if not text.strip(" \t\r"):
                continue
            self._more(found)
            scan = JsonScanner(text)
            try:
                found.append(self._record(scan, place, form))
                scan.end()
            except Unreadable as error:
                raise Problem(400, f"{place}, column {error.at + 1}", error.why, "nothing was sent") from error
        return found

    def raw(self, body: bytes, place: str, key: str | None, form: Format) -> list[Record]:
        """The body itself is the value, whatever the format of its key."""
        record = Record(body, None, None if key is None else _bytes(place, key, form is Format.BASE64))
        self._within("the body", record)
        return [record]

    def _more(self, found: Sequence[Record]) -> None:
        if len(found) == self.settings.records:
            most = self.settings.records
            raise Problem(413, "the body", f"it has more than {most} records", "send them in several requests")

    def _record(self, scan: JsonScanner, place: str, form: Format) -> Record:
        parts: dict[str, Part] = {}
        for name in scan.members():
            if name not in FIELDS:
                fix = did_you_mean(name, FIELDS, f"the fields are {', '.join(FIELDS)}")
                raise Problem(400, place, f'"{name}" is not a field of a record', fix)
            parts[name] = scan.part()
        if "value" not in parts:
            raise Problem(400, place, 'it has no "value"', 'write {"value": …}; null deletes its key')
        coded = _coded(place, parts.get("base64"), form)
        record = Record(
            self._value(f"{place}.value", parts["value"], Format.BASE64 if "value" in coded else form),
            self._origin(place, parts),
            self._key(f"{place}.key", parts.get("key"), Format.BASE64 if "key" in coded else form),
            _headers(f"{place}.headers", parts.get("headers"), "headers" in coded),
        )
        self._within(place, record)
        return record

    def _value(self, place: str, part: Part, form: Format) -> bytes | None:
        if part.value is None:
            return None
        if form is Format.JSON:
            return _encoded(place, part.text)
        return _bytes(place, part.value, form is Format.BASE64)

    def _key(self, place: str, part: Part | None, form: Format) -> bytes | None:
        if part is None or part.value is None:
            return None
        if form is Format.JSON and not isinstance(part.value, str):
            return _encoded(place, part.text)
        return _bytes(place, part.value, form is Format.BASE64)

    def _origin(self, place: str, parts: dict[str, Part]) -> Origin | None:
        if not any(name in parts for name in IDENTITY):
            return None
        if missing := [name for name in ("sender", "epoch", "seq") if name not in parts]:
            fix = "give sender, epoch and seq, or none of them: then the gateway numbers the record"
            raise Problem(400, place, f"its identity lacks {' and '.join(missing)}", fix)
        sender = parts["sender"].value
        if not isinstance(sender, str) or not sender.isprintable() or not 0 < len(sender) <= _LONGEST_SENDER:
            why = f"a sender is a text of 1 to {_LONGEST_SENDER} characters that can be printed"
            raise Problem(400, f"{place}.sender", why)
        if sender == self.settings.sender:
            raise Problem(400, f"{place}.sender", f'"{sender}" is the gateway itself', "choose another name")
        epoch, seq = (_number(f"{place}.{name}", parts[name].value) for name in ("epoch", "seq"))
        time = _number(f"{place}.time", parts["time"].value) if "time" in parts else self.now()
        return Origin(sender, epoch, seq, time)

    def _within(self, place: str, record: Record) -> None:
        headers = sum(len(name.encode()) + len(value) for name, value in record.extra)
        key = len(record.key or b"")
        whole = headers + key + len(record.value or b"")
        for what, size, most in (
            (f"{place}.key", key, self.settings.key),
            (f"{place}.headers", headers, self.settings.headers),
            (place, whole, self.settings.record),
        ):
            if size > most:
                raise Problem(413, what, f"{size} bytes are too many", f"at most {most}; nothing was sent")


def _coded(place: str, part: Part | None, form: Format) -> Sequence[str]:
    """Which parts of a record are base64."""
    parts = ("key", "value", "headers")
    if form is Format.BASE64:
        return parts
    if part is None:
        return ()
    told = part.value
    if not isinstance(told, list) or not all(name in parts for name in told):
        raise Problem(400, f"{place}.base64", "it names the parts that are base64", 'such as ["key", "value"]')
    return told


def _headers(place: str, part: Part | None, coded: bool) -> tuple[tuple[str, bytes], ...]:
    if part is None or part.value is None:
        return ()
    if not isinstance(part.value, dict):
        raise Problem(400, place, "headers are an object", 'write {"name": "text"}')
    scan = JsonScanner(part.text)
    found: list[tuple[str, bytes]] = []
    try:
        for name in scan.members():
            found += _header(f"{place}.{name}", name, scan.part().value, coded)
    except Unreadable as error:
        raise Problem(400, place, error.why, 'a header with several values is written {"name": ["a", "b"]}') from error
    return tuple(found)


def _header(place: str, name: str, told: object, coded: bool) -> list[tuple[str, bytes]]:
    if name in IDENTITY:
        raise Problem(400, place, "this header is part of the identity", f'write "{name}" beside "value"')
    if name in MARKS:
        raise Problem(400, place, "by this header Penstock marks what it sends again", "choose another name")
    _encoded(place, name)
    return [(name, _bytes(place, one, coded)) for one in (told if isinstance(told, list) else [told])]


def _bytes(place: str, value: object, coded: bool) -> bytes:
    if not isinstance(value, str):
        raise Problem(400, place, "it is no text", "give a text, or ask for another ?format=")
    if not coded:
        return _encoded(place, value)
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Problem(400, place, "it is not base64", "write the alphabet with + and /, padded with =") from error


def _encoded(place: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise Problem(
            400, place, "it holds half of a surrogate pair, which no text can", "send it as base64"
        ) from error


def _decoded(body: bytes, place: str = "the body") -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise Problem(400, f"{place}, byte {error.start + 1}", "it is not UTF-8", "send bytes as base64") from error


def _number(place: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST:
        raise Problem(400, place, "it is no whole number from 0 to 2^63-1")
    return value


def _unreadable(place: str, text: str, error: Unreadable) -> Problem:
    line = text.count("\n", 0, error.at) + 1
    column = error.at - text.rfind("\n", 0, error.at)
    return Problem(400, f"{place}, line {line}, column {column}", error.why, "nothing was sent")

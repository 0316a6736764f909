"""Records as JSON: decodes request bodies, encodes responses.

A body with one bad record is rejected whole, with the place of that record.
"""

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


# --- decode -----------------------------------------------------------------------------------------------------------


def _members(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the field {json.dumps(name[:100])} occurs twice")
        found[name] = value
    return found


def _integer(text: str) -> object:
    # Up to 19 characters, it fits into the 64 bits that orjson can write.
    return int(text) if len(text) < 20 else orjson.Fragment(text)


def _reject_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_members, parse_int=_integer, parse_float=orjson.Fragment, parse_constant=_reject_constant
)
"""Numbers keep their text: parsers change `0.10`, `1e400` and `18446744073709551617`."""


def _parse(body: bytes, where: str, line: int = 1) -> object:
    """A JSON text, which begins on this line of the body."""
    try:
        return _DECODER.decode(body.decode())
    except UnicodeDecodeError as error:
        raise Problem(400, f"{where}, byte {error.start + 1}", "it is not UTF-8", "send bytes as base64") from error
    except json.JSONDecodeError as error:
        at = f"line {line + error.lineno - 1}, column {error.colno}"
        raise Problem(400, at, error.msg, "nothing was sent") from error
    except RecursionError as error:
        raise Problem(400, where, "it is nested too deeply", "nothing was sent") from error
    except ValueError as error:
        raise Problem(400, where, str(error), "nothing was sent") from error


@dataclass(frozen=True)
class Decoder:
    """Decodes bodies, within the limits of the settings."""

    settings: GatewaySettings
    now: Callable[[], Micros]

    def document(self, body: bytes, form: Format) -> list[Record]:
        """`{"records": [{"key": …, "value": …}, …]}`"""
        match _parse(body, "the body"):
            case {"records": list(documents), **others} if not others:
                self._check_count(len(documents))
                return [self._record(one, f"records[{at}]", form) for at, one in enumerate(documents)]
        raise Problem(
            400, "the body", 'it is not an object with the list "records"', 'write {"records": [{"value": …}]}'
        )

    def lines(self, body: bytes, form: Format) -> list[Record]:
        """A record on each line. Empty lines are skipped."""
        found: list[Record] = []
        for number, line in enumerate(body.split(b"\n"), 1):
            if line.strip(b" \t\r"):
                self._check_count(len(found) + 1)
                where = f"line {number}"
                found.append(self._record(_parse(line, where, number), where, form))
        return found

    def raw(self, body: bytes, where: str, key: str | None, form: Format) -> list[Record]:
        """The body itself is the value; the format applies to the key."""
        record = Record(body, None, None if key is None else _bytes(where, key, form is Format.BASE64))
        self._check_size("the body", record)
        return [record]

    def _check_count(self, count: int) -> None:
        if count > (limit := self.settings.records):
            raise Problem(413, "the body", f"it has more than {limit} records", "send them in several requests")

    def _record(self, document: object, where: str, form: Format) -> Record:
        if not isinstance(document, dict):
            raise Problem(400, where, "it is not an object", 'write {"value": …}')
        for name in document:
            if name not in FIELDS:
                fix = did_you_mean(name, FIELDS, f"the fields are {', '.join(FIELDS)}")
                raise Problem(400, where, f"{json.dumps(name[:100])} is not a field of a record", fix)
        if "value" not in document:
            raise Problem(400, where, '"value" is missing', 'write {"value": …}; null deletes its key')
        coded = _base64_parts(f"{where}.base64", document.get("base64", []), form)
        key = document.get("key")
        key_form = Format.TEXT if isinstance(key, str) and form is Format.JSON else form
        record = Record(
            _content(f"{where}.value", document["value"], Format.BASE64 if "value" in coded else form),
            self._origin(where, document),
            _content(f"{where}.key", key, Format.BASE64 if "key" in coded else key_form),
            tuple(_headers(f"{where}.headers", document.get("headers"), "headers" in coded)),
        )
        self._check_size(where, record)
        return record

    def _origin(self, where: str, document: Mapping[str, object]) -> Origin | None:
        if not any(name in document for name in IDENTITY):
            return None
        if missing := [name for name in ("sender", "epoch", "seq") if name not in document]:
            fix = "give sender, epoch and seq; or none of them, then the gateway numbers the record"
            raise Problem(400, where, f"the identity lacks {' and '.join(missing)}", fix)
        sender = document["sender"]
        if not isinstance(sender, str) or not sender.isprintable() or not 0 < len(sender) <= _MAX_SENDER:
            raise Problem(400, f"{where}.sender", f"a sender has 1 to {_MAX_SENDER} printable characters")
        if sender == self.settings.sender:
            raise Problem(400, f"{where}.sender", f'"{sender}" is the gateway itself', "choose another name")
        numbers = {"time": self.now(), **document}
        return Origin(sender, *(_number(f"{where}.{name}", numbers[name]) for name in ("epoch", "seq", "time")))

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


def _content(where: str, value: object, form: Format) -> bytes | None:
    if value is None:
        return None
    if form is not Format.JSON:
        return _bytes(where, value, form is Format.BASE64)
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise Problem(400, where, f"it cannot be stored as JSON: {error}", "send it as base64") from error


def _base64_parts(where: str, names: object, form: Format) -> Sequence[str]:
    """The parts of a record that are base64."""
    parts = ("key", "value", "headers")
    if not isinstance(names, list) or not all(name in parts for name in names):
        raise Problem(400, where, "it must name the parts that are base64", 'such as ["key", "value"]')
    return parts if form is Format.BASE64 else names


def _headers(where: str, headers: object, coded: bool) -> Iterator[tuple[str, bytes]]:
    if headers is None:
        return
    if not isinstance(headers, dict):
        raise Problem(400, where, "headers must be an object", 'write {"name": "text"}')
    for name, values in headers.items():
        _encoded(where, name)
        at = f"{where}.{name}"
        if name in IDENTITY:
            raise Problem(400, at, "this header is part of the identity", f'write "{name}" beside "value"')
        if name in RESERVED:
            raise Problem(400, at, "this header is reserved for records that Penstock sends again", "use another name")
        for value in values if isinstance(values, list) else [values]:
            yield name, _bytes(at, value, coded)


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


def size(record: Entry | Record) -> int:
    headers = record.headers if isinstance(record, Entry) else record.extra
    return len(record.key or b"") + len(record.value or b"") + sum(len(name) + len(text) for name, text in headers)


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

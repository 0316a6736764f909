"""From a line of text to a record: as Kafka's console producer lays it out, or as JSON. No I/O."""

import base64
import binascii
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import orjson

from penstock.core.errors import Misconfigured, Refused
from penstock.core.record import Record
from penstock.core.text import did_you_mean, printable

Pairs = tuple[tuple[str, bytes], ...]

IDENTITY = frozenset({"sender", "epoch", "seq", "time"})
"""The headers that say who sent a record."""


class Layout(Protocol):
    """A way in which a line can hold a record."""

    def read(self, line: bytes) -> Record:
        """The record; Refused with the reason when the line holds none."""


@dataclass(frozen=True)
class Separated:
    """Headers, key and value with separators between them; each but the value only where its separator is told.

    `lenient`: what has no separator is all value, and a header without one all name.
    """

    key: bytes | None = None
    headers: bytes | None = None
    """What parts the headers from the rest."""
    between: bytes = b","
    within: bytes = b":"
    null: bytes | None = None
    """What stands for a null key or value."""
    lenient: bool = False

    def read(self, line: bytes) -> Record:
        extra: Pairs = ()
        key, rest = None, line
        if self.headers is not None:
            told, rest = self._parted(rest, self.headers, "headers")
            extra = self._pairs(told) if told else ()
        if self.key is not None:
            key, rest = self._parted(rest, self.key, "key")
        return Record(self._value(rest), None, None if key is None else self._value(key), extra)

    def _parted(self, text: bytes, separator: bytes, what: str) -> tuple[bytes | None, bytes]:
        first, found, rest = text.partition(separator)
        if found:
            return first, rest
        if self.lenient:
            return None, text
        raise Refused("a line", f"it has no {what}: there is no {_quoted(separator)} in {_quoted(text)}")

    def _pairs(self, told: bytes) -> Pairs:
        if told == self.null:
            return ()
        return tuple(self._pair(pair) for pair in told.split(self.between))

    def _pair(self, pair: bytes) -> tuple[str, bytes]:
        name, found, value = pair.partition(self.within)
        if not found and not self.lenient:
            raise Refused("a line", f"its header {_quoted(pair)} has no {_quoted(self.within)}")
        try:
            return name.decode(), self._value(value) or b""
        except UnicodeDecodeError as error:
            raise Refused("a line", f"the name of its header {_quoted(pair)} is not UTF-8") from error

    def _value(self, text: bytes) -> bytes | None:
        return None if self.null is not None and text == self.null else text


def _quoted(text: bytes) -> str:
    shown = printable(text[:60].decode(errors="backslashreplace"))
    return f'"{shown}{"…" if len(text) > 60 else ""}"'


class Json:
    """`{"key": …, "value": …, "headers": …}`: each a text, null, or {"base64": "…"}.

    The headers are a list of {"name", "value"}, or an object. What `penstock consume --json` tells beside them is
    passed over, so that its output can be put in again.
    """

    def read(self, line: bytes) -> Record:
        try:
            document = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise Refused("a line", f"it is not JSON: {error.msg}") from error
        if not isinstance(document, dict):
            raise Refused("a line", "it is JSON, but not an object")
        for name in document:
            if name not in _FIELDS:
                way_out = did_you_mean(name, _FIELDS, f"there are {', '.join(_FIELDS)}")
                raise Refused("a line", f'"{printable(name)}" is not a field; {way_out}')
        if "value" not in document:
            raise Refused("a line", 'there is no "value"; write null for none')
        return Record(_bytes("value", document["value"]), None, _bytes("key", document.get("key")), _headers(document))


_FIELDS = ("key", "value", "headers", "channel", "partition", "offset", "appended", "origin")


def _headers(document: Mapping[str, object]) -> Pairs:
    told = document.get("headers")
    if told is None:
        return ()
    if isinstance(told, dict):
        told = [{"name": name, "value": value} for name, value in told.items()]
    if not isinstance(told, list):
        raise Refused("a line", '"headers" has to be an object, or a list of {"name", "value"}')
    pairs = []
    for one in told:
        if not isinstance(one, dict) or not isinstance(one.get("name"), str):
            raise Refused("a line", 'each of "headers" has to be {"name": "…", "value": "…"}')
        pairs.append((one["name"], _bytes(f"headers.{one['name']}", one.get("value")) or b""))
    return tuple(pairs)


def _bytes(field: str, told: object) -> bytes | None:
    match told:
        case None:
            return None
        case str():
            return told.encode()
        case {"base64": str(coded), **rest} if not rest:
            try:
                return base64.b64decode(coded, validate=True)
            except binascii.Error as error:
                raise Refused("a line", f'"{printable(field)}" is not base64: {error}') from error
    raise Refused("a line", f'"{printable(field)}" has to be a text, null, or {{"base64": "…"}}')


def properties(option: str, told: Sequence[str], known: Collection[str]) -> dict[str, str]:
    """`NAME=VALUE` of each; Misconfigured when one is not known."""
    found = {}
    for one in told:
        name, equals, value = one.partition("=")
        if not equals:
            raise Misconfigured(option, f'"{one}" is not NAME=VALUE', f"write {option} {name}=VALUE")
        if name not in known:
            raise Misconfigured(
                option, f'"{name}" is not a property', did_you_mean(name, known, f"there are {', '.join(known)}")
            )
        found[name] = value
    return found


def switched(option: str, told: Mapping[str, str], name: str) -> bool:
    """Whether a property is on; it is not where nothing is told of it."""
    text = told.get(name, "false")
    if text.lower() not in ("true", "false"):
        raise Misconfigured(f"{option} {name}", f'"{text}" is neither true nor false', f"write {name}=true")
    return text.lower() == "true"


def separator(option: str, text: str) -> bytes:
    r"""A separator as a person types it: \t and \n are what they look like; the bytes of the terminal otherwise."""
    if not text:
        raise Misconfigured(option, "it is empty", "give at least one character, such as :")
    return text.replace("\\t", "\t").replace("\\n", "\n").encode(errors="surrogateescape")

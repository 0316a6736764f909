"""From an entry of a channel to a line of text: as Kafka's console consumer prints it, or as JSON. No I/O."""

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import orjson

from penstock.core.contracts import Entry
from penstock.core.record import Origin
from penstock.core.text import printable


class Shape(Protocol):
    def line(self, entry: Entry) -> bytes:
        """What is printed of an entry, with its end of line."""


@dataclass(frozen=True)
class Fields:
    """The chosen fields of an entry, in the order and the words of Kafka's tool; the key last before the value."""

    timestamp: bool = False
    partition: bool = False
    offset: bool = False
    headers: bool = False
    key: bool = False
    value: bool = True
    between: bytes = b"\t"
    key_separator: bytes = b" : "
    between_headers: bytes = b","
    end: bytes = b"\n"
    null: bytes = b"null"
    safe: bool = False
    """Spell out what would move the cursor or colour the screen."""

    def line(self, entry: Entry) -> bytes:
        found = [self._made_safe(field) for field in self._before(entry)]
        if self.key:
            found.append(self._content(entry.key))
        if not self.value:
            return self.between.join(found) + self.end
        value = self._content(entry.value)
        if not found:
            return value + self.end
        return self.between.join(found) + (self.key_separator if self.key else self.between) + value + self.end

    def _before(self, entry: Entry) -> Iterator[bytes]:
        if self.timestamp:
            yield b"CreateTime:%d" % (entry.appended // 1_000) if entry.appended >= 0 else b"NO_TIMESTAMP"
        if self.partition:
            yield b"Partition:%d" % entry.partition
        if self.offset:
            yield b"Offset:%d" % entry.offset
        if self.headers:
            told = (name.encode() + b":" + value for name, value in entry.headers)
            yield self.between_headers.join(told) if entry.headers else b"NO_HEADERS"

    def _content(self, content: bytes | None) -> bytes:
        return self.null if content is None else self._made_safe(content)

    def _made_safe(self, content: bytes) -> bytes:
        return printable(content.decode(errors="backslashreplace")).encode() if self.safe else content


class Json:
    """All of an entry, as an object on a line. What is not UTF-8 is {"base64": "…"}."""

    def line(self, entry: Entry) -> bytes:
        return orjson.dumps(told(entry), option=orjson.OPT_APPEND_NEWLINE)


def told(entry: Entry) -> dict[str, object]:
    origin = Origin.read(entry.headers)
    return {
        "channel": entry.channel,
        "partition": entry.partition,
        "offset": entry.offset,
        "appended": entry.appended,
        "key": _text(entry.key),
        "value": _text(entry.value),
        "headers": [{"name": name, "value": _text(value)} for name, value in entry.headers],
        "origin": origin and {"sender": origin.sender, "epoch": origin.epoch, "seq": origin.seq, "time": origin.time},
    }


def _text(content: bytes | None) -> str | dict[str, str] | None:
    if content is None:
        return None
    try:
        return content.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}

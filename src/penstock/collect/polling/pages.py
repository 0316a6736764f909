"""The answer of a server that gives its records in pages, without I/O: which records it holds, and which page follows.

Records are cut out of the body and stay the bytes that they are. To read and write them anew would change numbers that
are too large, and keys that are there twice.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.core.errors import Refused

MOST_ITEMS = 100_000
"""So many records may a page have."""
LONGEST_CURSOR = 2_048
HEADER = "header:"
"""So begins a cursor that lies in a header, not in the body."""

_BOM = b"\xef\xbb\xbf"
_LINES = ("application/x-ndjson", "application/ndjson", "application/jsonl", "application/x-jsonlines")
_BLANK = b" \t\r\n"
_SPACE = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True, slots=True)
class Answer:
    """`kind` is its content type; `cursor`, what the header says that is to hold the next one."""

    body: bytes
    kind: str = ""
    cursor: str | None = None


@dataclass(frozen=True, slots=True)
class Page:
    items: list[bytes]
    next: str | None
    """The cursor by which the next page is asked for; None where the answer tells none."""


def read(answer: Answer, items: str | None, cursor: str | None) -> Page:
    """`items` and `cursor` are paths into the JSON; without items, the body is a list, lines, or one record.

    Refused when it cannot be read so.
    """
    body = answer.body.removeprefix(_BOM)
    inside = cursor is not None and not cursor.startswith(HEADER)
    following = answer.cursor if not inside else None
    found: list[bytes]
    if not body.strip(_BLANK):
        found = []
    elif answer.kind in _LINES and items is None and not inside:
        found = [stripped for line in body.split(b"\n") if (stripped := line.removesuffix(b"\r"))]
    elif items is None and not inside and body.lstrip(_BLANK)[:1] != b"[":
        # What it is, is nobody's business here.
        found = [answer.body]
    else:
        try:
            document = _Document(body)
            found = document.listed(items)
            if inside and cursor is not None:
                following = document.text(cursor)
        except (ValueError, RecursionError) as error:
            if items is None and not inside and "json" not in answer.kind:
                found = [answer.body]
            else:
                why = "it is nested too deeply" if isinstance(error, RecursionError) else f"it is not JSON: {error}"
                raise Refused("an answer", why) from error
    if len(found) > MOST_ITEMS:
        raise Refused("an answer", f"it has {len(found)} records, more than the {MOST_ITEMS} that a page may have")
    if following is not None and (len(following) > LONGEST_CURSOR or not _sendable(following)):
        raise Refused("an answer", f"its cursor is no text of up to {LONGEST_CURSOR} characters")
    return Page(found, following or None)


def _sendable(cursor: str) -> bool:
    try:
        return bool(cursor.encode()) or not cursor
    except UnicodeEncodeError:
        return False


class _Document:
    """A JSON document in which places are found, not values. Whatever is not UTF-8 stays as it is."""

    def __init__(self, body: bytes) -> None:
        self._text = body.decode(errors="surrogateescape")
        # Numbers stay the text that they are: who looks for the end of one need not know its value.
        self._decoder = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str)
        self._start = self._skip(0)
        _, end = self._decoder.raw_decode(self._text, self._start)
        if self._skip(end) != len(self._text):
            raise ValueError(f"something follows at character {end}")

    def listed(self, path: str | None) -> list[bytes]:
        """The elements of the list at the path, or the whole document when there is neither a path nor a list."""
        start = self._start if path is None else self._find(path)
        if start is None:
            raise Refused("an answer", f'there is nothing at "{path}"')
        if self._text[start] != "[":
            if path is not None:
                raise Refused("an answer", f'what lies at "{path}" is not a list')
            return [self._text.encode(errors="surrogateescape")]
        return [self._text[first:last].encode(errors="surrogateescape") for first, last in self._elements(start)]

    def text(self, path: str) -> str | None:
        """The string or number at the path; None when there is nothing, or null."""
        if self._text[self._start] != "{":
            raise Refused("an answer", f'it is no object that could hold "{path}"')
        if (start := self._find(path)) is None:
            return None
        value, _ = self._decoder.raw_decode(self._text, start)
        if value is not None and not isinstance(value, str):
            raise Refused("an answer", f'what lies at "{path}" is neither a text nor a number')
        return value

    def _find(self, path: str) -> int | None:
        """Where the value at the path begins."""
        start = self._start
        for step in path.split("."):
            if self._text[start] != "{":
                return None
            found = None
            for name, first in self._members(start):
                # The last of several counts, as everywhere.
                found = first if name == step else found
            if found is None:
                return None
            start = found
        return start

    def _elements(self, start: int) -> Iterator[tuple[int, int]]:
        at = self._skip(start + 1)
        while self._text[at] != "]":
            _, end = self._decoder.raw_decode(self._text, at)
            yield at, end
            at = self._skip(end)
            if self._text[at] == ",":
                at = self._skip(at + 1)

    def _members(self, start: int) -> Iterator[tuple[str, int]]:
        at = self._skip(start + 1)
        while self._text[at] != "}":
            name, end = self._decoder.raw_decode(self._text, at)
            value = self._skip(self._skip(end) + 1)
            yield name, value
            _, end = self._decoder.raw_decode(self._text, value)
            at = self._skip(end)
            if self._text[at] == ",":
                at = self._skip(at + 1)

    def _skip(self, at: int) -> int:
        found = _SPACE.match(self._text, at)
        return found.end() if found else at

"""Parses a page of records without I/O: the records, and the cursor of the next page.

Records are cut out of the body unchanged. Decoding and encoding them would change large numbers and repeated keys.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.core.errors import Refused

MAX_ITEMS = 100_000
"""The limit of records in a page."""
MAX_CURSOR = 2_048
HEADER = "header:"
"""The prefix of a cursor in a header."""

_BOM = b"\xef\xbb\xbf"
_LINES = ("application/x-ndjson", "application/ndjson", "application/jsonl", "application/x-jsonlines")
_BLANK = b" \t\r\n"
_SPACE = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True, slots=True)
class Answer:
    """A response. `kind`: the content type; `cursor`: the header with the next cursor."""

    body: bytes
    kind: str = ""
    cursor: str | None = None


@dataclass(frozen=True, slots=True)
class Page:
    items: list[bytes]
    next: str | None
    """The cursor of the next page; None if there is none."""


def read(answer: Answer, items: str | None, cursor: str | None) -> Page:
    """`items` and `cursor` are paths in the JSON. Without `items`, the body is a list, lines, or one record.

    Raises Refused if the body does not match.
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
        # One record of any format.
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
    if len(found) > MAX_ITEMS:
        raise Refused("an answer", f"it has {len(found)} records, more than {MAX_ITEMS}")
    if following is not None and (len(following) > MAX_CURSOR or not _sendable(following)):
        raise Refused("an answer", f"its cursor is not a string of up to {MAX_CURSOR} characters")
    return Page(found, following or None)


def _sendable(cursor: str) -> bool:
    try:
        return bool(cursor.encode()) or not cursor
    except UnicodeEncodeError:
        return False


class _Document:
    """Finds the positions of values in a JSON document. Bytes that are not UTF-8 stay unchanged."""

    def __init__(self, body: bytes) -> None:
        self._text = body.decode(errors="surrogateescape")
        # Keep numbers as text.
        self._decoder = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str)
        self._start = self._skip(0)
        _, end = self._decoder.raw_decode(self._text, self._start)
        if self._skip(end) != len(self._text):
            raise ValueError(f"something follows at character {end}")

    def listed(self, path: str | None) -> list[bytes]:
        """The elements of the list at the path, or the whole document if there is neither a path nor a list."""
        start = self._start if path is None else self._find(path)
        if start is None:
            raise Refused("an answer", f'there is nothing at "{path}"')
        if self._text[start] != "[":
            if path is not None:
                raise Refused("an answer", f'the value at "{path}" is not a list')
            return [self._text.encode(errors="surrogateescape")]
        return [self._text[first:last].encode(errors="surrogateescape") for first, last in self._elements(start)]

    def text(self, path: str) -> str | None:
        """The string or number at the path; None if it is missing or null."""
        if self._text[self._start] != "{":
            raise Refused("an answer", f'it is not an object with "{path}"')
        if (start := self._find(path)) is None:
            return None
        value, _ = self._decoder.raw_decode(self._text, start)
        if value is not None and not isinstance(value, str):
            raise Refused("an answer", f'the value at "{path}" is neither a string nor a number')
        return value

    def _find(self, path: str) -> int | None:
        """The position of the value at the path."""
        start = self._start
        for step in path.split("."):
            if self._text[start] != "{":
                return None
            found = None
            for name, first in self._members(start):
                # Of repeated keys the last one counts.
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

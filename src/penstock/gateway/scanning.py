"""JSON text, read so that parts of it can be taken as they stand: how a number is spelled is the sender's matter."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

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


class Scan:
    """A cursor that walks over a text. Whoever walks over an object or an array takes each value before the next."""

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

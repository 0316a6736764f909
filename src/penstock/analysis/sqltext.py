"""SQL of a user, with `seen()` expanded for Spark, and positions in errors mapped back."""

import re
from collections.abc import Callable
from dataclasses import dataclass

_SEEN = re.compile(
    r"""(?P<skip>--[^\n]*|/\*.*?\*/|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|`[^`]*`)"""
    r"""|(?<![\w.])seen\(\s*(?P<of>\w+(?:\s*,\s*\w+)*)?\s*\)(?:\s+AS\s+seen\b)?""",
    re.IGNORECASE | re.DOTALL,
)
_POSITION = re.compile(r"\bline (\d+),? pos (\d+)")


@dataclass(frozen=True)
class Spelled:
    """The expanded SQL, and the mapping of its positions to the user's SQL."""

    own: str
    text: str
    put: tuple[tuple[slice, slice], ...] = ()
    """The expansions: the slice in Spark's text, and the slice in the user's text."""

    @classmethod
    def out(cls, own: str, counted: Callable[[tuple[str, ...]], str]) -> "Spelled":
        """`counted` returns the expansion of `seen(…)` for its arguments."""
        text, done, put = "", 0, []
        for match in _SEEN.finditer(own):
            if match["skip"]:
                continue
            text += own[done : match.start()]
            meaning = counted(tuple(re.findall(r"\w+", match["of"] or "")))
            put.append((slice(len(text), len(text) + len(meaning)), slice(*match.span())))
            text, done = text + meaning, match.end()
        return cls(own, text + own[done:], tuple(put))

    def location(self, message: str) -> tuple[int, int] | None:
        """The line and column in the user's text, from 1, of an error of Spark; None without a position."""
        if (found := _POSITION.search(message)) is None:
            return None
        line, column = int(found[1]), int(found[2])
        index = sum(len(one) + 1 for one in self.text.split("\n")[: line - 1]) + column
        before = self.own[: self._own(index)]
        return before.count("\n") + 1, len(before) - before.rfind("\n")

    def _own(self, index: int) -> int:
        """The index in the user's text of an index in Spark's text."""
        for there, here in reversed(self.put):
            if index >= there.stop:
                return int(index - there.stop + here.stop)
            if index >= there.start:
                return int(here.start)
        return index

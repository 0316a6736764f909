"""Which channels a SQL text reads, told from its words: a description is made without Spark."""

import re
from collections.abc import Iterator

_TOKEN = re.compile(
    r"""(?P<skip>\s+|--[^\n]*|/\*.*?\*/|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|`(?P<quoted>[^`]+)`|(?P<word>\w+)|.""",
    re.DOTALL,
)
_TAKES_FROM = {"EXTRACT", "TRIM", "SUBSTRING", "SUBSTR", "OVERLAY"}
"""Functions in whose parentheses FROM begins no list of tables."""
_ENDS_LIST = {
    *("WHERE", "GROUP", "HAVING", "ORDER", "SORT", "CLUSTER", "DISTRIBUTE", "LIMIT", "OFFSET", "WINDOW", "QUALIFY"),
    *("UNION", "EXCEPT", "INTERSECT", "MINUS", "SELECT", "WITH", "LATERAL", "PIVOT", "UNPIVOT"),
}


def tables(sql: str) -> tuple[str, ...]:
    """The names after FROM and JOIN, and in their lists, each once; without those that the text itself defines."""
    tokens = list(_tokens(sql))
    own = {name.lower() for name in _defined(tokens)}
    return tuple(dict.fromkeys(name for name in _read(tokens) if name.lower() not in own))


def _tokens(sql: str) -> Iterator[str]:
    """The words and signs; a quoted name keeps one quote in front, so that it is no keyword."""
    for match in _TOKEN.finditer(sql):
        if match["quoted"]:
            yield f"`{match['quoted']}"
        elif not match["skip"]:
            yield match[0]


def _defined(tokens: list[str]) -> Iterator[str]:
    """The names of WITH clauses: `name AS (`, or `name (columns) AS (`."""
    opened: list[int] = []
    for index, token in enumerate(tokens):
        if token == "(":
            if index > 1 and tokens[index - 1].upper() == "AS":
                yield tokens[index - 2].removeprefix("`")
            opened.append(index)
        elif token == ")" and opened:
            start = opened.pop()
            if [word.upper() for word in tokens[index + 1 : index + 3]] == ["AS", "("]:
                yield tokens[start - 1].removeprefix("`")


def _read(tokens: list[str]) -> Iterator[str]:
    """The names in the places of tables. A name before a parenthesis is a function, not a table."""
    opener, listing, expected = [""], [False], False
    for before, token, after in zip(["", *tokens], tokens, [*tokens[1:], ""], strict=False):
        word = token.upper()
        if token == "(":
            opener.append(before.upper())
            listing.append(expected)
        elif token == ")":
            if len(opener) > 1:
                opener.pop()
                listing.pop()
            expected = False
        elif word == "JOIN" or (word == "FROM" and before.upper() != "DISTINCT" and opener[-1] not in _TAKES_FROM):
            listing[-1] = expected = True
        elif token == ",":
            expected = listing[-1]
        elif word in _ENDS_LIST:
            listing[-1] = expected = False
        elif expected:
            expected = False
            if after != "(" and (token.startswith("`") or not token[0].isdigit()):
                yield token.removeprefix("`")

"""Which channels a SQL text reads, told from its words: a description is made without Spark."""

import re
from collections.abc import Iterator

_TOKEN = re.compile(
    r"""(?P<skip>\s+|--[^\n]*|/\*.*?\*/|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|`(?P<quoted>[^`]+)`|(?P<word>\w+)|.""",
    re.DOTALL,
)
_TAKES_FROM = {"EXTRACT", "TRIM", "SUBSTRING", "SUBSTR", "OVERLAY"}
"""Functions in whose parentheses FROM begins no list of tables."""
_BEGINS = {"SELECT", "WITH", "FROM", "VALUES", "TABLE", "("}
_CHANGES: dict[str, tuple[str, ...]] = {"INSERT": ("INTO", "OVERWRITE"), "MERGE": ("INTO",), "UPDATE": (), "DELETE": ()}
_ENDS_LIST = {
    *("WHERE", "GROUP", "HAVING", "ORDER", "SORT", "CLUSTER", "DISTRIBUTE", "LIMIT", "OFFSET", "WINDOW", "QUALIFY"),
    *("UNION", "EXCEPT", "INTERSECT", "MINUS", "SELECT", "WITH", "LATERAL", "PIVOT", "UNPIVOT", "VALUES", "|"),
}


def tables(sql: str) -> tuple[str, ...]:
    """The names after FROM and JOIN, and in their lists, each once; without those that the text itself defines."""
    tokens = list(_tokens(sql))
    defined = [(name.lower(), end) for name, end in _defined(tokens)]
    # What a text defines hides a channel of that name from there on, not within its own definition.
    read = (name for name, at in _read(tokens) if not any(at > end and name.lower() == own for own, end in defined))
    return tuple(dict.fromkeys(read))


def selects(sql: str) -> bool:
    """Whether a text is a query. Spark would run any other statement at once, whatever it does."""
    words = [token.upper() for token in _tokens(sql)]
    return bool(words) and words[0] in _BEGINS and not _writes(words)


def _writes(words: list[str]) -> bool:
    """Whether what begins as a query goes on as a statement: `WITH x AS (…) DELETE …`, `FROM a INSERT INTO …`."""
    depth = 0
    for before, word, after in zip(["", *words], words, [*words[1:], ""], strict=False):
        depth += (word == "(") - (word == ")")
        # A column may have such a name, too; it stands elsewhere.
        if not depth and word in _CHANGES and (before == ")" or after in _CHANGES[word]):
            return True
    return False


def line_of(sql: str, name: str) -> int | None:
    """The first line that names something, as far as it is no comment."""
    for number, line in enumerate(sql.split("\n"), start=1):
        if name in (token.removeprefix("`") for token in _joined(list(_tokens(line)))):
            return number
    return None


def _tokens(sql: str) -> Iterator[str]:
    """The words and signs; a quoted name keeps one quote in front, so that it is no keyword."""
    for match in _TOKEN.finditer(sql):
        if match["quoted"]:
            yield f"`{match['quoted']}"
        elif not match["skip"]:
            yield match[0]


def _joined(tokens: list[str]) -> Iterator[str]:
    """The tokens, with the parts of a name between which there are dots as one."""
    name = ""
    for token, after in zip(tokens, [*tokens[1:], ""], strict=False):
        name += token.removeprefix("`") if name else token
        if token != "." and after != ".":
            yield name
            name = ""


def _defined(tokens: list[str]) -> Iterator[tuple[str, int]]:
    """The names of WITH clauses, `name AS (…)` or `name (columns) AS (…)`, and where each definition ends."""
    opened: list[tuple[int, str]] = []
    columns = ""
    for index, token in enumerate(tokens):
        if token == "(":
            named = index > 1 and tokens[index - 1].upper() == "AS"
            opened.append((index, (columns or tokens[index - 2].removeprefix("`")) if named else ""))
            columns = ""
        elif token == ")" and opened:
            start, name = opened.pop()
            if name:
                yield name, index
            if [word.upper() for word in tokens[index + 1 : index + 3]] == ["AS", "("]:
                columns = tokens[start - 1].removeprefix("`")


def _read(tokens: list[str]) -> Iterator[tuple[str, int]]:
    """The names in the places of tables, and where they stand. Before a parenthesis, a name is that of a function."""
    opener, listing, expected = [""], [False], False
    for index, (before, token, after) in enumerate(zip(["", *tokens], tokens, [*tokens[1:], ""], strict=False)):
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
            if after != "(" and (token[0].isalpha() or token[0] in "_`"):
                yield next(_joined(tokens[index:]), token).removeprefix("`"), index

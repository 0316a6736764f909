"""Finds the channels that a SQL text reads, with sqlglot, because no Spark runs yet."""

from collections.abc import Iterator
from functools import lru_cache

from sqlglot import Dialect, TokenType, exp
from sqlglot.errors import ParseError, SqlglotError

from penstock.core.errors import Misconfigured


def tables(location: str, sql: str) -> tuple[str, ...]:
    """The tables that a query reads, in the order of the text, without those that a WITH clause defines.

    Misconfigured if the text is not a query, because Spark would run any other statement immediately.
    """
    try:
        statement = _parsed(sql)
    except SqlglotError as error:
        fix = "correct it; if Spark accepts it, write it as a function of DataFrames"
        raise Misconfigured(location, f"its SQL cannot be parsed: {_reason(error)}", fix) from error
    if not isinstance(statement, exp.Query | exp.Values):
        raise Misconfigured(location, "its SQL is not a query", "begin with SELECT, WITH or FROM")
    found = sorted((table.this.meta.get("start", 0), _name(table)) for table in _read(statement))
    return tuple(dict.fromkeys(name for _, name in found))


def line_of(sql: str, name: str) -> int | None:
    """The first line that reads a table of this name."""
    found = [table.parts[0].meta["line"] for table in _read(_parsed(sql)) if _name(table) == name]
    return min(found, default=None)


@lru_cache
def _parsed(sql: str) -> exp.Expr | None:
    """The statement; None if there is none, or more than one."""
    spark = Dialect.get_or_raise("spark")
    tokens = spark.tokenize(sql)
    for at, token in enumerate(tokens):
        # `GROUP BY window(…)`: sqlglot parses the function as the clause `WINDOW name AS`.
        names = at + 2 < len(tokens) and tokens[at + 2].token_type is TokenType.ALIAS
        if token.token_type is TokenType.WINDOW and not names:
            token.token_type = TokenType.VAR
    statements = [one for one in spark.parser().parse(tokens, sql) if not isinstance(one, exp.Semicolon | None)]
    return statements[0] if len(statements) == 1 else None


def _read(statement: exp.Expr | None) -> Iterator[exp.Table]:
    for table in statement.find_all(exp.Table) if statement is not None else ():
        hinted = table.find_ancestor(exp.Hint) is not None
        if isinstance(table.this, exp.Identifier) and not hinted and not _is_defined(table):
            yield table


def _is_defined(table: exp.Table) -> bool:
    """Whether a WITH clause defines the table in this scope."""
    inner: exp.Expr | None = table
    names: set[str] = set()
    while inner is not None:
        outer = inner.parent
        if isinstance(outer, exp.With):
            names |= {one.alias.lower() for one in outer.expressions[: inner.index]}
        elif isinstance(outer, exp.Query) and not isinstance(inner, exp.With):
            names |= {one.alias.lower() for one in outer.ctes}
        inner = outer
    return _name(table).lower() in names


def _name(table: exp.Table) -> str:
    return ".".join(part.name for part in table.parts)


def _reason(error: SqlglotError) -> str:
    if isinstance(error, ParseError) and error.errors:
        first = error.errors[0]
        return f"line {first['line']}, column {first['col']}: {first['description']}"
    return str(error)

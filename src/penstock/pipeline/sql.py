"""SQL: the channels that a text reads, found with sqlglot because no Spark runs yet; and SQL files with options."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from sqlglot import Dialect, TokenType, exp
from sqlglot.errors import ParseError, SqlglotError

from penstock.core.errors import Misconfigured
from penstock.core.text import did_you_mean


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


SUFFIX = ".sql"
_OPTION = re.compile(r"--\s*([a-z][a-z_]*)\s*:\s*(.*)")


@dataclass(frozen=True)
class SqlFile:
    """A file with one query; the comments at its top document it and set its options.

    -- People who say yes, per city.
    -- key: city
    -- watermark: 30 seconds
    """

    path: Path
    label: str
    """The name of the file in messages."""
    text: str
    """The whole file, so that line numbers stay the same."""
    doc: str
    options: Mapping[str, str]
    lines: Mapping[str, int]
    """The line of each option."""

    def location(self, problem: str) -> str:
        """The file, with the line of the option whose value the problem quotes."""
        quoted = [line for option, line in self.lines.items() if f'"{self.options[option]}"' in problem]
        return f"{self.label}:{quoted[0]}" if quoted else self.label


def is_file(text: str) -> bool:
    """Whether a text is the name of a SQL file, not SQL."""
    return text.endswith(SUFFIX) and len(text.split()) == 1


def read_file(path: Path, label: str, accepted: Collection[str]) -> SqlFile:
    """Read a file and its options; Misconfigured with the line for an unknown option."""
    text = _text(path, label)
    options: dict[str, str] = {}
    lines: dict[str, int] = {}
    doc: list[str] = []
    for line, comment in _leading(text):
        if (match := _OPTION.fullmatch(comment)) is None:
            doc.append(comment.removeprefix("--").strip())
            continue
        option, value = match[1], match[2].strip()
        location = f"{label}:{line}"
        if option not in accepted:
            others = f"the options are {', '.join(sorted(accepted))}; other comments begin with a capital letter"
            fix = did_you_mean(option, accepted, others, '"{}:"')
            raise Misconfigured(location, f'a query has no option "{option}:"', fix)
        if option in options:
            raise Misconfigured(location, f'"{option}:" is there already, on line {lines[option]}', "keep one of them")
        if not value:
            raise Misconfigured(location, f'"{option}:" has no value', "write one, or remove the line")
        options[option], lines[option] = value, line
    return SqlFile(path, label, text, " ".join(filter(None, doc)), options, lines)


def list_files(path: Path, label: str) -> list[Path]:
    """The SQL files of a folder, in alphabetical order."""
    if not path.is_dir():
        raise Misconfigured(label, "there is no such folder", "name a folder beside the pipeline")
    # The names of temporary files of editors begin with a dot.
    found = sorted(one for one in path.glob(f"*{SUFFIX}") if not one.name.startswith(".") and one.is_file())
    if not found:
        raise Misconfigured(label, f"no file in it ends in {SUFFIX}", f"write one: NAME{SUFFIX}")
    return found


def _text(path: Path, label: str) -> str:
    try:
        # A file from Windows may begin with a byte order mark.
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except FileNotFoundError:
        raise Misconfigured(label, "there is no such file", f"it has to lie at {path.parent}") from None
    except UnicodeDecodeError as error:
        raise Misconfigured(label, f"it is not UTF-8: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise Misconfigured(label, f"it cannot be read: {error.strerror}") from error
    if "\0" in text:
        raise Misconfigured(label, "it contains a NUL character")
    return text


def _leading(text: str) -> Iterator[tuple[int, str]]:
    """The `--` comments before the first SQL keyword, with their line numbers."""
    within = False
    for number, line in enumerate(text.split("\n"), start=1):
        bare = line.strip()
        while bare and (within or bare.startswith("/*")):
            _, closed, bare = bare[0 if within else 2 :].partition("*/")
            within, bare = not closed, bare.strip()
        if bare:
            if not bare.startswith("--"):
                return
            yield number, bare

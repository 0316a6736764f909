"""SQL files: a query in SQL, with its options in the comments at the top.

    -- People who say yes, and the others, per city.
    -- key: city, response
    -- watermark: 30 seconds
    SELECT city, response, count(1) AS n, seen() FROM rsvps GROUP BY city, response

A comment that begins with a word in small letters and a colon sets an option; the others document the query.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.core.errors import Misconfigured
from penstock.core.text import did_you_mean

SUFFIX = ".sql"
_OPTION = re.compile(r"--\s*([a-z][a-z_]*)\s*:\s*(.*)")


@dataclass(frozen=True)
class SqlFile:
    """The content of a file."""

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

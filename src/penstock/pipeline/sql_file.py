"""Queries in files of their own: SQL, with its declaration in the comments at its top.

    -- People who say yes, and the others, per city.
    -- key: city, response
    -- watermark: 30 seconds
    SELECT city, response, count(1) AS n, seen() FROM rsvps GROUP BY city, response

A comment that begins with a word in small letters and a colon declares something; the others say what the query is for.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.core.errors import Misconfigured
from penstock.core.text import did_you_mean

SUFFIX = ".sql"
_DECLARES = re.compile(r"--\s*([a-z][a-z_]*)\s*:\s*(.*)")


@dataclass(frozen=True)
class SqlFile:
    """What a file says."""

    path: Path
    shown: str
    """The file, for people."""
    text: str
    """All of it, so that lines keep their numbers."""
    doc: str
    words: Mapping[str, str]
    lines: Mapping[str, int]
    """On which line each word stands."""

    def place(self, problem: str) -> str:
        """The file, with the line of the word whose value a problem quotes."""
        quoted = [line for word, line in self.lines.items() if f'"{self.words[word]}"' in problem]
        return f"{self.shown}:{quoted[0]}" if quoted else self.shown


def named(text: str) -> bool:
    """Whether a text is the name of a file with SQL, and not SQL itself."""
    return text.endswith(SUFFIX) and len(text.split()) == 1


def read(path: Path, shown: str, known: Collection[str]) -> SqlFile:
    """A file, and what it declares by the words that are known; Misconfigured with the line otherwise."""
    text = _text(path, shown)
    words: dict[str, str] = {}
    lines: dict[str, int] = {}
    told: list[str] = []
    for line, comment in _leading(text):
        if (match := _DECLARES.fullmatch(comment)) is None:
            told.append(comment.removeprefix("--").strip())
            continue
        word, value = match[1], match[2].strip()
        place = f"{shown}:{line}"
        if word not in known:
            others = f"the words are {', '.join(sorted(known))}; other comments begin with a capital letter"
            way_out = did_you_mean(word, known, others, '"{}:"')
            raise Misconfigured(place, f'a query declares nothing by "{word}:"', way_out)
        if word in words:
            raise Misconfigured(place, f'"{word}:" is there already, on line {lines[word]}', "keep one of them")
        if not value:
            raise Misconfigured(place, f'nothing stands after "{word}:"', "say it, or leave the line out")
        words[word], lines[word] = value, line
    return SqlFile(path, shown, text, " ".join(filter(None, told)), words, lines)


def folder(path: Path, shown: str) -> list[Path]:
    """The files with SQL in a folder, in alphabetical order."""
    if not path.is_dir():
        raise Misconfigured(shown, "there is no such folder", "name one that lies beside the pipeline")
    # Editors keep files of their own there, whose names begin with a dot.
    found = sorted(one for one in path.glob(f"*{SUFFIX}") if not one.name.startswith(".") and one.is_file())
    if not found:
        raise Misconfigured(shown, f"no file in it ends in {SUFFIX}", f"write one: NAME{SUFFIX}")
    return found


def _text(path: Path, shown: str) -> str:
    try:
        # A file from Windows may begin with a mark, which is not part of its first word.
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except FileNotFoundError:
        raise Misconfigured(shown, "there is no such file", f"it has to lie at {path.parent}") from None
    except UnicodeDecodeError as error:
        raise Misconfigured(shown, f"it is not UTF-8: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise Misconfigured(shown, f"it cannot be read: {error.strerror}") from error
    if "\0" in text:
        raise Misconfigured(shown, "it holds a NUL, and is no text")
    return text


def _leading(text: str) -> Iterator[tuple[int, str]]:
    """The comments before the first word of SQL, with the numbers of their lines; those between /* and */ left out."""
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

"""Standard input by lines, standard output by whole lines, JSON and tables."""

import json
import os
import select
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from threading import Event

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.core.errors import Misconfigured, Unavailable

_CHUNK = 1 << 16
_POLL = 0.2
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass
class Input:
    """Lines of an open file as they arrive. They end with a line feed, or a carriage return and a line feed.

    A line that is too long may be cut, but has more than `max_length` bytes. `prompt` is called before each read.
    """

    descriptor: int
    max_length: int
    prompt: Callable[[], None] | None = None
    name: str = "standard input"
    ended: bool = False
    """The end of the file was reached."""
    incomplete: bool = False
    """Reading was stopped within a line."""

    @classmethod
    def standard(cls, max_length: int, prompt: Callable[[], None]) -> "Input":
        """Standard input. On a terminal, `prompt` is called for each line."""
        if sys.stdin is None:
            raise Misconfigured("standard input", "it is closed", "give lines: a file, a pipe or a terminal")
        return cls(sys.stdin.fileno(), max_length, prompt if sys.stdin.isatty() else None)

    def batches(self, stop: Event) -> Iterator[Sequence[bytes]]:
        """Batches of lines until the end of the file or `stop`; an empty batch when no line arrived for a while.

        Lines that were complete before `stop` are returned; `incomplete` is set if there was a part of one more.
        """
        rest, first, asked = b"", True, False
        while not (self.ended or stop.is_set()):
            if self.prompt is not None and not asked:
                self.prompt()
            chunk = self._read()
            asked = chunk is None
            self.ended = chunk == b""
            *lines, rest = (rest + (chunk or b"")).split(b"\n")
            if self.ended and rest:
                lines, rest = [rest], b""
            # However long a line is, its start is enough to refuse it. The last byte can be a carriage return.
            rest = rest[: self.max_length + 2]
            if first and lines:
                lines[0], first = lines[0].removeprefix(_BYTE_ORDER_MARK), False
            yield [line.removesuffix(b"\r") for line in lines]
        self.incomplete = bool(rest)

    def _read(self) -> bytes | None:
        """A chunk, which is empty at the end of the file; None when there is none yet."""
        try:
            ready, _, _ = select.select([self.descriptor], [], [], _POLL)
            return os.read(self.descriptor, _CHUNK) if ready else None
        except OSError as error:
            raise Unavailable(self.name, error.strerror or str(error)) from error


class Output:
    """Standard output. Lines that fit into a pipe at once are written whole: several processes may share the pipe."""

    def __init__(self) -> None:
        if sys.stdout is None:
            raise Misconfigured("standard output", "it is closed", "give it a file, a pipe or a terminal")
        sys.stdout.flush()
        self.terminal = sys.stdout.isatty()
        self._out = sys.stdout.buffer
        self._poll: select.poll | None = None
        try:
            descriptor = self._out.fileno()
        except OSError:
            return  # It is not a file of the operating system.
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            self._poll = select.poll()
            self._poll.register(descriptor, 0)

    def write(self, lines: Iterable[bytes]) -> None:
        """Write and flush; BrokenPipeError when the reader has closed the pipe."""
        piece = bytearray()
        for line in lines:
            if piece and len(piece) + len(line) > select.PIPE_BUF:
                self._push(piece)
                piece.clear()
            piece += line
        if piece:
            self._push(piece)

    def _push(self, piece: bytearray) -> None:
        try:
            self._out.write(piece)
            self._out.flush()
        except BrokenPipeError:
            # Otherwise Python reports what is still in the buffer at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._out.fileno())
            raise
        except OSError as error:
            raise Unavailable("standard output", error.strerror or str(error)) from error

    def closed(self) -> bool:
        """Whether the reader has closed the pipe."""
        return self._poll is not None and bool(self._poll.poll(0))


def inform(text: str) -> None:
    """Print a message on standard error."""
    typer.echo(text, err=True)


def inform_start(text: str) -> None:
    """Print on standard error what starts now."""
    inform(f"{text} …")


def print_result(as_json: bool, document: object, parts: Iterable[str | Text | Table]) -> None:
    """Print a document for programs, or its parts for people: lines and tables.

    JSON is one line of ASCII: no character of it can control a terminal. Raises Unavailable if it cannot be written.
    """
    screen, text = console(), StringIO()
    # The width and the colours are those of the terminal.
    screen.file = text
    if not as_json:
        print_parts(parts, screen)
    try:
        typer.echo(json.dumps(document) if as_json else text.getvalue(), nl=as_json)
    except OSError as error:
        raise Unavailable("standard output", error.strerror or str(error)) from error


def print_parts(parts: Iterable[str | Text | Table], screen: Console) -> None:
    """Print lines, which are not wrapped because other programs may read them, and tables."""
    for part in parts:
        screen.print(part, soft_wrap=not isinstance(part, Table), crop=False)


def table(*columns: str, right: Iterable[int] = (), title: str | None = None) -> Table:
    """A table with these columns; those at the indexes `right` are aligned to the right."""
    made = Table(*columns, title=title, title_justify="left")
    for column in right:
        made.columns[column].justify = "right"
    return made


def console() -> Console:
    """The console for tables: as wide as the terminal, or wide enough for any table."""
    found = Console(highlight=False, markup=False, emoji=False)
    return found if found.is_terminal else Console(highlight=False, markup=False, emoji=False, width=180)

"""Standard input by lines, standard output by whole lines, and tables."""

import os
import select
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Event

import typer
from rich.console import Console
from rich.table import Table

from penstock.core.errors import Misconfigured, Unavailable

_CHUNK = 1 << 18
_BATCH = 5_000
_POLL = 0.2
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class LineSplitter:
    """Splits chunks of bytes into lines. It holds at most `max_length` bytes and a chunk, however long a line is."""

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length
        self._rest = b""
        self._first = True

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that end in this chunk. A line that is too long is cut to `max_length` + 1 bytes."""
        lines = chunk.split(b"\n")
        lines[0] = self._rest + lines[0]
        self._rest = lines.pop()[: self._max_length + 1]
        return self._without_mark(lines)

    def end(self) -> list[bytes]:
        """The last line, if it has no line feed."""
        rest, self._rest = self._rest, b""
        return self._without_mark([rest] if rest else [])

    def _without_mark(self, lines: list[bytes]) -> list[bytes]:
        if self._first and lines:
            lines[0] = lines[0].removeprefix(_BYTE_ORDER_MARK)
            self._first = False
        return lines


class Input:
    """Lines of an open file as they arrive. They end with a line feed, or a carriage return and a line feed."""

    def __init__(
        self, descriptor: int, max_length: int, prompt: Callable[[], None] | None = None, name: str = "standard input"
    ) -> None:
        self._descriptor, self._max_length, self._prompt, self._name = descriptor, max_length, prompt, name
        self.ended = False
        """The end of the file was reached."""
        self.incomplete = False
        """Reading was stopped within a line."""

    @classmethod
    def standard(cls, max_length: int, prompt: Callable[[], None]) -> "Input":
        """Standard input. On a terminal, `prompt` is called for each line."""
        if sys.stdin is None:
            raise Misconfigured("standard input", "it is closed", "give lines: a file, a pipe or a terminal")
        return cls(sys.stdin.fileno(), max_length, prompt if sys.stdin.isatty() else None)

    def batches(self, stop: Event) -> Iterator[Sequence[bytes]]:
        """Batches of lines until the end of the file or `stop`; an empty batch when no line arrived for a while.

        Lines that were complete before `stop` are returned; `incomplete` is set if there was a part of one more. A line
        that is too long is cut to `max_length` + 1 bytes.
        """
        lines, more = LineSplitter(self._max_length), True
        self._ask()
        while more and not stop.is_set():
            if (chunk := self._read()) is None:
                yield []
                continue
            more = bool(chunk)
            found = lines.feed(chunk) if more else lines.end()
            # A chunk without a complete line is a batch, too: the caller may have other work.
            for first in range(0, max(len(found), more), _BATCH):
                yield [line.removesuffix(b"\r") for line in found[first : first + _BATCH]]
            if more:
                self._ask()
        self.ended = not more
        self.incomplete = more and bool(lines.end())

    def _ask(self) -> None:
        if self._prompt is not None:
            self._prompt()

    def _read(self) -> bytes | None:
        """A chunk, which is empty at the end of the file; None when there is none yet."""
        try:
            ready, _, _ = select.select([self._descriptor], [], [], _POLL)
            return os.read(self._descriptor, _CHUNK) if ready else None
        except OSError as error:
            raise Unavailable(self._name, error.strerror or str(error)) from error


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


def console() -> Console:
    """The console for tables: as wide as the terminal, or wide enough for any table."""
    found = Console(highlight=False, markup=False)
    return found if found.is_terminal else Console(highlight=False, markup=False, width=180)


def print_table(table: Table, right: Iterable[int] = (), screen: Console | None = None) -> None:
    """Print a table, with these columns aligned to the right."""
    for column in right:
        table.columns[column].justify = "right"
    (screen or console()).print(table)

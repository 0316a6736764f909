"""Standard input by lines, standard output by whole lines, and the console for tables."""

import os
import select
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Event

from rich.console import Console

from penstock.core.errors import Misconfigured, Unavailable

_CHUNK = 1 << 18
_PORTION = 5_000
_PAUSE = 0.2
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Lines:
    """Cuts chunks of bytes into lines. What it holds stays below `longest` and a chunk, however long a line is."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._rest = b""
        self._new = True

    def cut(self, chunk: bytes) -> list[bytes]:
        """The lines that end in this chunk. Of a line that is too long comes its beginning: `longest` and one more."""
        lines = chunk.split(b"\n")
        lines[0] = self._rest + lines[0]
        self._rest = lines.pop()[: self._longest + 1]
        return self._marked_off(lines)

    def end(self) -> list[bytes]:
        """The line that the end of the stream ends, if there is one."""
        rest, self._rest = self._rest, b""
        return self._marked_off([rest] if rest else [])

    def _marked_off(self, lines: list[bytes]) -> list[bytes]:
        if self._new and lines:
            lines[0] = lines[0].removeprefix(_BYTE_ORDER_MARK)
            self._new = False
        return lines


class Input:
    """Lines of an open file, as they come. They end with a line feed, which a carriage return may precede."""

    def __init__(
        self, descriptor: int, longest: int, ask: Callable[[], None] | None = None, name: str = "standard input"
    ) -> None:
        self._descriptor, self._longest, self._ask, self._name = descriptor, longest, ask, name
        self.ended = False
        """It was read to its end."""
        self.torn = False
        """A line was begun when it was stopped: nobody knows what it would have been."""

    @classmethod
    def standard(cls, longest: int, ask: Callable[[], None]) -> "Input":
        """Standard input; on a terminal, a person is asked for each line."""
        if sys.stdin is None:
            raise Misconfigured("standard input", "it is closed", "give lines: a file, a pipe or a terminal")
        return cls(sys.stdin.fileno(), longest, ask if sys.stdin.isatty() else None)

    def portions(self, stop: Event) -> Iterator[Sequence[bytes]]:
        """Some lines at a time, none when nothing came for a while, until the end of the file or until `stop` is set.

        Whole lines that were read before are told; `torn` says whether there was half a one behind them. Of a line that
        is too long comes enough to see that it is.
        """
        lines, more = Lines(self._longest), True
        self._prompt()
        while more and not stop.is_set():
            if (chunk := self._read()) is None:
                yield []
                continue
            more = bool(chunk)
            found = lines.cut(chunk) if more else lines.end()
            # A chunk without an end of line is a portion, too: the caller has its turn.
            for first in range(0, max(len(found), more), _PORTION):
                yield [line.removesuffix(b"\r") for line in found[first : first + _PORTION]]
            if more:
                self._prompt()
        self.ended = not more
        # What is stopped ends anywhere; half a line is none.
        self.torn = more and bool(lines.end())

    def _prompt(self) -> None:
        if self._ask is not None:
            self._ask()

    def _read(self) -> bytes | None:
        """A chunk, which is empty at the end; None when there is none yet."""
        try:
            ready, _, _ = select.select([self._descriptor], [], [], _PAUSE)
            return os.read(self._descriptor, _CHUNK) if ready else None
        except OSError as error:
            raise Unavailable(self._name, error.strerror or str(error)) from error


class Output:
    """Standard output. Several processes may share a pipe: lines that fit into it at once are never torn."""

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
            return  # It is no file of the system's.
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            self._poll = select.poll()
            self._poll.register(descriptor, 0)

    def write(self, lines: Iterable[bytes]) -> None:
        """Return once all lines are out of this process; BrokenPipeError when nobody reads them any more."""
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
            # What is still in the buffer would be complained about when Python ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._out.fileno())
            raise
        except OSError as error:
            raise Unavailable("standard output", error.strerror or str(error)) from error

    def gone(self) -> bool:
        """Nobody reads it any more."""
        return self._poll is not None and bool(self._poll.poll(0))


def console() -> Console:
    """The console for tables: as wide as the terminal, and wide enough for any table where there is none."""
    found = Console(highlight=False, markup=False)
    return found if found.is_terminal else Console(highlight=False, markup=False, width=180)

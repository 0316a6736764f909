"""What a target is: a function that takes any bytes, and fails when what has to hold for them does not."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=Exception)

Check = Callable[[bytes], None]


@dataclass(frozen=True)
class Target:
    """`seeds`: inputs to begin with, from which others are made."""

    check: Check
    seeds: tuple[bytes, ...]


TARGETS: dict[str, Target] = {}
"""By name. Filled when the modules are imported that hold them."""


def target(*seeds: bytes) -> Callable[[Check], Check]:
    def kept(check: Check) -> Check:
        TARGETS[check.__name__] = Target(check, seeds)
        return check

    return kept


_NUMBERS = (
    *("0", "1", "-1", "7", "1.5", "1e2", "-0", "1e400", "NaN", "-Infinity"),
    *("9007199254740993", "9223372036854775807", "9223372036854775808", "18446744073709551616", "9" * 40),
)


class Given:
    """Choices and parts, one after the other, from the bytes of an input. When they end, all is 0 or empty."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> bool:
        return self._at < len(self._data)

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def among(self, choices: Sequence[T]) -> T:
        return choices[self.byte() % len(choices)]

    def some(self) -> bytes:
        """A byte tells how many."""
        size = self.byte()
        self._at += size
        return self._data[self._at - size : self._at]

    def rest(self) -> bytes:
        found, self._at = self._data[self._at :], max(self._at, len(self._data))
        return found

    def text(self) -> str:
        return self.some().decode(errors="replace")

    def json(self, words: Sequence[str], depth: int = 4) -> bytes:
        """A JSON text, or something near one. The words are names, and strings."""
        kind = self.byte() % (9 if depth else 7)
        match kind:
            case 0:
                return self.some()
            case 1:
                return self.among((b"null", b"true", b"false"))
            case 2 | 3:
                return self.among(_NUMBERS).encode()
            case 4 | 5:
                return b'"%s"' % self.among(words).encode()
            case 6:
                return b'"%s"' % self.some()
            case 7:
                return b"[%s]" % b",".join(self.json(words, depth - 1) for _ in range(self.byte() % 5))
        members = [(self.among(words), self.json(words, depth - 1)) for _ in range(self.byte() % 8)]
        return b"{%s}" % b", ".join(b'"%s": %s' % (name.encode(), value) for name, value in members)


def part(text: bytes) -> bytes:
    """For a seed: what `some` gives as it is."""
    return bytes([len(text)]) + text


def raw(text: bytes) -> bytes:
    """For a seed: what `json` gives as it is."""
    return b"\0" + part(text)


def tried(work: Callable[[], T], error: type[E]) -> T | E:
    """What it gives, or the one error that it may raise."""
    try:
        return work()
    except error as raised:
        return raised


def pieces(stream: bytes, sizes: bytes) -> Iterator[bytes]:
    """The stream, cut into pieces of these sizes; what is left comes at once."""
    at = 0
    for size in sizes:
        yield stream[at : at + size]
        at += size
    yield stream[at:]


@contextmanager
def small(module: ModuleType, **bounds: int) -> Iterator[None]:
    """For a while these bounds are so small that small inputs reach them."""
    before = {name: getattr(module, name) for name in bounds}
    for name, bound in bounds.items():
        setattr(module, name, bound)
    try:
        yield
    finally:
        for name, bound in before.items():
            setattr(module, name, bound)

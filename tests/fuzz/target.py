"""Fuzz targets: functions that take any bytes, and fail if a property does not hold for them."""

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
    """`seeds`: the first inputs, from which others are derived."""

    check: Check
    seeds: tuple[bytes, ...]


TARGETS: dict[str, Target] = {}
"""By name; filled when their modules are imported."""


def target(*seeds: bytes) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        TARGETS[check.__name__] = Target(check, seeds)
        return check

    return register


_NUMBERS = (
    *("0", "1", "-1", "7", "1.5", "1e2", "-0", "1e400", "NaN", "-Infinity"),
    *("9007199254740993", "9223372036854775807", "9223372036854775808", "18446744073709551616", "9" * 40),
)


class Input:
    """Values read from the bytes of an input, one after the other. At its end, they are 0 or empty."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> bool:
        return self._at < len(self._data)

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def choose(self, choices: Sequence[T]) -> T:
        return choices[self.byte() % len(choices)]

    def sized(self) -> bytes:
        """Bytes, their number first."""
        size = self.byte()
        self._at += size
        return self._data[self._at - size : self._at]

    def rest(self) -> bytes:
        found, self._at = self._data[self._at :], max(self._at, len(self._data))
        return found

    def text(self) -> str:
        return self.sized().decode(errors="replace")

    def json(self, names: Sequence[str], depth: int = 4) -> bytes:
        """JSON text, or almost. `names` are member names and strings."""
        kind = self.byte() % (9 if depth else 7)
        match kind:
            case 0:
                return self.sized()
            case 1:
                return self.choose((b"null", b"true", b"false"))
            case 2 | 3:
                return self.choose(_NUMBERS).encode()
            case 4 | 5:
                return b'"%s"' % self.choose(names).encode()
            case 6:
                return b'"%s"' % self.sized()
            case 7:
                return b"[%s]" % b",".join(self.json(names, depth - 1) for _ in range(self.byte() % 5))
        members = [(self.choose(names), self.json(names, depth - 1)) for _ in range(self.byte() % 8)]
        return b"{%s}" % b", ".join(b'"%s": %s' % (name.encode(), value) for name, value in members)


def part(text: bytes) -> bytes:
    """For a seed: the input of `sized`."""
    return bytes([len(text)]) + text


def raw(text: bytes) -> bytes:
    """For a seed: the input of `json` that gives this text."""
    return b"\0" + part(text)


def result_or_error(work: Callable[[], T], error: type[E]) -> T | E:
    """The result, or the one error that it may raise."""
    try:
        return work()
    except error as raised:
        return raised


def chunks_of(stream: bytes, sizes: bytes) -> Iterator[bytes]:
    """Cut the stream into chunks of these sizes, and the rest."""
    at = 0
    for size in sizes:
        yield stream[at : at + size]
        at += size
    yield stream[at:]


@contextmanager
def limits(module: ModuleType, **bounds: int) -> Iterator[None]:
    """Set lower limits for the context, so that small inputs reach them."""
    before = {name: getattr(module, name) for name in bounds}
    for name, bound in bounds.items():
        setattr(module, name, bound)
    try:
        yield
    finally:
        for name, bound in before.items():
            setattr(module, name, bound)

"""Channels that behave oddly when they are read to their end."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.core.contracts import Entry, Offsets, Reader
from penstock.core.errors import Unavailable
from penstock.testing import MemoryChannels


class Mute(MemoryChannels):
    """Says that it holds five more than it has, and does not give them; it may go away."""

    away = False

    def bounds(self, channel: str) -> Mapping[int, tuple[int, int]]:
        if self.away:
            raise Unavailable("Kafka", "it went away")
        return {partition: (low, high + 5) for partition, (low, high) in super().bounds(channel).items()}

    @contextmanager
    def reader(self, *how: Any, **more: Any) -> Iterator[Any]:
        with super().reader(*how, **more) as reader:
            yield _Impatient(reader)


class Marked(MemoryChannels):
    """Ends with three offsets that hold no record, as the marks of a transaction do; readers get over them."""

    def bounds(self, channel: str) -> Mapping[int, tuple[int, int]]:
        return {partition: (low, high + 3) for partition, (low, high) in super().bounds(channel).items()}

    @contextmanager
    def reader(self, *how: Any, **more: Any) -> Iterator[Any]:
        with super().reader(*how, **more) as reader:
            yield _GettingOver(reader)


class _Impatient:
    """Does not wait for what never comes."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def read(self, most: int, wait: float) -> Sequence[Entry]:
        return self._reader.read(most, 0)

    def positions(self, channel: str) -> Offsets:
        return self._reader.positions(channel)

    def age(self) -> float:
        return self._reader.age()


class _GettingOver(_Impatient):
    """Moves over the marks when nothing else is left."""

    _over = 0

    def read(self, most: int, wait: float) -> Sequence[Entry]:
        entries = super().read(most, wait)
        if not entries:
            self._over = 3
        return entries

    def positions(self, channel: str) -> Offsets:
        return {partition: offset + self._over for partition, offset in super().positions(channel).items()}

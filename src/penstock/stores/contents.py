"""What stores hold, read back to be compared."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from penstock.core.contracts import Positions


@dataclass(frozen=True, slots=True)
class Stored:
    """A row as a store holds it; None when it is deleted. Key and version are None where the store keeps none."""

    row: bytes | None
    key: bytes | None = None
    version: int | None = None


class Contents(Protocol):
    """A store that can be read back, by its description: one that is not there is not made by looking."""

    def stands(self) -> Positions:
        """How far it was filled; nowhere when it is not there."""

    def rows(self) -> Iterator[Stored]:
        """Every row that it holds: of a live table the newest of each key, of a lake all, in the channel's order."""

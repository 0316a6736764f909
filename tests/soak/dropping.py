"""A store that loses one entry: as any other, but for that."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from penstock.audit.account import Share
from penstock.core.contracts import Entry, Offsets
from penstock.stores.redis import RedisStore, RedisTable


@dataclass(frozen=True)
class Dropping:
    store: RedisStore
    lost: Callable[[Entry], bool]

    @property
    def every(self) -> timedelta:
        return self.store.every

    def open(self) -> "DroppingTable":
        return DroppingTable(self.store.open(), self.lost)


class DroppingTable:
    def __init__(self, table: RedisTable, lost: Callable[[Entry], bool]) -> None:
        self._table = table
        self._lost = lost

    @property
    def generation(self) -> str:
        return self._table.generation

    def begin(self, start: Offsets) -> None:
        self._table.begin(start)

    def share(self) -> Share:
        return self._table.share()

    def positions(self) -> Offsets:
        return self._table.positions()

    def write(self, entries: Sequence[Entry], positions: Offsets) -> int:
        return self._table.write([entry for entry in entries if not self._lost(entry)], positions)

    def close(self) -> None:
        self._table.close()

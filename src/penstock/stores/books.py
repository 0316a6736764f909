"""The last account of a store: looked up by the loader's thread, told to any other."""

from penstock.audit.account import Account, Share
from penstock.core.clock import Clock, Micros
from penstock.core.contracts import Store
from penstock.stores.totals import Accounting

_EVERY = 1.0
"""Seconds between two looks while rows are written: asking the store costs a round trip."""


class Books:
    def __init__(self, channel: str, clock: Clock) -> None:
        self._channel = channel
        self._clock = clock
        self._last: tuple[str, Micros, Share] | None = None
        self._behind = False
        self._due = 0.0

    def look(self, store: Store | Accounting) -> None:
        """Ask the store now. What it said before keeps its time."""
        if isinstance(store, Accounting):
            share, life = store.share(), store.life
            if self._last is None or (self._last[0], self._last[2]) != (life, share):
                self._last = life, self._clock.now(), share
        self._behind = False
        self._due = self._clock.elapsed() + _EVERY

    def wrote(self) -> None:
        self._behind = True

    def keep_up(self, store: Store) -> None:
        """Ask the store if it has been written to, and not more than once in a second."""
        if self._behind and self._clock.elapsed() >= self._due:
            self.look(store)

    def account(self, stage: str) -> Account | None:
        """None until the store was asked, and for one that keeps no totals."""
        if (last := self._last) is None:
            return None
        life, at, share = last
        return Account(stage, life, at, {self._channel: share}, step=share.taken)

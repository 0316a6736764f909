"""The account of a store, and the figures of its loader."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Protocol, runtime_checkable

from penstock.audit.account import Account, Outcome, Share
from penstock.audit.findings import time_of
from penstock.core.clock import Clock, Micros
from penstock.core.contracts import Entry, Offsets, Store
from penstock.core.metrics import Rate, RecentSketch

OUTCOMES = (Outcome.PASSED, Outcome.DUPLICATE, Outcome.REFUSED)
"""The possible outcomes of an entry at a store."""


@runtime_checkable
class AccountingStore(Protocol):
    """An opened store that writes its totals in the same transaction as its offsets."""

    @property
    def generation(self) -> str:
        """Changes when the store is emptied."""

    def begin(self, start: Offsets) -> None:
        """Set the offsets where reading starts: an unread partition is counted from there."""

    def share(self) -> Share:
        """Return the totals that the store holds."""


@dataclass(frozen=True, slots=True)
class Totals:
    """The totals of a store, and its offsets. A store without totals counts from its current offsets."""

    stands: Offsets = field(default_factory=dict)
    since: Offsets = field(default_factory=dict)
    taken: int = 0
    outcomes: Mapping[Outcome, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))

    def share(self, start: Offsets) -> Share:
        until = {number: self.stands.get(number) or start.get(number, 0) for number in self.stands.keys() | start}
        since = {number: self.since.get(number, at) if self.stands.get(number) else at for number, at in until.items()}
        return Share(since, until, self.taken, self.outcomes)

    def after(self, reached: Offsets, start: Offsets, outcomes: Mapping[Outcome, int]) -> "Totals":
        """Return the totals after one more batch up to the offsets `reached`."""
        since = self.share({**dict.fromkeys(reached, 0), **start}).since
        return Totals(
            reached,
            {number: since[number] for number in reached},
            self.taken + sum(outcomes.values()),
            {outcome: self.outcomes[outcome] + outcomes.get(outcome, 0) for outcome in OUTCOMES},
        )


_EVERY = 1.0
"""Seconds between two requests while rows are written: each costs a round trip."""


class StoreAccounting:
    """The last account of a store. The loader's thread updates it; any thread may read it."""

    def __init__(self, channel: str, clock: Clock) -> None:
        self._channel = channel
        self._clock = clock
        self._last: tuple[str, Micros, Share] | None = None
        self._behind = False
        self._due = 0.0

    def look(self, store: Store | AccountingStore) -> None:
        """Read the totals of the store now. An unchanged account keeps its time."""
        if isinstance(store, AccountingStore):
            share, generation = store.share(), store.generation
            if self._last is None or (self._last[0], self._last[2]) != (generation, share):
                self._last = generation, self._clock.now(), share
        self._behind = False
        self._due = self._clock.elapsed() + _EVERY

    def wrote(self) -> None:
        self._behind = True

    def keep_up(self, store: Store) -> None:
        """Read the totals if the store was written to, at most once per second."""
        if self._behind and self._clock.elapsed() >= self._due:
            self.look(store)

    def account(self, stage: str) -> Account | None:
        """Return the last account; None before the first, and for a store without totals."""
        if (last := self._last) is None:
            return None
        generation, at, share = last
        return Account(stage, generation, at, {self._channel: share}, step=share.taken)


class Figures:
    """The figures of a loader. Its thread counts; any thread may read."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = Lock()
        self._rows = Rate(clock)
        self._refused = self._lag = 0
        self._latency = RecentSketch(clock)
        self._state, self._why = "starting", ""

    def wrote(self, entries: Sequence[Entry], rows: int, refused: int) -> None:
        now = self._clock.now()
        times = [time for entry in entries if (time := time_of(entry.headers)) is not None]
        with self._lock:
            self._rows.add(rows)
            self._refused += refused
            self._lag = max(0, self._lag - len(entries))
            for time in times:
                self._latency.add((now - time) / 1_000)

    def stored(self, count: int, rows: int, refused: int, time: Micros | None) -> None:
        """Count a written batch; `time` is when its newest record was sent."""
        now = self._clock.now()
        with self._lock:
            self._rows.add(rows)
            self._refused += refused
            self._lag = max(0, self._lag - count)
            if time is not None:
                self._latency.add((now - time) / 1_000)

    def set_lag(self, behind: int) -> None:
        with self._lock:
            self._lag = behind

    def set_state(self, state: str, why: str = "") -> None:
        with self._lock:
            self._state, self._why = state, why

    def to_json(self) -> dict[str, Any]:
        with self._lock:
            return {
                "count": self._rows.count,
                "rate": self._rows.per_second(),
                "lag": self._lag,
                "refused": self._refused,
                "latency": self._latency.summary(),
                "state": self._state,
                "why": self._why,
            }

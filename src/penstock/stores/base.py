"""The common parts of all stores: their interface, their totals, and the progress of what fills them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Lock
from typing import Any, Protocol

from penstock.audit.account import Account, Outcome, Share
from penstock.core.clock import Clock, Micros
from penstock.core.contracts import Entry, Offsets
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.metrics import Rate, RecentSketch
from penstock.core.record import Headers

OUTCOMES = (Outcome.PASSED, Outcome.DUPLICATE, Outcome.REFUSED)
"""The possible outcomes of an entry at a store."""


class Store(Protocol):
    """An opened store: a table that is filled from a channel, by one loader at a time."""

    @property
    def generation(self) -> str:
        """Changes when the store is emptied."""

    def begin(self, start: Offsets) -> None:
        """Set the offsets where reading starts: an unread partition is counted from there."""

    def positions(self) -> Offsets:
        """Return the next offsets to load, as stored in the database."""

    def share(self) -> Share:
        """Return the totals that the store holds."""

    def write(self, entries: Sequence[Entry], positions: Offsets) -> int:
        """Write entries, next offsets and totals in one transaction; return the number of new rows.

        Writing the same entries again changes nothing.
        """

    def close(self) -> None: ...


class Loadable(Protocol):
    """The description of a store that a loader can fill."""

    @property
    def every(self) -> timedelta:
        """How long entries are collected before they are written together."""

    def open(self) -> Store: ...


@dataclass(frozen=True, slots=True)
class Stored:
    """A row of a store; None if it is deleted. Key and version are None if the store does not keep them."""

    row: bytes | None
    key: bytes | None = None
    version: int | None = None


class Contents(Protocol):
    """A store whose rows can be read. Reading does not create a store."""

    def stands(self) -> Offsets:
        """Return the offsets up to which it was filled; empty if it does not exist."""

    def rows(self) -> Iterator[Stored]:
        """Yield its rows: of a live table the newest of each key, of a lake all, in the order of the channel."""


def furthest(stands: Offsets, positions: Offsets) -> dict[int, int]:
    """Return the higher of both offsets for each partition."""
    return {**stands, **{partition: max(offset, stands.get(partition, 0)) for partition, offset in positions.items()}}


def version_of(headers: Headers) -> int | None:
    """Return the version of a result row; None if there is none of 64 bits."""
    value = next((value for name, value in headers if name == "version"), None)
    try:
        version = None if value is None else int(value)
    except ValueError:
        return None
    return version if version is not None and -(2**63) <= version < 2**63 else None


def require_kept(who: str, acknowledged: Offsets, stands: Offsets) -> None:
    """Raise Unavailable if a store lost rows that it had acknowledged: it must be filled again from its offsets."""
    for partition, offset in acknowledged.items():
        if stands.get(partition, 0) < offset:
            raise Unavailable(who, f"it went back from {offset} to {stands.get(partition, 0)} in partition {partition}")


def require_topic(who: str, channel: str, remembered: str | None, topic_id: str, fix: str) -> None:
    """Raise Misconfigured if a store was filled from another topic with the same name."""
    if topic_id and remembered and remembered != topic_id:
        raise Misconfigured(
            who, f"it was filled from another topic named {channel} ({remembered}, now {topic_id})", fix
        )


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


class Progress:
    """The account and the figures of what fills a store. One thread updates them; any thread may read."""

    def __init__(self, channel: str, clock: Clock) -> None:
        self._channel, self._clock, self._lock = channel, clock, Lock()
        self._rows, self._latency = Rate(clock), RecentSketch(clock)
        self._refused = self._lag = 0
        self._state, self._why = "starting", ""
        self._totals: tuple[Micros, Share, str] | None = None

    def stored(self, count: int, rows: int, refused: int, times: Iterable[Micros]) -> None:
        """Count a written batch; `times` are those at which its records were sent, or only the newest."""
        now = self._clock.now()
        with self._lock:
            self._rows.add(rows)
            self._refused += refused
            self._lag = max(0, self._lag - count)
            for time in times:
                self._latency.add((now - time) / 1_000)

    def set_totals(self, share: Share, generation: str) -> None:
        """Set what the store reports."""
        self._totals = self._clock.now(), share, generation

    def set_lag(self, behind: int) -> None:
        with self._lock:
            self._lag = behind

    def set_state(self, state: str, why: str = "") -> None:
        with self._lock:
            self._state, self._why = state, why

    def account(self, stage: str) -> Account | None:
        """Return the account of the store, as it was last reported; None before that."""
        if (totals := self._totals) is None:
            return None
        at, share, generation = totals
        with self._lock:
            latency = self._latency.summary()
        return Account(stage, generation, at, {self._channel: share}, step=share.taken, latency=latency)

    def to_json(self) -> dict[str, Any]:
        """Return count (of rows), rate (per second), lag, refused, latency (in ms), state, and why it waits."""
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

"""What a store counts: where counting began, how many entries it took, and what became of them. No I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from penstock.audit.account import Outcome, Share
from penstock.core.contracts import Positions

OUTCOMES = (Outcome.PASSED, Outcome.DUPLICATE, Outcome.REFUSED)
"""What can become of an entry at a store."""


@runtime_checkable
class Accounting(Protocol):
    """An opened store that keeps its totals in the same transaction as its positions."""

    @property
    def life(self) -> str:
        """Another one when the store was emptied."""

    def begin(self, start: Positions) -> None:
        """Where reading starts: a partition of which nothing was loaded yet is counted from there."""

    def share(self) -> Share:
        """The totals, as the store itself remembers them."""


@dataclass(frozen=True, slots=True)
class Totals:
    """The totals beside the positions. A store that was filled before it counted counts from where it stood."""

    stands: Positions = field(default_factory=dict)
    since: Positions = field(default_factory=dict)
    taken: int = 0
    outcomes: Mapping[Outcome, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))

    def share(self, start: Positions) -> Share:
        until = {number: self.stands.get(number) or start.get(number, 0) for number in self.stands.keys() | start}
        since = {number: self.since.get(number, at) if self.stands.get(number) else at for number, at in until.items()}
        return Share(since, until, self.taken, self.outcomes)

    def after(self, reached: Positions, start: Positions, outcomes: Mapping[Outcome, int]) -> "Totals":
        """With one more batch, after which the store stands at `reached`."""
        since = self.share({**dict.fromkeys(reached, 0), **start}).since
        return Totals(
            reached,
            {number: since[number] for number in reached},
            self.taken + sum(outcomes.values()),
            {outcome: self.outcomes[outcome] + outcomes.get(outcome, 0) for outcome in OUTCOMES},
        )

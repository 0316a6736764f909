"""What a stage says about itself: how far it has read each channel, and what became of the records.

An account is kept where the stage keeps its positions, so that both survive a crash together. It is told in the channel
of bookmarks under the stage's name: the last one says it all. No I/O.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from penstock.core.clock import Micros
from penstock.core.contracts import Offsets
from penstock.core.errors import Refused


class Outcome(StrEnum):
    """What became of a record at a stage. The sum over all of them is what the stage has taken."""

    PASSED = "passed"
    FILTERED = "filtered"
    """The query was declared not to want it."""
    LATE = "late"
    """Its window was closed when it came."""
    DUPLICATE = "duplicate"
    """It was there already."""
    REFUSED = "refused"
    """It does not fit, and lies in the dead letters."""
    SHED = "shed"
    """It was dropped on purpose, because there was too much."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a stage did with one of the channels that it reads: since when, how far, and what became of it."""

    since: Offsets
    until: Offsets
    taken: int
    outcomes: Mapping[Outcome, int] = field(default_factory=dict)
    late: Mapping[str, Mapping[str, list[tuple[int, int]]]] = field(default_factory=dict)
    """The first late records, by sender, epoch (as text) and runs of numbers."""
    late_at: Mapping[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Where the first late records lie: by partition (as text), runs of offsets."""

    @property
    def all_late_at(self) -> bool:
        """Whether it is known of each late record where it lies."""
        known = sum(last - first + 1 for runs in self.late_at.values() for first, last in runs)
        # What its function leaves out by itself may lie among them.
        return known >= self.outcomes.get(Outcome.LATE, 0)


@dataclass(frozen=True, slots=True)
class Account:
    """Totals of one life of a stage. A stage that begins anew, such as a query without its checkpoint, has another."""

    stage: str
    """As in the graph of the pipeline: `query:by_country`, `store:redis/by_country`, …"""
    generation: str
    at: Micros
    shares: Mapping[str, Share]
    """By channel."""
    step: int = 0
    """Grows within a life: of two accounts, the higher one is the later."""
    wrote: Mapping[str, Offsets] = field(default_factory=dict)
    """The ends of the channels that it writes, looked up after what is told here was written."""
    conserved: bool = False
    """Each record that passed is counted in exactly one row of the result."""
    guessed: bool = False
    """Some of it was counted from the log without knowing what was late then."""
    latency: Mapping[str, float] | None = None
    """From the sender to here, of the last minutes, in ms: count, min, mean, p50, p95, p99, max. Of what leaves the
    pipeline; how long results took is in their channel."""
    number: int = 0
    """Of a query: how many lives it had before this one, as the versions of its rows tell it."""
    start_declared: bool = False
    """It was declared to begin at certain offsets, and not at the beginning of its channels."""

    @property
    def key(self) -> bytes:
        return self.stage.encode()

    def dumps(self) -> bytes:
        return json.dumps(
            {
                "life": self.generation,
                "at": self.at,
                "step": self.step,
                "conserved": self.conserved,
                "wrote": self.wrote,
                "guessed": self.guessed,
                "latency": self.latency,
                "number": self.number,
                "start_declared": self.start_declared,
                "shares": {channel: asdict(one) for channel, one in self.shares.items()},
            },
            ensure_ascii=False,
        ).encode()

    @classmethod
    def of(cls, key: bytes, value: bytes) -> "Account":
        """Refused when it cannot be read."""
        try:
            told = json.loads(value)
            return cls(
                key.decode(),
                str(told["life"]),
                int(told["at"]),
                {str(channel): _share(share) for channel, share in told["shares"].items()},
                int(told["step"]),
                {str(channel): _positions(ends) for channel, ends in told["wrote"].items()},
                bool(told["conserved"]),
                bool(told.get("guessed", False)),
                {str(name): float(value) for name, value in (told.get("latency") or {}).items()} or None,
                int(told.get("number", 0)),
                bool(told.get("start_declared", False)),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Refused("an account", f"it cannot be read: {error!r}") from error


def is_account(key: bytes | None) -> bool:
    """Whether an entry of the bookmarks is an account: names of stages hold a colon, names of sources never.

    Those of announcements do, too, see `audit.writers`.
    """
    return key is not None and b":" in key and not key.startswith(b"writer:")


def _share(told: Mapping[str, Any]) -> Share:
    outcomes = {Outcome(name): int(number) for name, number in told["outcomes"].items()}
    late = {
        str(sender): {
            str(int(epoch)): [(int(first), int(last)) for first, last in runs] for epoch, runs in epochs.items()
        }
        for sender, epochs in told.get("late", {}).items()
    }
    late_at = {
        str(int(partition)): [(int(first), int(last)) for first, last in runs]
        for partition, runs in told.get("late_at", {}).items()
    }
    return Share(_positions(told["since"]), _positions(told["until"]), int(told["taken"]), outcomes, late, late_at)


def _positions(told: Mapping[str, Any]) -> Offsets:
    return {int(partition): int(offset) for partition, offset in told.items()}

"""The account of a stage: how far it has read each channel, and the outcome of each record.

A stage stores its account with its offsets, so that both survive a crash. It sends the account to the channel of
bookmarks, with the name of the stage as the key: the last account replaces all earlier ones. No I/O.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from pydantic import Field, TypeAdapter

from penstock.core.clock import Micros
from penstock.core.contracts import Offsets
from penstock.core.errors import Refused


class Outcome(StrEnum):
    """The outcome of a record at a stage. The sum over all outcomes is the number of records that the stage read."""

    PASSED = "passed"
    FILTERED = "filtered"
    """The filter of the query does not select it."""
    LATE = "late"
    """Its window was closed when it arrived."""
    DUPLICATE = "duplicate"
    """The stage had it already."""
    REFUSED = "refused"
    """It does not fit the schema, and is in the dead letters."""
    SHED = "shed"
    """It was dropped on purpose, because of overload."""


_Number = Annotated[str, Field(pattern=r"^-?\d+$")]


@dataclass(frozen=True, slots=True)
class Share:
    """The part of an account about one channel: from which offsets, up to which, and the outcomes."""

    since: Offsets
    until: Offsets
    taken: int
    outcomes: Mapping[Outcome, int] = field(default_factory=dict)
    late: Mapping[str, Mapping[_Number, list[tuple[int, int]]]] = field(default_factory=dict)
    """The first late records, by sender, epoch (as text) and runs of numbers."""
    late_at: Mapping[_Number, list[tuple[int, int]]] = field(default_factory=dict)
    """The offsets of the first late records: runs by partition (as text)."""

    @property
    def all_late_at(self) -> bool:
        """Whether `late_at` holds the offset of each late record."""
        count = sum(last - first + 1 for runs in self.late_at.values() for first, last in runs)
        # Records that the query's own function drops can be among them.
        return count >= self.outcomes.get(Outcome.LATE, 0)


@dataclass(frozen=True, slots=True)
class Account:
    """The totals of one generation of a stage. A query with a new checkpoint starts another generation."""

    stage: str
    """As in the graph of the pipeline: `query:by_country`, `store:redis/by_country`, …"""
    generation: Annotated[str, Field(alias="life")]
    at: Micros
    shares: Mapping[str, Share]
    """By channel."""
    step: int = 0
    """Increases within a generation: of two accounts, the higher one is the later one."""
    wrote: Mapping[str, Offsets] = field(default_factory=dict)
    """The end offsets of the channels that it writes, read after the results of these records were written."""
    conserved: bool = False
    """Each record that passed is counted in exactly one row of the result."""
    guessed: bool = False
    """Part of it was counted from the log later: which records were late then is not known."""
    latency: Mapping[str, float] | None = None
    """From the sender to this stage, of the last minutes, in ms: count, min, mean, p50, p95, p99, max. Only of stages
    that write no channel: the latency of results is measured in their channel."""
    number: int = 0
    """Of a query: the number of its generation, as in the versions of its rows."""
    start_declared: bool = False
    """The query is declared to start at certain offsets, not at the beginning of its channels."""

    @property
    def key(self) -> bytes:
        return self.stage.encode()

    def dumps(self) -> bytes:
        return _JSON.dump_json(self, by_alias=True, exclude={"stage"})

    @classmethod
    def of(cls, key: bytes, value: bytes) -> "Account":
        """Parse an account; raise Refused if it cannot be parsed."""
        try:
            return _JSON.validate_python({**json.loads(value), "stage": key.decode()})
        except (ValueError, TypeError, RecursionError) as error:
            raise Refused("an account", f"it cannot be parsed: {error!r}") from error


_JSON = TypeAdapter(Account)


def is_account(key: bytes | None) -> bool:
    """Whether a record of the bookmarks is an account: its key is the name of a stage, which contains a colon.

    The keys of announcements (`audit.writers`) contain one, too; the names of sources never do.
    """
    return key is not None and b":" in key and not key.startswith(b"writer:")

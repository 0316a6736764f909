"""How many of Spark's slots the queries of a pipeline need: found out before they start."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.analysis.query import Emit, Mode, Query
from penstock.core.errors import Misconfigured

_SHUFFLES = 3
"""More than nearly all queries have; Spark's plan tells how many it really are."""


@dataclass(frozen=True)
class Need:
    """The tasks of a real-time query never end, and each holds its slot; those of the others can wait in a queue."""

    standing: int
    """Slots that real-time queries hold for as long as they run."""
    waiting: int
    """Tasks of the others, if all of them take their turn at the same moment."""

    @property
    def least(self) -> int:
        return self.standing + min(self.waiting, 1)

    @property
    def most(self) -> int:
        return self.standing + self.waiting

    def check(self, there: int, master: str) -> str | None:
        """Misconfigured when there are too few slots; a remark when those in micro-batches have to share."""
        if there < self.least:
            raise Misconfigured(
                "penstock.toml, [spark]",
                f"the queries need {self.least} slots at once, and {master} has {there}",
                "give it more, let fewer queries run in real time (real_time_queries, mode=), "
                "or declare fewer partitions for the channels that these read",
            )
        if there < self.most:
            return f"the queries can use {self.most} slots, and {master} has {there}: micro-batches wait for each other"
        return None


def need(
    queries: Sequence[Query],
    real_time: Mapping[str, int],
    partitions: Mapping[str, int],
    sifted: Iterable[str],
    shuffle: int,
    spread: Mapping[str, int] | None = None,
) -> Need:
    """What all queries need together. `real_time`: those that run so, and how often they shuffle.

    `spread`: over how many partitions those have their state that keep some already; the others will by `shuffle`.
    """
    standing = waiting = 0
    for query in queries:
        reading = sum(partitions[name] for name in query.inputs)
        state = (spread or {}).get(query.name, shuffle)
        if query.name in real_time:
            # Spark starts the tasks of all its stages together.
            standing += reading + state * real_time[query.name]
        else:
            waiting += max(reading, state)
    return Need(standing, waiting + sum(partitions[name] for name in sifted))


def guessed(queries: Sequence[Query], places: int, partitions: Mapping[str, int]) -> dict[str, int]:
    """Which queries may run in real time, at worst, and how often they may shuffle, before Spark is asked."""
    forced = [query for query in queries if query.mode is Mode.REAL_TIME]
    able = [query for query in queries if query.mode is Mode.AUTO and not query.every and query.emit is Emit.CHANGE]
    able.sort(key=lambda query: -sum(partitions[name] for name in query.inputs))
    return {query.name: _SHUFFLES for query in (*forced, *able[:places])}

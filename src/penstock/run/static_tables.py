"""Restart queries when their static tables change: they continue from their checkpoints with the new rows."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from penstock.analysis.checkpoints.batches import unfinished
from penstock.analysis.engine import Engine
from penstock.analysis.operators.statics import Watch
from penstock.analysis.query import Query
from penstock.analysis.supervision import ended
from penstock.core.clock import Clock, Micros

log = logging.getLogger(__name__)

_PAUSE = 100_000
"""The minimal pause after a real-time batch, in microseconds."""


class Telling(Protocol):
    """The part of a query that is used here."""

    @property
    def status(self) -> Mapping[str, Any]: ...

    @property
    def lastProgress(self) -> Any: ...

    def stop(self) -> None: ...


class Launched(Protocol):
    """The part of `Queries` that is used here."""

    def running(self, name: str) -> Telling:
        """The current run of a query."""

    def again(self, engine: Engine, query: Query) -> None:
        """Restart a stopped query."""

    def finish(self, engine: Engine, query: Query) -> None:
        """Restart a query that was stopped in a batch, for this batch only."""


@dataclass(frozen=True)
class _Waiting:
    engine: Engine
    """The current engine of the query."""
    abandons: bool


class Refreshing:
    """Stops a query between two batches, so that no batch is repeated with other rows.

    A real-time batch is long: new rows wait for its end.
    """

    def __init__(
        self, watch: Watch, engine: Engine, queries: Sequence[Query], launched: Launched, clock: Clock
    ) -> None:
        self._watch = watch
        self._engine = engine
        self._queries = queries
        self._launched = launched
        self._clock = clock
        self._waiting: dict[str, _Waiting] = {}

    @property
    def waits(self) -> bool:
        """Whether a query waits for the end of its batch: then call `look` often."""
        return bool(self._waiting)

    def look(self) -> None:
        """Read changed tables, and restart the queries that have ended a batch."""
        if changed := self._watch.changed():
            for query in self._queries:
                if query.name not in self._waiting and not changed.keys().isdisjoint(query.statics):
                    self._waiting[query.name] = _Waiting(self._engine, self._engine.abandons(query))
            self._engine = replace(self._engine, tables={**self._engine.tables, **changed})
        for query in (one for one in self._queries if one.name in self._waiting):
            self._renew(query, self._waiting[query.name])

    def _renew(self, query: Query, waiting: _Waiting) -> None:
        running, folder = self._launched.running(query.name), self._engine.checkpoint(query.name)
        if not between(running, folder, waiting.abandons, self._clock.now()):
            return
        running.stop()
        if unfinished(folder) is not None and not waiting.abandons:
            # The next batch has started, and may have written rows.
            self._launched.finish(waiting.engine, query)
            return
        self._launched.again(self._engine, query)
        del self._waiting[query.name]
        log.info("query %s restarted with new rows of %s", query.name, ", ".join(query.statics))


def between(running: Telling, folder: str, abandons: bool, now: Micros) -> bool:
    """Whether a query is between two batches, or has just ended one.

    In the second case the next batch may have started: a query that abandons batches must not lose it.
    """
    if not running.status["isTriggerActive"]:
        # Before its first batch, a query may have to repeat an unfinished one.
        return abandons or unfinished(folder) is None
    last = running.lastProgress
    if abandons or last is None or now - ended(last) >= _PAUSE:
        return False
    # A real-time batch is reported before it is committed.
    return unfinished(folder) != int(last.batchId)

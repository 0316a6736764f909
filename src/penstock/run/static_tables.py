"""Queries over static tables: when one of those has changed, they go on from their checkpoints with its new rows."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from penstock.analysis.checkpoints.batches import unfinished
from penstock.analysis.engine import Engine
from penstock.analysis.operators.statics import Watch
from penstock.analysis.progress import ended
from penstock.analysis.query import Query
from penstock.core.clock import Clock, Micros

log = logging.getLogger(__name__)

_PAUSE = 100_000
"""When a batch in real time has ended, nothing flows for longer than this."""


class Telling(Protocol):
    """What is asked of a query."""

    @property
    def status(self) -> Mapping[str, Any]: ...

    @property
    def lastProgress(self) -> Any: ...

    def stop(self) -> None: ...


class Launched(Protocol):
    """What is asked of those who run the queries."""

    def running(self, name: str) -> Telling:
        """The query of a name as it runs now."""

    def again(self, engine: Engine, query: Query) -> None:
        """Start one again that was stopped."""

    def finish(self, engine: Engine, query: Query) -> None:
        """Start one again that was stopped in a batch: this one is done, and there is no other for long."""


@dataclass(frozen=True)
class _Waiting:
    engine: Engine
    """With which the query runs."""
    gives_up: bool


class Refreshing:
    """A query is stopped between two of its batches, so that none is begun with old rows and done again with new ones.

    In real time a batch lasts long, and new rows wait for its end.
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
        """Whether a query is to be stopped as soon as its batch has ended: look often."""
        return bool(self._waiting)

    def look(self) -> None:
        """Take what has changed, and launch those again that have come to the end of a batch."""
        if changed := self._watch.changed():
            for query in self._queries:
                if query.name not in self._waiting and not changed.keys().isdisjoint(query.statics):
                    self._waiting[query.name] = _Waiting(self._engine, self._engine.gives_up(query))
            self._engine = replace(self._engine, tables={**self._engine.tables, **changed})
        for query in (one for one in self._queries if one.name in self._waiting):
            self._renew(query, self._waiting[query.name])

    def _renew(self, query: Query, waiting: _Waiting) -> None:
        running, folder = self._launched.running(query.name), self._engine.checkpoint(query.name)
        if not between(running, folder, waiting.gives_up, self._clock.now()):
            return
        running.stop()
        if unfinished(folder) is not None and not waiting.gives_up:
            # The next batch had begun, and may have written rows already.
            self._launched.finish(waiting.engine, query)
            return
        self._launched.again(self._engine, query)
        del self._waiting[query.name]
        log.info("query %s goes on with the new rows of %s", query.name, ", ".join(query.statics))


def between(running: Telling, folder: str, gives_up: bool, now: Micros) -> bool:
    """Whether a query with this checkpoint has no batch under way, or has just ended one.

    In the latter case the next one may have begun, which a query that gives it up must not lose.
    """
    if not running.status["isTriggerActive"]:
        # Before its first batch, a query may have one to do that an earlier life has left.
        return gives_up or unfinished(folder) is None
    last = running.lastProgress
    if gives_up or last is None or now - ended(last) >= _PAUSE:
        return False
    # In real time a batch is told before its end is noted.
    return unfinished(folder) != int(last.batchId)

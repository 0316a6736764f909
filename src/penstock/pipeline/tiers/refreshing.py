"""Queries over static tables: when one of those has changed, they go on from their checkpoints with its new rows."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from penstock.analysis.engine import Engine
from penstock.analysis.operators.statics import Watch
from penstock.analysis.progress import StreamingQuery
from penstock.analysis.query import Query

log = logging.getLogger(__name__)


class Refreshing:
    """A query is stopped between two of its batches, so that none is begun with old rows and done again with new ones.

    In real time a batch lasts long, and new rows wait for its end.
    """

    def __init__(
        self,
        watch: Watch,
        engine: Engine,
        queries: Sequence[Query],
        running: Callable[[str], StreamingQuery],
        launch: Callable[[Engine, Query], None],
    ) -> None:
        """`running` gives the query of a name as it runs now; `launch` starts one again that was stopped."""
        self._watch = watch
        self._engine = engine
        self._queries = queries
        self._running = running
        self._launch = launch
        self._waiting: dict[str, int] = {}

    @property
    def waits(self) -> bool:
        """Whether a query is to be stopped as soon as its batch has ended: look often."""
        return bool(self._waiting)

    def look(self) -> None:
        """Take what has changed, and launch those again that have come to the end of a batch."""
        if changed := self._watch.changed():
            self._engine = replace(self._engine, tables={**self._engine.tables, **changed})
            for query in self._queries:
                if not changed.keys().isdisjoint(query.statics):
                    self._waiting.setdefault(query.name, _last(self._running(query.name)))
        for query in (one for one in self._queries if one.name in self._waiting):
            running = self._running(query.name)
            if between(running, self._waiting[query.name], query.once):
                running.stop()
                self._launch(self._engine, query)
                del self._waiting[query.name]
                log.info("query %s goes on with the new rows of %s", query.name, ", ".join(query.statics))


class Telling(Protocol):
    """What is asked of a query."""

    @property
    def status(self) -> Mapping[str, Any]: ...

    @property
    def lastProgress(self) -> Any: ...


def between(running: Telling, last: int, once: bool) -> bool:
    """Whether a query has no batch under way, or has just ended the one that it was in.

    By then the next one may have begun. It is done again, unless each is to be done once: it would be given up.
    """
    return not running.status["isTriggerActive"] or (not once and _last(running) > last)


def _last(running: Telling) -> int:
    """The number of the last batch that has ended."""
    progress = running.lastProgress
    return -1 if progress is None else int(progress.batchId)

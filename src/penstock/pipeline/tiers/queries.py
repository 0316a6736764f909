"""The queries of a pipeline as they run: started one after the other, accounted for, measured, stopped."""

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial

from penstock.analysis.belated import Belated
from penstock.analysis.books import Books, standing
from penstock.analysis.checkpoints.doctor import Known
from penstock.analysis.engine import Engine
from penstock.analysis.launching import failed, launch, sift
from penstock.analysis.progress import Progress, StreamingQuery
from penstock.analysis.query import Late, Mode, Query
from penstock.audit.account import Account, Outcome
from penstock.audit.rate import Rate
from penstock.clock import SystemClock
from penstock.contracts import Channels
from penstock.errors import Unavailable
from penstock.pipeline.accounts import last_accounts
from penstock.pipeline.description import Description
from penstock.pipeline.pulse import Figures

log = logging.getLogger(__name__)

_FIRST = 20.0
_SOURCES = 60.0


class Queries:
    """What runs in the analysis tier: a query for each that is declared, and one for the dead letters of a channel."""

    def __init__(self, engine: Engine, description: Description, channels: Channels, ids: Mapping[str, str]) -> None:
        """`ids` are those of the topics that the queries touch."""
        self._engine = engine
        self._description = description
        self._channels = channels
        self._ids = ids
        self._running: dict[str, StreamingQuery] = {}
        self._notes: dict[str, str] = {}
        self._books: dict[str, Books] = {}
        self._sifting: list[StreamingQuery] = []
        self._progress = {query.name: Progress() for query in description.queries}
        self._rates = {query.name: Rate(SystemClock()) for query in description.queries}

    def start(self) -> None:
        """Start all; Misconfigured when a checkpoint does not fit, or a query cannot run."""
        queries, channels = self._description.queries, self._channels
        places, until = self._engine.settings.real_time_queries, time.monotonic() + _FIRST
        sizes = {query.name: _size(channels, query.into) for query in queries}
        stood = {query.name: standing(self._engine, query, channels.bounds) for query in queries}
        before = last_accounts(channels, self._description.bookmarks)
        for turn, query in enumerate(queries):
            bounds = {name: channels.bounds(name) for name in query.inputs}
            known = Known(bounds=bounds, account=before.get(_node(query)))
            running, verdict = launch(self._engine, query, places, self._touched(query), turn, known)
            self._running[query.name], self._notes[query.name] = running, f"{verdict.mode}: {verdict.why}"
            places -= verdict.mode is Mode.REAL_TIME
            log.info("query %s runs, %s: %s", query.name, verdict.mode, verdict.why)
            # One after the other: all at once would keep the one that people watch from its first rows.
            _first_rows(running, partial(_grown, channels, query.into, sizes[query.name]), until)
        for turn, channel in enumerate(self._description.sifted, start=len(queries)):
            ids = {channel.name: self._ids[channel.name]}
            self._sifting.append(sift(self._engine, channel.shape, channel.dead, ids, turn))
        for query in queries:
            self._books[query.name] = self._opened(query, before.get(_node(query)), stood[query.name])

    def again(self, engine: Engine, query: Query) -> None:
        """Start one again that was stopped, from its checkpoint and in its mode."""
        place, turn = self._notes[query.name].startswith(Mode.REAL_TIME), self._description.queries.index(query)
        self._running[query.name], _ = launch(engine, query, int(place), self._touched(query), turn)
        self._books[query.name].follow(engine, self._running[query.name])

    def running(self, name: str) -> StreamingQuery:
        return self._running[name]

    def failed(self) -> Unavailable | None:
        return failed([*self._running.values(), *self._sifting])

    def stop(self) -> None:
        for query in (*self._running.values(), *self._sifting):
            query.stop()

    def accounts(self) -> list[Account]:
        """The account of each, with all batches that have ended by now."""
        for books in self._books.values():
            try:
                books.look()
            except Exception:
                # One that cannot be kept must not hold up the others; its hop stands still, which is an alarm.
                log.exception("the account of a query cannot be kept")
        return [books.account for books in self._books.values()]

    def figures(self) -> Figures:
        """What each measures, by the names that the page and the status have for them."""
        return {"nodes": {_node(query): self._told(query) for query in self._description.queries}}

    def _told(self, query: Query) -> dict[str, object]:
        name, rate = query.name, self._rates[query.name]
        # Spark tells the rate of a batch when it has ended, which in real time is a minute later.
        rate.reach(_size(self._channels, query.into))
        return {
            **self._progress[name].look(self._running[name]),
            "note": self._notes[name],
            "mode": self._notes[name].partition(":")[0],
            **_counted(self._books[name].account),
            "rate": rate.per_second(),
        }

    def _touched(self, query: Query) -> dict[str, str]:
        return {name: self._ids[name] for name in (*query.inputs, query.into)}

    def _opened(self, query: Query, before: Account | None, stood: Mapping[str, Mapping[int, int]]) -> Books:
        running, belated = self._running[query.name], None
        if query.late is Late.DEAD:
            # A query that begins anew finds the same records late: what an earlier life has written is looked through.
            at = before.at if before is not None and before.life == str(running.id) else 0
            belated = Belated(query.name, self._channels, at)
        return Books(self._engine, query, running, before, stood, self._channels, SystemClock(), belated)


def _node(query: Query) -> str:
    return f"query:{query.name}"


def _counted(account: Account) -> dict[str, int]:
    """The records that a query has taken since its account began, and how many of them came too late."""
    shares = account.shares.values()
    late = sum(share.outcomes.get(Outcome.LATE, 0) for share in shares)
    return {"count": sum(share.taken for share in shares), "late": late}


def _first_rows(query: StreamingQuery, written: Callable[[], bool], until: float) -> None:
    """Wait until a query has its sources, and for a while until it has written its first rows: there may be none."""
    # A source in Python is a process; a machine that starts many at once may keep each of them from being in time.
    latest = time.monotonic() + _SOURCES
    while query.isActive and query.status["message"] == "Initializing sources" and time.monotonic() < latest:
        time.sleep(0.1)
    while query.isActive and not query.lastProgress and not written() and time.monotonic() < until:
        time.sleep(0.1)


def _grown(channels: Channels, channel: str, size: int) -> bool:
    return _size(channels, channel) > size


def _size(channels: Channels, channel: str) -> int:
    return sum(end for _, end in channels.bounds(channel).values())

"""The queries of a pipeline as they run: started one after the other, accounted for, measured, stopped."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial

from penstock.analysis.belated import Belated
from penstock.analysis.books import Books, standing
from penstock.analysis.checkpoints.doctor import Known
from penstock.analysis.engine import Engine
from penstock.analysis.launching import Fitting, begin, failed, fitting, launch, require_sifting, sift
from penstock.analysis.modes import Verdict
from penstock.analysis.practice import practise
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
from penstock.pipeline.tiers.refreshing import Telling

log = logging.getLogger(__name__)

_FIRST = 20.0
_SOURCES = 60.0
_TICK = 0.01
_LAST_BATCH = 2.0
"""How long a batch is waited for that would be given up; who stops a pipeline does not wait much longer."""
_LONG = timedelta(hours=1)


class Queries:
    """What runs in the analysis tier: a query for each that is declared, and one for the dead letters of a channel."""

    def __init__(self, engine: Engine, description: Description, channels: Channels, ids: Mapping[str, str]) -> None:
        """`ids` are those of the topics that the queries touch."""
        self._engine = engine
        self._description = description
        self._channels = channels
        self._ids = ids
        self._running: dict[str, StreamingQuery] = {}
        self._verdicts: dict[str, Verdict] = {}
        self._giving_up: set[str] = set()
        self._books: dict[str, Books] = {}
        self._sifting: list[StreamingQuery] = []
        self._progress = {query.name: Progress() for query in description.queries}
        self._rates = {query.name: Rate(SystemClock()) for query in description.queries}

    def start(self) -> None:
        """Start all; Misconfigured, before the first one starts, when a checkpoint does not fit or one cannot run."""
        queries, channels = self._description.queries, self._channels
        before = last_accounts(channels, self._description.bookmarks)
        fits = {query.name: self._fitting(query, before.get(_node(query))) for query in queries}
        for channel in self._description.sifted:
            require_sifting(self._engine, channel.shape, channel.dead, self._ids_of(channel.name))
        self._giving_up = {query.name for query in queries if self._engine.gives_up(query)}
        places, until = self._engine.settings.real_time_queries, time.monotonic() + _FIRST
        sizes = {query.name: _size(channels, query.into) for query in queries}
        stood = {query.name: standing(self._engine, query, channels.bounds) for query in queries}
        for turn, query in enumerate(queries):
            running, verdict = begin(self._engine, query, fits[query.name], places, turn)
            self._running[query.name], self._verdicts[query.name] = running, verdict
            places -= verdict.mode is Mode.REAL_TIME
            log.info("query %s runs, %s: %s", query.name, verdict.mode, verdict.why)
            # One after the other: all at once would keep the one that people watch from its first rows.
            _first_rows(running, partial(_grown, channels, query.into, sizes[query.name]), until)
        for turn, channel in enumerate(self._description.sifted, start=len(queries)):
            ids = self._ids_of(channel.name)
            self._sifting.append(sift(self._engine, channel.shape, channel.dead, ids, turn))
        for query in queries:
            self._books[query.name] = self._opened(query, before.get(_node(query)), stood[query.name])

    def again(self, engine: Engine, query: Query) -> None:
        """Start one again that was stopped, from its checkpoint and in its mode."""
        self._verdicts[query.name] = self._launched(engine, query)

    def finish(self, engine: Engine, query: Query) -> None:
        """Start one again that was stopped in a batch: this one is done at once, and there is no other for long."""
        self._launched(engine, replace(query, mode=Mode.MICRO_BATCH, every=_LONG))

    def _launched(self, engine: Engine, query: Query) -> Verdict:
        turn = [one.name for one in self._description.queries].index(query.name)
        place = self._verdicts[query.name].mode is Mode.REAL_TIME
        running, verdict = launch(engine, query, int(place), self._ids_of(*query.inputs, query.into), turn)
        self._running[query.name] = running
        self._books[query.name].follow(engine, running)
        return verdict

    def running(self, name: str) -> StreamingQuery:
        return self._running[name]

    def failed(self) -> Unavailable | None:
        return failed([*self._running.values(), *self._sifting])

    def practise(self, stop: threading.Event) -> None:
        """Make the pauses of those in real time shorter, see there."""
        for query in self._description.queries:
            if self._verdicts[query.name].mode is Mode.REAL_TIME:
                practise(self._engine, query, stop)

    def stop(self) -> None:
        """Stop all; those that would give their batches up when these have ended, if they do soon."""
        careful = {name: query for name, query in self._running.items() if name in self._giving_up}
        for query in (*(one for name, one in self._running.items() if name not in careful), *self._sifting):
            query.stop()
        stop_between(careful, _LAST_BATCH)

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
            "note": f"{self._verdicts[name].mode}: {self._verdicts[name].why}",
            "mode": self._verdicts[name].mode,
            **_counted(self._books[name].account),
            "rate": rate.per_second(),
        }

    def _fitting(self, query: Query, before: Account | None) -> Fitting:
        bounds = {name: self._channels.bounds(name) for name in query.inputs}
        known = Known(bounds=bounds, account=before)
        return fitting(self._engine, query, self._ids_of(*query.inputs, query.into), known)

    def _ids_of(self, *channels: str) -> dict[str, str]:
        return {name: self._ids[name] for name in channels}

    def _opened(self, query: Query, before: Account | None, stood: Mapping[str, Mapping[int, int]]) -> Books:
        running, belated = self._running[query.name], None
        if query.late is Late.DEAD:
            # A query that begins anew finds the same records late: what an earlier life has written is looked through.
            at = before.at if before is not None and before.life == str(running.id) else 0
            belated = Belated(query.name, self._channels, at)
        return Books(self._engine, query, running, before, stood, self._channels, SystemClock(), belated)


def stop_between(running: Mapping[str, Telling], within: float) -> None:
    """Stop queries when they have no batch under way; after so many seconds in any case."""
    left, until = dict(running), time.monotonic() + within
    while left and time.monotonic() < until:
        for name in [name for name, query in left.items() if not query.status["isTriggerActive"]]:
            left.pop(name).stop()
        time.sleep(_TICK)
    for name, query in left.items():
        log.warning("query %s: its batch lasts too long to be waited for; it is stopped, and will be given up", name)
        query.stop()


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

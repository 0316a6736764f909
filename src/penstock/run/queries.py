"""Run the queries of a pipeline: start, supervise, account for, measure and stop each one."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial

from penstock.analysis.accounting import QueryAccounting
from penstock.analysis.checkpoints.batches import unfinished
from penstock.analysis.checkpoints.doctor import Facts
from penstock.analysis.checkpoints.note import note_of
from penstock.analysis.dead_letters import LateRecords
from penstock.analysis.engine import Engine
from penstock.analysis.frames import ResultWriters
from penstock.analysis.launch import Fitting, begin, fitting, launch, require_validation, validate, warm_up
from penstock.analysis.operators.statics import Watch
from penstock.analysis.plans import Verdict
from penstock.analysis.poison import Isolation, Work, validation_of, work_of
from penstock.analysis.query import Late, Mode, Query
from penstock.analysis.session import is_running
from penstock.analysis.supervision import Isolate, Progress, StreamingQuery, Supervised, ended, retrying
from penstock.audit.account import Account, Outcome
from penstock.audit.writers import Writers
from penstock.core.clock import Clock, Micros, SystemClock
from penstock.core.contracts import Channels
from penstock.core.errors import Unavailable
from penstock.core.metrics import Rate
from penstock.pipeline.description import Description
from penstock.run.accounts import last_accounts
from penstock.run.status import Figures, repeat

log = logging.getLogger(__name__)

_FIRST = 20.0
_SOURCES = 60.0
_TICK = 0.01
_LAST_BATCH = 2.0
"""How long a stop waits for a batch that would be abandoned."""
_LAST_LOOK = 5.0
_ACCOUNT_EVERY = 1.0
_LONG = timedelta(hours=1)
_PAUSE = 100_000
"""The minimal pause after a real-time batch, in microseconds."""


class Queries:
    """All queries of the analysis tier: the declared ones, and one for the dead letters of each channel.

    Each is supervised and accounted for by its own threads.
    """

    def __init__(self, engine: Engine, description: Description, channels: Channels, ids: Mapping[str, str]) -> None:
        """`ids` are the ids of the queries' topics."""
        self._engine = engine
        self._description = description
        self._channels = channels
        self._ids = ids
        self._engines: dict[str, Engine] = {}
        self._supervised = {
            query.name: Supervised(
                query.name,
                partial(self._relaunched, query),
                engine.checkpoint(query.name),
                self.isolation(work_of(query)),
            )
            for query in description.queries
        }
        self._validating: list[Supervised] = []
        self._verdicts: dict[str, Verdict] = {}
        self._giving_up: set[str] = set()
        self._books: dict[str, QueryAccounting] = {}
        self._progress = {query.name: Progress() for query in description.queries}
        self._rates = {query.name: Rate(SystemClock()) for query in description.queries}
        self._ending, self._stopped = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start all queries. Misconfigured before any start when a checkpoint does not fit or a query cannot run."""
        queries, channels = self._description.queries, self._channels
        before = last_accounts(channels, self._description.bookmarks)
        fits = {query.name: retrying(partial(self._fitting, query, before.get(_node(query)))) for query in queries}
        for channel in self._description.validated:
            require_validation(self._engine, channel.shape, channel.dead, self._ids_of(channel.name))
        self._giving_up = {query.name for query in queries if self._engine.abandons(query)}
        locations, until = self._engine.settings.real_time_queries, time.monotonic() + _FIRST
        sizes = {query.name: _size(channels, query.into) for query in queries}
        for turn, query in enumerate(queries):
            running, verdict = retrying(partial(begin, self._engine, query, fits[query.name], locations, turn))
            self._verdicts[query.name] = verdict
            self._open(query, running, before.get(_node(query)))
            locations -= verdict.mode is Mode.REAL_TIME
            log.info("query %s runs, %s: %s", query.name, verdict.mode, verdict.why)
            # One after the other: otherwise all would be slow to write their first rows.
            _first_rows(running, partial(_grown, channels, query.into, sizes[query.name]), until)
        for turn, channel in enumerate(self._description.validated, start=len(queries)):
            ids = self._ids_of(channel.name)
            start = partial(validate, self._engine, channel.shape, channel.dead, ids, turn)
            isolate = self.isolation(validation_of(channel.shape, channel.dead))
            self.supervise(f"{channel.name}.dead", start, isolate)

    def supervise(self, name: str, start: Callable[[], StreamingQuery], isolate: Isolate | None = None) -> None:
        """Start and supervise a query that is not declared."""
        supervised = Supervised(name, start, self._engine.checkpoint(name), isolate)
        self._validating.append(supervised)
        try:
            supervised.adopt(retrying(start))
        except Unavailable:
            # For example an unavailable store: the start is retried.
            supervised.again()
        self._in_background(f"supervision of {name}", supervised.run, self._ending)

    def again(self, engine: Engine, query: Query) -> None:
        """Restart a stopped query from its checkpoint, in its mode."""
        self._engines[query.name] = engine
        self._supervised[query.name].again()

    def finish(self, engine: Engine, query: Query) -> None:
        """Restart a query that was stopped in a batch: it runs this batch only."""
        self._engines[query.name] = engine
        rarely = replace(query, mode=Mode.MICRO_BATCH, every=_LONG)
        self._supervised[query.name].again(lambda: self._launched(rarely)[0])

    def running(self, name: str) -> StreamingQuery:
        running = self._supervised[name].running
        assert running is not None
        return running

    def failed(self) -> Unavailable | None:
        """The error when Spark has ended. A failed query is restarted alone."""
        return None if is_running(self._engine.spark) else Unavailable("Spark", "its session has ended")

    def warm_up(self, stop: threading.Event) -> None:
        """Shorten the pauses of real-time queries, see `launch.warm_up`."""
        for query in self._description.queries:
            if self._verdicts[query.name].mode is Mode.REAL_TIME:
                warm_up(self._engine, query, stop)

    def stop(self) -> None:
        """Stop all queries; those that would abandon a batch, if possible between two batches."""
        self._ending.set()
        stop_between({name: self.running(name) for name in self._giving_up if name in self._books}, _LAST_BATCH)
        for supervised in (*self._supervised.values(), *self._validating):
            supervised.stop()
        # Account for the last batches.
        self._stopped.set()
        until = time.monotonic() + _LAST_LOOK
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def accounts(self) -> list[Account]:
        """The complete accounts."""
        for accounts in list(self._books.values()):
            accounts.remember()
        return [accounts.account for accounts in list(self._books.values()) if accounts.complete]

    def figures(self) -> Figures:
        """The figures of each query for the status and the page."""
        return {"nodes": {_node(query): self._report(query) for query in self._description.queries}}

    def _report(self, query: Query) -> dict[str, object]:
        name, rate, accounts = query.name, self._rates[query.name], self._books.get(query.name)
        supervised = self._supervised[name].figures()
        if accounts is None:
            return supervised
        # Spark reports the rate at the end of a batch, which in real time is a minute later.
        rate.set_total(_size(self._channels, query.into))
        return {
            **self._progress[name].look(self.running(name)),
            **supervised,
            "accounting": accounts.accounting,
            "note": f"{self._verdicts[name].mode}: {self._verdicts[name].why}",
            "mode": self._verdicts[name].mode,
            **_counted(accounts.account),
            "rate": rate.per_second(),
        }

    def isolation(self, work: Work) -> Isolation:
        """The search for records that make this work fail."""
        limit = self._engine.settings.poison_limit
        return Isolation(lambda: self._engines.get(work.name, self._engine), work, self._channels, limit)

    def _relaunched(self, query: Query) -> StreamingQuery:
        running, self._verdicts[query.name] = self._launched(query)
        return running

    def _launched(self, query: Query) -> tuple[StreamingQuery, Verdict]:
        engine = self._engines.get(query.name, self._engine)
        turn = [one.name for one in self._description.queries].index(query.name)
        location = self._verdicts[query.name].mode is Mode.REAL_TIME
        running, verdict = launch(engine, query, int(location), self._ids_of(*query.inputs, query.into), turn)
        self._books[query.name].follow(engine, running)
        return running, verdict

    def _open(self, query: Query, running: StreamingQuery, before: Account | None) -> None:
        """Supervise a started query and keep its account, each in a thread."""
        late_records = None
        if query.late is Late.DEAD:
            # A new generation finds the same records late: dead letters of earlier generations are read.
            at = before.at if before is not None and before.generation == str(running.id) else 0
            late_records = LateRecords(query.name, self._channels, at)
        accounts = QueryAccounting(self._engine, query, running, before, self._channels, SystemClock(), late_records)
        self._supervised[query.name].adopt(running)
        self._books[query.name] = accounts
        self._in_background(f"supervision of {query.name}", self._supervised[query.name].run, self._ending)
        failure = f"the account of query {query.name} cannot be kept"
        keep = partial(repeat, work=accounts.look, every=_ACCOUNT_EVERY, failure=failure, last=True)
        self._in_background(f"account of {query.name}", keep, self._stopped)

    def _in_background(self, name: str, work: Callable[[threading.Event], None], stop: threading.Event) -> None:
        thread = threading.Thread(target=work, args=(stop,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _fitting(self, query: Query, before: Account | None) -> Fitting:
        bounds = {name: self._channels.bounds(name) for name in query.inputs}
        facts = Facts(bounds=bounds, account=before)
        return fitting(self._engine, query, self._ids_of(*query.inputs, query.into), facts)

    def _ids_of(self, *channels: str) -> dict[str, str]:
        return {name: self._ids[name] for name in channels}


class Refreshing:
    """Restarts queries when their static tables change: they continue from their checkpoints with the new rows.

    It stops a query between two batches, so that no batch is repeated with other rows. A real-time batch is
    long: new rows wait for its end.
    """

    def __init__(self, watch: Watch, engine: Engine, queries: Sequence[Query], launched: Queries, clock: Clock) -> None:
        self._watch, self._engine, self._clock = watch, engine, clock
        self._queries, self._launched = queries, launched
        self._waiting: dict[str, tuple[Engine, bool]] = {}
        """By query: its current engine, and whether it abandons batches."""

    @property
    def waits(self) -> bool:
        """Whether a query waits for the end of its batch: then call `look` often."""
        return bool(self._waiting)

    def look(self) -> None:
        """Read changed tables, and restart the queries that have ended a batch."""
        if changed := self._watch.changed():
            for query in self._queries:
                if query.name not in self._waiting and not changed.keys().isdisjoint(query.statics):
                    self._waiting[query.name] = self._engine, self._engine.abandons(query)
            self._engine = replace(self._engine, tables={**self._engine.tables, **changed})
        for query in self._queries:
            if query.name in self._waiting:
                self._renew(query, *self._waiting[query.name])

    def _renew(self, query: Query, engine: Engine, abandons: bool) -> None:
        running, folder = self._launched.running(query.name), self._engine.checkpoint(query.name)
        if not between(running, folder, abandons, self._clock.now()):
            return
        running.stop()
        if unfinished(folder) is not None and not abandons:
            # The next batch has started, and may have written rows.
            self._launched.finish(engine, query)
            return
        self._launched.again(self._engine, query)
        del self._waiting[query.name]
        log.info("query %s restarted with new rows of %s", query.name, ", ".join(query.statics))


def between(running: StreamingQuery, folder: str, abandons: bool, now: Micros) -> bool:
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


def result_writers(channels: Channels, description: Description, engine: Engine) -> dict[str, ResultWriters]:
    """The writers of each result that a query of the pipeline reads: those that were announced, and those to come.

    All queries of a pipeline run in one process, whose tokens share a prefix. So a row of a query that begins anew
    while another one reads its result is never taken for forged.
    """
    writers = Writers(channels, [description.bookmarks])
    writers.refresh()
    read = {name for query in description.queries for name in query.inputs}
    found: dict[str, ResultWriters] = {}
    for query in description.queries:
        if query.into in read:
            tokens = {token.decode() for token in writers.known.tokens(query.into)}
            ends = {partition: end for partition, (_, end) in channels.bounds(query.into).items()}
            # The query announces its token again if the announcement is gone.
            tokens.add(note_of(engine.checkpoint(query.name)).writer)
            first = writers.known.first(query.into) or ends
            found[query.into] = ResultWriters(sorted(tokens - {""}), first, engine.token_prefix)
    return found


def stop_between(running: Mapping[str, StreamingQuery], within: float) -> None:
    """Stop queries between batches; after `within` seconds in any case."""
    left, until = dict(running), time.monotonic() + within
    while left and time.monotonic() < until:
        for name in [name for name, query in left.items() if not query.status["isTriggerActive"]]:
            left.pop(name).stop()
        time.sleep(_TICK)
    for name, query in left.items():
        log.warning("query %s: its batch takes too long; the query is stopped, and the batch will be abandoned", name)
        query.stop()


def _node(query: Query) -> str:
    return f"query:{query.name}"


def _counted(account: Account) -> dict[str, int]:
    """The number of records in a query's account, and of late ones."""
    shares = account.shares.values()
    late = sum(share.outcomes.get(Outcome.LATE, 0) for share in shares)
    return {"count": sum(share.taken for share in shares), "late": late}


def _first_rows(query: StreamingQuery, written: Callable[[], bool], until: float) -> None:
    """Wait until a query has its sources, and for a while for its first rows."""
    # A Python source is a process: starting many at once may exceed Spark's timeout.
    latest = time.monotonic() + _SOURCES
    while query.isActive and query.status["message"] == "Initializing sources" and time.monotonic() < latest:
        time.sleep(0.1)
    while query.isActive and not query.lastProgress and not written() and time.monotonic() < until:
        time.sleep(0.1)


def _grown(channels: Channels, channel: str, size: int) -> bool:
    return _size(channels, channel) > size


def _size(channels: Channels, channel: str) -> int:
    return sum(end for _, end in channels.bounds(channel).values())

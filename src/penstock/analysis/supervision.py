"""Supervise a streaming query: restart it alone from its checkpoint when it fails, and report its figures.

An external failure (an unavailable broker, a Python worker that did not connect in time) is retried without limit. A
failure that repeats at the same offsets may be caused by a record: then `isolate` finds and excludes the record.

In figures, durations are in milliseconds, timestamps in microseconds since 1970. Spark reports figures at the end of a
batch; in real time that is once a minute, so they include the timestamp of the report.
"""

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, TypeVar

from pyspark.sql.streaming.listener import StreamingQueryProgress
from pyspark.sql.streaming.query import StreamingQuery as StreamingQuery

from penstock.analysis.checkpoints.batches import last_commit, parse_offsets
from penstock.analysis.frames import newest_event
from penstock.core.clock import Micros
from penstock.core.errors import Misconfigured, Unavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_EVERY = 0.25
TRIES = 2
"""The number of failures at the same offsets before the search for a record."""
SETTLED = 10.0
"""Seconds after which a restarted query counts as running, unless it commits a batch earlier."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_CALLS = 5
_TRANSIENT = re.compile(
    r"Python worker failed to connect back|[Pp]ython daemon|Connection refused|ConnectException|"
    r"(?:Timeout|Disconnect|Network|Retriable|UnknownTopicOrPartition|UnknownTopicId|NotLeaderOrFollower|"
    r"LeaderNotAvailable|FencedLeaderEpoch|BrokerNotAvailable|CoordinatorNotAvailable|NotEnoughReplicas\w*|"
    r"KafkaStorage|NotController|BrokerIdNotRegistered|OutOfOrderSequence\w*|UnknownProducerId)Exception|"
    r"Failed to get .*offset|No space left on device|is unavailable: "
)
"""Errors of Spark and its Kafka client with an external cause."""

_DAMAGED = re.compile(r"CorruptRecordException|is corrupt|seek past the record|Checksum(?:Exception| error)")
"""Errors about damaged files of Kafka's log or of a checkpoint."""


class State(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    """It has failed, and will be restarted after a pause."""
    ISOLATING = "isolating"
    """It has failed again at the same offsets: the search for the record runs."""
    STOPPED = "stopped"
    """It is not restarted: too many records make it fail."""


class TooMany(Exception):
    """Raised by `isolate` when more records make the query fail than the pipeline allows."""


Isolate = Callable[[str], int]
"""Given the error, finds and excludes the records that cause it; returns how many. TooMany stops the query."""


class Supervised:
    """A query that is restarted when it fails. One thread calls `look` repeatedly."""

    def __init__(
        self, name: str, start: Callable[[], StreamingQuery], checkpoint: str, isolate: Isolate | None = None
    ) -> None:
        """`start` starts the query from its checkpoint, and may raise any error."""
        self.name = name
        self._start, self._checkpoint, self._isolate = start, checkpoint, isolate
        self._lock = threading.RLock()
        self._query: StreamingQuery | None = None
        self._state, self._restarts, self._error = State.STARTING, 0, ""
        self._failures, self._tries = 0, 0
        self._failed_at: int | None = None
        self._since = 0.0
        self._due: float | None = None
        self._ended = False

    @property
    def running(self) -> StreamingQuery | None:
        return self._query

    def figures(self) -> dict[str, Any]:
        """The figures for the status: its state, restarts, and last error."""
        if self._state is State.RESTARTING and self._settled():
            self._state = State.RUNNING
        return {"state": str(self._state), "restarts": self._restarts, "error": self._error}

    def adopt(self, query: StreamingQuery) -> None:
        """Supervise a query that is already started."""
        with self._lock:
            self._query, self._due, self._since = query, None, time.monotonic()
            if self._state is State.STARTING:
                self._state = State.RUNNING

    def again(self, start: Callable[[], StreamingQuery] | None = None) -> None:
        """Restart it at once, after a deliberate stop. A failed start is handled as any failure."""
        with self._lock:
            self._begin(start or self._start)

    def run(self, stop: threading.Event) -> None:
        """Supervise it until `stop`."""
        while not stop.wait(LOOK_EVERY):
            try:
                self.look()
            except Exception:
                # For example a dead JVM, which the owner of the session detects.
                log.exception("query %s cannot be looked after", self.name)

    def look(self) -> None:
        """Handle a failure; restart the query after its pause."""
        with self._lock:
            query = self._query
            if self._ended or self._state is State.STOPPED:
                return
            if self._due is None and query is not None and not query.isActive:
                # Without an error, it was stopped deliberately, and will be restarted by the caller.
                if (error := query.exception()) is None:
                    return
                self._failed(error)
            if self._due is None or time.monotonic() < self._due:
                return
            isolate = self._isolate if self._tries >= TRIES and self._tries & (self._tries - 1) == 0 else None
        if isolate is not None and not self._isolated(isolate):
            return
        with self._lock:
            # It may have been restarted or stopped in the meantime.
            if self._query is query and not self._ended:
                self._restarts += 1
                self._begin(self._start)

    def stop(self) -> None:
        """Stop the query for good."""
        with self._lock:
            self._ended = True
            if self._query is not None:
                self._query.stop()

    def _begin(self, start: Callable[[], StreamingQuery]) -> None:
        try:
            self._query = start()
        except Exception as error:  # noqa: BLE001 - any error is retried
            self._failed(error)
        else:
            self._due, self._since = None, time.monotonic()

    def _failed(self, error: Exception) -> None:
        at = last_commit(self._checkpoint)
        if at != self._failed_at:
            self._failed_at, self._failures, self._tries = at, 0, 0
        self._failures += 1
        self._tries += not is_transient(error)
        self._state, self._error = State.RESTARTING, telling(error)
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (self._failures - 1))
        self._due = time.monotonic() + pause
        log.warning("query %s failed, restarting in %g s: %s", self.name, pause, self._error)

    def _isolated(self, isolate: Isolate) -> bool:
        """Search for records that make the query fail; return whether it may be restarted."""
        self._state = State.ISOLATING
        try:
            found = isolate(self._error)
        except TooMany as many:
            self._state, self._error = State.STOPPED, f"{many}; the last failure was: {self._error}"
            log.error("query %s is stopped: %s", self.name, self._error)
            return False
        except Exception as error:  # noqa: BLE001 - the search may fail in any way
            log.warning("query %s: the search for failing records has failed: %s", self.name, telling(error))
            found = 0
        with self._lock:
            self._state = State.RESTARTING
            if found:
                self._tries = self._failures = 0
        return True

    def _settled(self) -> bool:
        query, since = self._query, self._since
        if self._due is not None or query is None or not query.isActive:
            return False
        return last_commit(self._checkpoint) != self._failed_at or time.monotonic() - since > SETTLED


def retrying(start: Callable[[], T]) -> T:
    """Retry a call on transient errors, a few times."""
    for done in range(1, _CALLS):
        try:
            return start()
        except Exception as error:
            if not is_transient(error):
                raise
            log.warning("trying again in %d s: %s", done, telling(error))
            time.sleep(done)
    return start()


def is_transient(error: Exception) -> bool:
    """Whether a failure is external, so that a retry may succeed."""
    # Damaged files are not the fault of a record: an unreadable record cannot become a dead letter.
    text = _without_plan(error)
    outside = any(pattern.search(text) for pattern in (_TRANSIENT, _DAMAGED))
    return isinstance(error, Unavailable) or outside


def telling(error: Exception) -> str:
    """The most useful line of an error: the end of a Python traceback, otherwise the innermost cause."""
    if isinstance(error, Misconfigured | Unavailable):
        return str(error)
    if damaged := [line.strip() for line in _without_plan(error).splitlines() if _DAMAGED.search(line)]:
        line = damaged[-1].removeprefix("Caused by: ")
        return f"{line}; files are damaged: stop the pipeline and run penstock repair"
    return _line(error)


def _without_plan(error: Exception) -> str:
    """The text of an error, without the query's plan."""
    return re.sub(r"=== Streaming Query ===.*?(?=\nJVM stacktrace|\Z)", "", str(error), flags=re.DOTALL)


def _line(error: Exception) -> str:
    lines = [line.strip() for line in _without_plan(error).splitlines() if line.strip()] or [type(error).__name__]
    if any("PYTHON_EXCEPTION" in line for line in lines[:3]) or "PythonException" in lines[0]:
        traced = [line for line in lines if re.match(r"[A-Za-z_.]+(Error|Exception|Misconfigured)\b", line)]
        return (traced or lines)[-1].removeprefix("penstock.core.errors.Misconfigured: ")
    if lost := re.search(r"\(TID \d+\) \(.*?\): (.+)", lines[0]):
        return lost[1]
    caused = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    return (caused or lines)[-1] if caused else lines[0]


_COMMIT = ("walCommit", "commitOffsets", "commitBatch")
_HITS, _MISSES = "rocksdbReadBlockCacheHitCount", "rocksdbReadBlockCacheMissCount"
_LOADS = ("rocksdbLoadLatencyMs", "loadedMapLoadLatencyMs")
_RESTORED = ("rocksdbNumLoadedFromDfs", "rocksdbNumReplayChangelogFiles")


class Progress:
    """The figures of a query's last batch, and those that later batches do not repeat."""

    def __init__(self) -> None:
        self._run = ""
        self._restored: int | None = None
        self._newest: int | None = None

    def look(self, query: StreamingQuery) -> dict[str, Any]:
        """The figures of a query as of its last batch. Unknown ones are None; those that do not apply are left out."""
        if (run := str(query.runId)) != self._run:
            self._run, self._restored = run, None
        state = "running" if query.isActive else "ended"
        found: dict[str, Any] = {"state": state, "count": None, "rate": None, "lag": None}
        if (last := query.lastProgress) is not None:
            found |= batch_figures(last, self._newest)
        if "store" in found:
            if self._restored is None:
                # The first batch restores the state. It may have ended before the first look.
                self._restored = _restored(query.recentProgress[0])
            found["store"]["restored"] = self._restored
        self._newest = found.get("newest", self._newest)
        return found


def ended(last: StreamingQueryProgress) -> int:
    """When a batch has ended, in microseconds since 1970."""
    return timestamp(last.timestamp) + int(last.durationMs.get("triggerExecution", 0)) * 1_000


def batch_figures(last: StreamingQueryProgress, before: Micros | None = None) -> dict[str, Any]:
    """The figures of Spark's report of a batch. `before`: the newest event of earlier batches.

    `behind` is how far the watermark is behind the newest event, `skew` the age of that event at the end of the batch.
    """
    took, at = last.durationMs, ended(last)
    found: dict[str, Any] = {
        "batch": last.batchId,
        "at": at,
        "rate": round(last.processedRowsPerSecond, 1),
        "rate_in": round(last.numInputRows * 1_000 / max(took.get("triggerExecution") or 0, 1), 1),
        "lag": _behind(last.sources),
        "times": {
            "all": took.get("triggerExecution"),
            "planning": took.get("queryPlanning"),
            "work": took.get("addBatch"),
            "commit": sum(took.get(name, 0) for name in _COMMIT),
        },
    }
    latest, mark = last.eventTime.get("max"), last.eventTime.get("watermark")
    # Without a watermark, Spark reports no event times.
    event = timestamp(latest) if latest else newest_event(last.observedMetrics)
    if last.eventTime or event is not None:
        # A batch without records has no newest record.
        newest = max(event or 0, before or 0) or None
        watermark = (timestamp(mark) if mark else 0) or None
        found["newest"], found["watermark"] = newest, watermark
        found["behind"] = None if newest is None or watermark is None else (newest - watermark) // 1_000
        found["skew"] = None if newest is None else (at - newest) // 1_000
    if last.stateOperators:
        found["store"] = _store(last.stateOperators)
    return found


def _store(operators: Sequence[Any]) -> dict[str, Any]:
    """The figures of its state: rows if Spark counts them, bytes in memory and on disk, and cache hits."""
    custom = [operator.customMetrics for operator in operators]
    return {
        "rows": sum(operator.numRowsTotal for operator in operators) or None,
        "memory": sum(operator.memoryUsedBytes for operator in operators),
        "disk": _sum(custom, "rocksdbSstFileSize"),
        "load": sum(_sum(custom, name) for name in _LOADS),
        "commit": sum(operator.commitTimeMs for operator in operators),
        "hits": _sum(custom, _HITS),
        "misses": _sum(custom, _MISSES),
    }


def _restored(first: StreamingQueryProgress) -> int | None:
    """How long the first batch of a run took to restore the state from the checkpoint.

    Unknown for an aggregation: it opens its state twice, and Spark reports only the second time.
    """
    custom = [operator.customMetrics for operator in first.stateOperators]
    return _store(first.stateOperators)["load"] if any(_sum(custom, name) for name in _RESTORED) else None


def _sum(metrics: Sequence[Mapping[str, int]], name: str) -> int:
    return sum(int(one.get(name, 0)) for one in metrics)


def _behind(sources: Sequence[Any]) -> int | None:
    """How many records the last batch left unread."""
    left = [_left(source) for source in sources]
    numbers = [one for one in left if one is not None]
    return sum(numbers) if numbers else None


def _left(source: Any) -> int | None:
    try:
        ends, latest = (parse_offsets(json.loads(text or "null")) for text in (source.endOffset, source.latestOffset))
    except (ValueError, AttributeError, TypeError):
        # Not a source with offsets of partitions.
        most = source.metrics.get("maxOffsetsBehindLatest")
        return None if most is None else int(most)
    return sum(
        max(0, offset - ends.get(channel, {}).get(partition, offset))
        for channel, offsets in latest.items()
        for partition, offset in offsets.items()
    )


def timestamp(text: str) -> Micros:
    """A timestamp of Spark, in microseconds since 1970."""
    return int(datetime.fromisoformat(text).timestamp() * 1_000_000)

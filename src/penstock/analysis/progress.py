"""The figures of a running query.

Durations are in milliseconds, timestamps in microseconds since 1970. Spark reports figures at the end of a batch; in
real time that is once a minute, so they include the timestamp of the report.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from pyspark.sql.streaming.listener import StreamingQueryProgress
from pyspark.sql.streaming.query import StreamingQuery

from penstock.analysis.frames import newest_event

__all__ = ["Progress", "StreamingQuery", "ended", "progress"]

_COMMIT = ("walCommit", "commitOffsets", "commitBatch")
_HITS, _MISSES = "rocksdbReadBlockCacheHitCount", "rocksdbReadBlockCacheMissCount"
_LOADS = ("rocksdbLoadLatencyMs", "loadedMapLoadLatencyMs")
_RESTORED = ("rocksdbNumLoadedFromDfs", "rocksdbNumReplayChangelogFiles")


class Telling(Protocol):
    """The part of a streaming query that is read here."""

    @property
    def runId(self) -> str: ...

    @property
    def isActive(self) -> bool: ...

    @property
    def lastProgress(self) -> StreamingQueryProgress | None: ...

    @property
    def recentProgress(self) -> Sequence[StreamingQueryProgress]: ...


class Progress:
    """The figures of a query's last batch, and those that later batches do not repeat."""

    def __init__(self) -> None:
        self._run = ""
        self._restored: int | None = None
        self._newest: int | None = None

    def look(self, query: Telling) -> dict[str, Any]:
        """The figures of a query as of its last batch."""
        if (run := str(query.runId)) != self._run:
            self._run, self._restored = run, None
        found = progress(query)
        if "store" in found:
            if self._restored is None:
                # The first batch restores the state. It may have ended before the first look.
                self._restored = _restored(query.recentProgress[0])
            found["store"]["restored"] = self._restored
        if "newest" in found:
            # A batch without records has no newest record.
            self._newest = max(found["newest"] or 0, self._newest or 0) or None
            found |= _compared(self._newest, found["watermark"], found["at"])
        return found


def progress(query: Telling) -> dict[str, Any]:
    """The figures of a query's last batch. Unknown figures are None; figures that do not apply are left out."""
    last = query.lastProgress
    figures: dict[str, Any] = {
        "state": "running" if query.isActive else "ended",
        "count": None,
        "rate": None,
        "lag": None,
    }
    return figures if last is None else {**figures, **batch_figures(last)}


def ended(last: StreamingQueryProgress) -> int:
    """When a batch has ended, in microseconds since 1970."""
    return _timestamp(last.timestamp) + int(last.durationMs.get("triggerExecution", 0)) * 1_000


def batch_figures(last: StreamingQueryProgress) -> dict[str, Any]:
    """The figures of Spark's report of a batch."""
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
    if last.eventTime:
        newest, watermark = last.eventTime.get("max"), last.eventTime.get("watermark")
        found["newest"] = _timestamp(newest) if newest else None
        found["watermark"] = (_timestamp(watermark) if watermark else 0) or None
        found |= _compared(found["newest"], found["watermark"], at)
    elif (event := newest_event(last.observedMetrics)) is not None:
        # Without a watermark, Spark reports no event times.
        found |= {"watermark": None, **_compared(event, None, at)}
    if last.stateOperators:
        found["store"] = _store(last.stateOperators)
    return found


def _compared(newest: int | None, watermark: int | None, at: int) -> dict[str, Any]:
    """How far the watermark is behind the newest event, and its age at the end of the batch."""
    return {
        "newest": newest,
        "behind": None if newest is None or watermark is None else (newest - watermark) // 1_000,
        "skew": None if newest is None else (at - newest) // 1_000,
    }


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
    end, latest = _offsets(source.endOffset), _offsets(source.latestOffset)
    if end is not None and latest is not None:
        return sum(max(0, offset - end.get(location, offset)) for location, offset in latest.items())
    most = source.metrics.get("maxOffsetsBehindLatest")
    return None if most is None else int(most)


def _offsets(text: str | None) -> dict[tuple[str, str], int] | None:
    """Offsets by channel and partition, from the JSON form of checkpoints; None when it is another form."""
    try:
        spelt = json.loads(text or "")
        return {(channel, part): int(offset) for channel, parts in spelt.items() for part, offset in parts.items()}
    except (ValueError, AttributeError, TypeError):
        return None


def _timestamp(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp() * 1_000_000)

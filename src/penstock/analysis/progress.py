"""How a running query is doing, in the words that every part of a pipeline uses for its figures."""

from typing import Any

from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["StreamingQuery", "progress"]


def progress(query: StreamingQuery) -> dict[str, Any]:
    """The figures of a query's last batch. In real time a batch lasts long, so they are that old."""
    last = query.lastProgress
    said: dict[str, Any] = {"state": "running" if query.isActive else "ended", "count": None, "rate": None, "lag": None}
    if last is None:
        return said
    return {
        **said,
        "rate": round(last.processedRowsPerSecond, 1),
        "batch": last.batchId,
        "batch_ms": last.durationMs.get("triggerExecution"),
        "watermark": last.eventTime.get("watermark"),
        "state_rows": sum(operator.numRowsTotal for operator in last.stateOperators) or None,
        "late": sum(operator.numRowsDroppedByWatermark for operator in last.stateOperators),
        "lag": _behind(last.sources),
    }


def _behind(sources: list[Any]) -> int | None:
    """How many records the last batch left unread."""
    told = [
        int(source.metrics["maxOffsetsBehindLatest"])
        for source in sources
        if "maxOffsetsBehindLatest" in source.metrics
    ]
    return max(told) if told else None

"""What Spark tells of a batch, in the words of figures."""

from typing import Any

from pyspark.sql.streaming.listener import StreamingQueryProgress

from penstock.analysis.progress import Progress, batch_figures

ROCKSDB = {
    "rocksdbSstFileSize": 1_000,
    "rocksdbLoadLatencyMs": 40,
    "rocksdbReadBlockCacheHitCount": 30,
    "rocksdbReadBlockCacheMissCount": 10,
}


def batch(number: int = 3, **more: Any) -> StreamingQueryProgress:
    """A batch as Spark tells it."""
    operator = {
        "operatorName": "stateStoreSave", "numRowsTotal": 0, "numRowsUpdated": 5, "allUpdatesTimeMs": 1,
        "numRowsRemoved": 0, "allRemovalsTimeMs": 0, "commitTimeMs": 7, "memoryUsedBytes": 500,
        "numRowsDroppedByWatermark": 0, "numShufflePartitions": 2, "numStateStoreInstances": 2,
        "customMetrics": ROCKSDB,
    }  # fmt: skip
    source = {
        "description": "KafkaV2", "startOffset": None, "endOffset": {"things": {"0": 10, "1": 20}},
        "latestOffset": {"things": {"0": 15, "1": 20}}, "numInputRows": 600, "inputRowsPerSecond": 1.0,
        "processedRowsPerSecond": 300.0, "metrics": {},
    }  # fmt: skip
    return StreamingQueryProgress.fromJson(
        {
            "id": "e0b4c1a8-0000-0000-0000-000000000000",
            "runId": "e0b4c1a8-0000-0000-0000-000000000001",
            "name": "totals",
            "timestamp": "2026-11-15T20:00:00.000Z",
            "batchId": number,
            "batchDuration": 2_000,
            "numInputRows": 600,
            "inputRowsPerSecond": 1.0,
            "processedRowsPerSecond": 300.0,
            "durationMs": {
                "triggerExecution": 2_000,
                "queryPlanning": 100,
                "addBatch": 1_500,
                "walCommit": 20,
                "commitOffsets": 30,
            },
            "eventTime": {"max": "2026-11-15T19:59:58.000Z", "watermark": "2026-11-15T19:59:28.000Z"},
            "stateOperators": [operator],
            "sources": [source],
            "sink": {"description": "KafkaSink", "numOutputRows": -1, "metrics": {}},
            "observedMetrics": {},
            **more,
        }
    )


STARTED = 1_794_772_800_000_000


def test_a_batch_is_told_with_the_moment_of_which_it_is_true() -> None:
    figures = batch_figures(batch())
    assert figures["at"] == STARTED + 2_000_000
    assert figures["times"] == {"all": 2_000, "planning": 100, "work": 1_500, "commit": 50}
    assert figures["rate_in"] == 300.0


def test_event_time_is_compared_with_the_watermark_and_with_the_clock() -> None:
    figures = batch_figures(batch())
    assert figures["watermark"] == STARTED - 32_000_000
    assert figures["behind"] == 30_000
    assert figures["skew"] == 4_000
    assert "watermark" not in batch_figures(batch(eventTime={}))


def test_without_a_watermark_the_newest_event_is_that_of_what_was_read() -> None:
    observed = {
        "things taken": {"taken": 2, "refused": 0, "filtered": 0, "newest": STARTED - 1_000_000},
        "others taken": {"taken": 0, "refused": 0, "filtered": 0, "newest": None},
        "things passed": {"passed": 2},
    }
    figures = batch_figures(batch(eventTime={}, observedMetrics=observed))
    assert (figures["newest"], figures["skew"], figures["behind"]) == (STARTED - 1_000_000, 3_000, None)


def test_what_a_batch_left_unread_is_counted_over_all_partitions() -> None:
    assert batch_figures(batch())["lag"] == 5


def test_state_is_told_with_what_it_takes_and_how_it_is_read() -> None:
    expected = {"rows": None, "memory": 500, "disk": 1_000, "load": 40, "commit": 7, "hits": 30, "misses": 10}
    assert batch_figures(batch())["store"] == expected
    assert "store" not in batch_figures(batch(stateOperators=[]))


class Ran:
    """A query that has told of some batches."""

    isActive = True

    def __init__(self, *told: StreamingQueryProgress, run: str = "one") -> None:
        self.recentProgress: list[StreamingQueryProgress] = list(told)
        self.runId = run

    @property
    def lastProgress(self) -> StreamingQueryProgress | None:
        return self.recentProgress[-1] if self.recentProgress else None


def test_before_its_first_batch_a_query_tells_nothing() -> None:
    assert Progress().look(Ran()) == {"state": "running", "count": None, "rate": None, "lag": None}


def test_the_time_to_restore_is_that_of_the_first_batch_of_a_run() -> None:
    first, later = batch(), batch(4)
    first.stateOperators[0].customMetrics["rocksdbNumLoadedFromDfs"] = 2
    later.stateOperators[0].customMetrics["rocksdbLoadLatencyMs"] = 1
    looking = Progress()
    for ran in (Ran(first, later), Ran(later, later)):
        assert looking.look(ran)["store"]["restored"] == 40
    assert looking.look(Ran(later, run="two"))["store"]["restored"] is None


def test_a_batch_without_records_does_not_forget_the_newest_event() -> None:
    looking = Progress()
    looking.look(Ran(batch()))
    quiet = looking.look(Ran(batch(4, eventTime={"watermark": "2026-11-15T19:59:28.000Z"})))
    assert quiet["newest"] == STARTED - 2_000_000
    assert quiet["behind"] == 30_000

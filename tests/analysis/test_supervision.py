"""What becomes of a query that fails. That the others go on: tests/run/test_queries.py."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from pyspark.sql.streaming.listener import StreamingQueryProgress
from pyspark.sql.streaming.query import StreamingQuery

from penstock.analysis import supervision
from penstock.analysis.supervision import (
    Progress,
    State,
    Supervised,
    TooMany,
    batch_figures,
    is_transient,
    retrying,
    telling,
)
from penstock.core.errors import Unavailable

Eventually = Callable[..., None]

CONNECT = "Job aborted: org.apache.spark.SparkException: Python worker failed to connect back."


class Query:
    """A query that runs until it is told why it fails."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.isActive = True

    def exception(self) -> Exception | None:
        return self.error

    def stop(self) -> None:
        self.isActive = False

    def fail(self, why: str) -> None:
        self.isActive, self.error = False, ValueError(why)


class Case:
    """A supervised query, and all that it was started as."""

    def __init__(self, folder: Path, isolate: Callable[[str], int] | None = None) -> None:
        self.folder = folder
        self.started: list[Query] = []
        self.refusals: list[Exception] = []
        self.supervised = Supervised("q", self.start, str(folder), isolate)
        self.supervised.adopt(self.start())

    def start(self) -> StreamingQuery:
        if self.refusals:
            raise self.refusals.pop()
        self.started.append(Query())
        return cast(StreamingQuery, self.started[-1])

    def commit(self, number: int) -> None:
        (self.folder / "commits").mkdir(exist_ok=True)
        (self.folder / "commits" / str(number)).touch()

    def fails(self, why: str, eventually: Eventually) -> None:
        """It fails, and is started again."""
        before = len(self.started)
        self.started[-1].fail(why)

        def again() -> bool:
            self.supervised.look()
            return len(self.started) > before

        eventually(again)

    @property
    def state(self) -> object:
        return self.supervised.figures()["state"]


def test_a_query_that_fails_is_started_again(
    tmp_path: Path, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path)
    assert case.supervised.figures() == {"state": "running", "restarts": 0, "error": ""}
    case.fails("first\nsecond", eventually)
    assert case.supervised.figures() == {"state": "restarting", "restarts": 1, "error": "first"}
    # It runs again once it has finished a batch, or has run for a while without a failure.
    case.commit(0)
    assert case.state == State.RUNNING
    case.fails("other", eventually)
    assert case.supervised.figures() == {"state": "restarting", "restarts": 2, "error": "other"}
    monkeypatch.setattr(supervision, "SETTLED", -1.0)
    assert case.state == State.RUNNING


def test_a_query_that_was_stopped_on_purpose_is_left_alone(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.started[0].stop()
    case.supervised.look()
    assert len(case.started) == 1
    case.supervised.again()
    case.supervised.stop()
    assert [query.isActive for query in case.started] == [False, False]
    case.supervised.look()
    assert (len(case.started), case.supervised.figures()["restarts"]) == (2, 0)


def test_a_query_that_cannot_be_started_is_tried_again(tmp_path: Path, eventually: Eventually) -> None:
    case = Case(tmp_path)
    case.refusals = [Unavailable("Kafka", "it is away")]
    case.fails("once", eventually)
    assert case.supervised.figures()["restarts"] == 2


def test_what_fails_again_at_the_same_offsets_is_isolated(tmp_path: Path, eventually: Eventually) -> None:
    asked: list[str] = []
    case = Case(tmp_path, lambda error: asked.append(error) or 1)  # type: ignore[func-returns-value]
    case.commit(3)
    case.fails("one", eventually)
    case.commit(4)
    case.fails("two", eventually)
    # What comes from outside is no reason to search.
    case.fails(CONNECT, eventually)
    assert asked == []
    case.fails("three", eventually)
    assert asked == ["three"]
    # Something was found: the count begins anew.
    case.fails("four", eventually)
    assert asked == ["three"]


def test_a_query_with_too_many_such_records_is_stopped(tmp_path: Path, eventually: Eventually) -> None:
    def isolate(error: str) -> int:
        raise TooMany("100 records make it fail")

    case = Case(tmp_path, isolate)
    case.fails("bad", eventually)
    case.started[-1].fail("bad")

    def stopped() -> bool:
        case.supervised.look()
        return case.state == State.STOPPED

    eventually(stopped)
    case.supervised.look()
    assert len(case.started) == 2
    assert case.supervised.figures()["error"] == "100 records make it fail; the last failure was: bad"


@pytest.mark.parametrize(
    ("text", "transient"),
    [
        (CONNECT, True),
        ("org.apache.kafka.common.errors.TimeoutException: Topic x not present in metadata after 60000 ms.", True),
        ("org.apache.kafka.common.errors.RecordTooLargeException: The message is 1200000 bytes", False),
        ("[DIVIDE_BY_ZERO] Division by zero. Use `try_divide`", False),
        # The plan that Spark adds is no part of what went wrong.
        ("[DIVIDE_BY_ZERO] No.\n=== Streaming Query ===\nfrom_json(columnNameOfCorruptRecord, is corrupt)", False),
        ("org.apache.kafka.common.errors.CorruptRecordException: Record is corrupt", True),
    ],
)
def test_a_failure_from_outside_is_known_by_its_words(text: str, transient: bool) -> None:
    assert is_transient(ValueError(text)) is transient


def test_the_innermost_cause_tells_most() -> None:
    assert telling(ValueError("Job aborted\n\tat x\nCaused by: a: b\n\tat y\nCaused by: c: d\n\tat z")) == "c: d"


def test_a_start_is_tried_again_while_the_cause_lies_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    errors = [ValueError("no"), ValueError(CONNECT), ValueError(CONNECT)]

    def start() -> str:
        if errors:
            raise errors.pop()
        return "started"

    with pytest.raises(ValueError, match="no"):
        retrying(start)
    assert retrying(start) == "started"


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


def ran(*told: StreamingQueryProgress, run: str = "one") -> StreamingQuery:
    return cast(StreamingQuery, Ran(*told, run=run))


def test_before_its_first_batch_a_query_tells_nothing() -> None:
    assert Progress().look(ran()) == {"state": "running", "count": None, "rate": None, "lag": None}


def test_the_time_to_restore_is_that_of_the_first_batch_of_a_run() -> None:
    first, later = batch(), batch(4)
    first.stateOperators[0].customMetrics["rocksdbNumLoadedFromDfs"] = 2
    later.stateOperators[0].customMetrics["rocksdbLoadLatencyMs"] = 1
    looking = Progress()
    for one in (ran(first, later), ran(later, later)):
        assert looking.look(one)["store"]["restored"] == 40
    assert looking.look(ran(later, run="two"))["store"]["restored"] is None


def test_a_batch_without_records_does_not_forget_the_newest_event() -> None:
    looking = Progress()
    looking.look(ran(batch()))
    quiet = looking.look(ran(batch(4, eventTime={"watermark": "2026-11-15T19:59:28.000Z"})))
    assert quiet["newest"] == STARTED - 2_000_000
    assert quiet["behind"] == 30_000

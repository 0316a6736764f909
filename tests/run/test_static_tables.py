"""When a query is stopped for the new rows of a table. That it goes on with them: tests/analysis/operators."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from pyspark.sql import DataFrame, SparkSession

from penstock.analysis.connectors import KafkaConnector
from penstock.analysis.engine import Engine
from penstock.analysis.operators.statics import Table, Watch
from penstock.analysis.query import Query, Static
from penstock.analysis.settings import SparkSettings
from penstock.run.queries import Queries, Refreshing
from penstock.testing import ManualClock

OLD, NEW = (Table((text,), cast(DataFrame, None)) for text in (b"old", b"new"))


@dataclass(frozen=True)
class Progress:
    """What a query says of a batch that took two seconds."""

    timestamp: str
    batchId: int
    durationMs: Mapping[str, int] = field(default_factory=lambda: {"triggerExecution": 2_000})


@dataclass
class Running:
    active: bool = True
    lastProgress: Progress | None = None
    stopped: bool = False

    @property
    def status(self) -> dict[str, Any]:
        return {"isTriggerActive": self.active}

    def ended(self, now: int, number: int = 6) -> None:
        """A batch has ended, and the next one has begun."""
        began = datetime.fromtimestamp(now / 1e6, UTC) - timedelta(seconds=2)
        self.lastProgress = Progress(began.isoformat(), number)

    def stop(self) -> None:
        self.stopped = True


class Careful(Engine):
    """One whose queries all give up what they have not finished."""

    def abandons(self, query: Query) -> bool:
        return True


class Case:
    """Queries that run, over a table that has changed. To launch one takes five seconds."""

    def __init__(self, folder: Path, *names: str, kind: type[Engine] = Engine) -> None:
        self.clock = ManualClock()
        self.runs = {name: Running() for name in names}
        self.launched: list[tuple[str, str, bytes]] = []
        static = Static("ads", "ads.csv", "ad STRING", timedelta(minutes=1))
        watch = Watch([static], {"ads": OLD}, lambda *_: NEW, self.clock)
        engine = kind(
            cast(SparkSession, None), SparkSettings(), KafkaConnector(""), str(folder), {}, tables={"ads": OLD}
        )
        queries = [Query(name, ("clicks",), name, ("ad",), "", statics=("ads",)) for name in names]
        self.refreshing = Refreshing(watch, engine, queries, cast(Queries, self), self.clock)
        self.clock.move(60)
        watch.look()

    def running(self, name: str) -> Running:
        return self.runs[name]

    def again(self, engine: Engine, query: Query) -> None:
        self._launch("again", engine, query)

    def finish(self, engine: Engine, query: Query) -> None:
        self._launch("finish", engine, query)

    def _launch(self, how: str, engine: Engine, query: Query) -> None:
        assert self.runs[query.name].stopped
        self.launched.append((how, query.name, engine.tables["ads"].rows[0]))
        self.runs[query.name] = Running()
        self.clock.move(5)

    def look(self) -> list[tuple[str, str, bytes]]:
        """What is launched by a look."""
        before = len(self.launched)
        self.refreshing.look()
        return self.launched[before:]


def noted(folder: Path, log: str, number: int) -> None:
    """What Spark notes of a batch: that it has begun (offsets), that it has ended (commits)."""
    (folder / log).mkdir(parents=True, exist_ok=True)
    (folder / log / str(number)).touch()


def test_a_query_goes_on_with_new_rows_when_its_batch_has_ended(tmp_path: Path) -> None:
    case = Case(tmp_path, "a")
    assert case.look() == []
    assert case.refreshing.waits
    case.runs["a"].ended(case.clock.now())
    assert case.look() == [("again", "a", b"new")]
    assert not case.refreshing.waits
    assert case.look() == []


def test_a_batch_that_ended_while_others_were_launched_is_no_occasion(tmp_path: Path) -> None:
    case = Case(tmp_path, "a", "b")
    for name in ("a", "b"):
        case.runs[name].ended(case.clock.now())
    # While `a` starts, `b` is long in its next batch.
    assert case.look() == [("again", "a", b"new")]
    assert case.look() == []
    case.runs["b"].ended(case.clock.now())
    assert case.look() == [("again", "b", b"new")]


def test_a_batch_that_was_begun_with_old_rows_ends_with_them(tmp_path: Path) -> None:
    case = Case(tmp_path, "a")
    noted(tmp_path / "a", "offsets", 7)
    case.runs["a"].ended(case.clock.now())
    assert case.look() == [("finish", "a", b"old")]
    # It has not come to that batch yet, then is in it, then has ended it.
    case.runs["a"].active = False
    assert case.look() == []
    case.runs["a"].active = True
    assert case.look() == []
    noted(tmp_path / "a", "commits", 7)
    case.runs["a"].active = False
    assert case.look() == [("again", "a", b"new")]


def test_a_batch_of_which_the_end_is_not_noted_has_not_ended(tmp_path: Path) -> None:
    case = Case(tmp_path, "a")
    noted(tmp_path / "a", "offsets", 7)
    case.runs["a"].ended(case.clock.now(), 7)
    assert case.look() == []
    noted(tmp_path / "a", "commits", 7)
    assert case.look() == [("again", "a", b"new")]


@pytest.mark.parametrize("left", [False, True])
def test_one_that_would_give_its_batch_up_is_stopped_when_it_has_none(tmp_path: Path, left: bool) -> None:
    case = Case(tmp_path, "a", kind=Careful)
    case.runs["a"].ended(case.clock.now())
    assert case.look() == []
    case.runs["a"].active = False
    if left:
        # It began just before it was stopped: to finish it would be to do it twice.
        noted(tmp_path / "a", "offsets", 7)
    assert case.look() == [("again", "a", b"new")]

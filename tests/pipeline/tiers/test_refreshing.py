"""When a query may be stopped for the new rows of a table. That it goes on with them: tests/analysis/operators."""

from dataclasses import dataclass, field

import pytest

from penstock.pipeline.tiers.refreshing import between


@dataclass(frozen=True)
class Batch:
    batchId: int


@dataclass(frozen=True)
class Running:
    lastProgress: Batch | None
    status: dict[str, bool] = field(default_factory=lambda: {"isTriggerActive": True})


def test_a_query_is_stopped_when_its_batch_has_ended() -> None:
    assert not between(Running(None), -1, once=False)
    assert not between(Running(Batch(7)), 7, once=False)
    assert between(Running(Batch(8)), 7, once=False)


@pytest.mark.parametrize("last", [None, Batch(7), Batch(8)])
def test_one_that_would_give_its_batch_up_has_none_under_way(last: Batch | None) -> None:
    assert not between(Running(last), 7, once=True)
    assert between(Running(last, {"isTriggerActive": False}), 7, once=True)

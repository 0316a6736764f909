"""How many slots queries need together, and what follows when there are fewer."""

from datetime import timedelta

import pytest

from penstock.analysis.query import Emit, Mode, Query
from penstock.analysis.slots import Need, guessed, need
from penstock.core.errors import Misconfigured

PARTITIONS = {"x": 4, "y": 1}
ONE = Query("one", ("x",), "one", ("k",), "")
TWO = Query("two", ("x", "y"), "two", ("k",), "")
THREE = Query("three", ("y",), "three", ("k",), "")


def test_what_runs_in_real_time_holds_a_slot_for_each_of_its_tasks() -> None:
    found = need([ONE, TWO, THREE], {"one": 1, "two": 2}, PARTITIONS, [], shuffle=2)
    assert found == Need(standing=(4 + 2) + (5 + 2 * 2), waiting=2)
    assert (found.least, found.most) == (16, 17)


def test_micro_batches_can_share_one_slot() -> None:
    found = need([ONE, TWO], {}, PARTITIONS, ["x", "y"], shuffle=2)
    assert found == Need(standing=0, waiting=4 + 5 + 4 + 1)
    assert found.least == 1


def test_nothing_needs_nothing() -> None:
    assert need([], {}, {}, [], shuffle=2).most == 0


@pytest.mark.parametrize("places", [0, 1, 2, 4])
def test_each_place_is_counted_for_the_query_that_would_need_most(places: int) -> None:
    found = guessed([THREE, ONE, TWO], places, PARTITIONS)
    assert list(found) == ["two", "one", "three"][:places]


def test_who_cannot_run_in_real_time_is_not_counted_and_who_must_is() -> None:
    queries = [
        Query("forced", ("x",), "a", ("k",), "", Mode.REAL_TIME),
        Query("batch", ("x",), "b", ("k",), "", Mode.MICRO_BATCH),
        Query("now_and_then", ("x",), "c", ("k",), "", every=timedelta(minutes=1)),
        Query("final", ("x",), "d", ("k",), "", watermark=timedelta(minutes=1), emit=Emit.FINAL),
    ]
    assert list(guessed(queries, 4, PARTITIONS)) == ["forced"]


def test_too_few_slots_are_an_error_with_the_ways_out() -> None:
    with pytest.raises(Misconfigured) as caught:
        Need(13, 9).check(4, "local[4]")
    assert str(caught.value) == (
        "penstock.toml, [spark]: the queries need 14 slots at once, and local[4] has 4; give it more, let fewer "
        "queries run in real time (real_time_queries, mode=), or declare fewer partitions for the channels that these "
        "read"
    )


def test_slots_that_have_to_be_shared_are_remarked() -> None:
    remark = Need(4, 6).check(5, "local[5]")
    assert remark == "the queries can use 10 slots, and local[5] has 5: micro-batches wait for each other"
    assert Need(4, 6).check(10, "local[10]") is None

"""Differences from a declaration, and offsets that a partition does not hold."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest

from penstock.channels.common import beyond, differences, overtaken, spelled
from penstock.channels.memory import MemoryChannels
from penstock.core.clock import duration
from penstock.core.contracts import EnsureResult, Topic
from penstock.core.errors import Unaccounted


@pytest.mark.parametrize(
    ("error", "description"),
    [
        (overtaken, "x: partition 2 begins at offset 9, .* 4 offsets"),
        (beyond, "x: partition 2 ends at offset 9, .* 5"),
    ],
)
def test_what_is_not_there_is_told_with_its_numbers(
    error: Callable[[str, int, int, int], Unaccounted], description: str
) -> None:
    with pytest.raises(Unaccounted, match=description):
        raise error("x", 2, 5, 9)


HERE = Topic("x", 3, replicas=1, retention=timedelta(hours=36))


def test_what_is_as_it_is_declared_has_none() -> None:
    assert list(differences(HERE, replace(HERE, replicas=None), "here")) == []
    assert list(differences(HERE, replace(HERE, partitions=5, config={"a": "1"}), "here", {"a": "1 hour"})) == []


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (replace(HERE, partitions=2), "channel x has 3 partitions, and 2 are declared"),
        (replace(HERE, replicas=3), "channel x has 1 copy, and 3 replicas are declared"),
        (replace(HERE, compacted=True), "channel x is not compacted, and compacted is declared"),
        (replace(HERE, retention=None), "channel x keeps its records for 36 hours, and forever is declared"),
        (replace(HERE, config={"c": "1"}), "channel x has no c, which is declared: here knows a and b"),
    ],
)
def test_each_is_told_in_a_sentence(wanted: Topic, said: str) -> None:
    assert list(differences(HERE, wanted, "here", {"a": "1 hour", "b": "1 hour"})) == [said]


def test_memory_tells_what_it_does_not_know() -> None:
    told = (
        "channel x has 1 copy, and 2 replicas are declared",
        "channel x has no segment.ms, which is declared: memory:// knows no settings",
    )
    channels = MemoryChannels(None)
    declared = [Topic("x", replicas=2, config={"segment.ms": "5"})]
    assert channels.ensure(declared) == EnsureResult(("x",), (), told)
    assert channels.ensure(declared) == EnsureResult((), (), told)


@pytest.mark.parametrize("text", ["1 ms", "90 s", "90 minutes", "36 hours", "30 days", "0.000500 s"])
def test_a_duration_is_spelled_so_that_it_can_be_read(text: str) -> None:
    assert duration(spelled(duration(text))) == duration(text)

"""What is remembered of rows that name each other: which record is the last, and when versions are used up."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle

from penstock.analysis.operators.related import CHANGES, Moves, Relation
from penstock.core.errors import Misconfigured


class Value:
    """A value as Spark keeps it for one key."""

    def __init__(self) -> None:
        self.held: tuple[Any, ...] | None = None

    def get(self) -> tuple[Any, ...] | None:
        return self.held

    def update(self, held: tuple[Any, ...]) -> None:
        self.held = held


class Values:
    """A map as Spark keeps it for one key."""

    def __init__(self) -> None:
        self.held: dict[tuple[str], tuple[Any, ...]] = {}

    def getValue(self, key: tuple[str]) -> tuple[Any, ...] | None:
        return self.held.get(key)

    def updateValue(self, key: tuple[str], value: tuple[Any, ...]) -> None:
        self.held[key] = value

    def iterator(self) -> Iterator[tuple[tuple[str], tuple[Any, ...]]]:
        return iter(self.held.items())


class Handle:
    """The state of one key."""

    def __init__(self) -> None:
        self.value, self.values = Value(), Values()

    def getValueState(self, name: str, schema: str) -> Value:
        return self.value

    def getMapState(self, name: str, key: str, value: str) -> Values:
        return self.values


def row(offset: int, **fields: Any) -> Row:
    told = {"row": "{}", "gone": False, "offset": offset, "newest": None, "appended": None, "mark": 0}
    return Row(**{**told, **fields})


def test_a_record_that_is_older_than_the_last_one_moves_nothing() -> None:
    handle, moves = Handle(), Moves()
    moves.init(cast(StatefulProcessorHandle, handle))
    [moved] = moves.handleInputRows(("k",), iter([row(9, names="b"), row(7, names="a")]), None)
    assert (moved.place, moved.changes) == ("=b", 2)
    assert list(moves.handleInputRows(("k",), iter([row(8, names="c")]), None)) == []
    assert handle.value.held == ("=b", 3, 9)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_row_whose_versions_are_used_up_is_told(side: str) -> None:
    handle, relation = Handle(), Relation(without=False)
    relation.init(cast(StatefulProcessorHandle, handle))
    left = row(1, key="k", told=True, changes=CHANGES - 2 if side == "left" else 1)
    right = row(1, key=None)
    handle.value.held = ("{}", False, CHANGES - 2 if side == "right" else 0, 0, None, None, 0)
    [related] = relation.handleInputRows(("=b",), iter([left, right]), None)
    assert related.seen["count"] == ((CHANGES - 2) * CHANGES + 1 if side == "left" else CHANGES + CHANGES - 1)
    with pytest.raises(Misconfigured, match="the row k, or the one that it names, has changed 4194304 times"):
        list(relation.handleInputRows(("=b",), iter([row(2, key="k", told=True, changes=CHANGES), right]), None))

"""How far a group is behind."""

from penstock.audit.lag import GroupLag
from penstock.core.contracts import Group, Topic
from penstock.testing.channels import MemoryChannels


def standing(group: Group, only: list[str] | None = None) -> GroupLag:
    channels = MemoryChannels(None)
    channels.ensure([Topic("one"), Topic("two", partitions=2)])
    for number in range(10):
        channels.append("one", b"%d" % number)
    return GroupLag.of(channels, group, only)


def test_lag_counts_what_is_not_committed() -> None:
    found = standing(Group("g", "stable", {"m": [("one", 0)]}, {("one", 0): 7}))
    (row,) = found.rows
    assert (row.location, row.committed, row.first, row.end, row.member, row.lag) == (("one", 0), 7, 0, 10, "m", 3)
    assert found.lag == 3


def test_where_nothing_is_committed_nobody_knows_where_reading_begins() -> None:
    found = standing(Group("g", "stable", {"m": [("one", 0)]}, {}))
    assert ([row.lag for row in found.rows], found.lag) == ([None], 0)


def test_partitions_that_nobody_holds_are_told_as_well() -> None:
    found = standing(Group("g", "stable", {"m": [("two", 1)]}, {("two", 1): 0}))
    assert [(row.location, row.member, row.lag) for row in found.rows] == [
        (("two", 0), None, None),
        (("two", 1), "m", 0),
    ]


def test_a_channel_that_is_gone_has_no_end_and_no_lag() -> None:
    found = standing(Group("g", "empty", {}, {("gone", 0): 5, ("one", 0): 9}))
    assert [(row.location[0], row.end, row.lag) for row in found.rows] == [("gone", None, None), ("one", 10, 1)]
    assert found.lag == 1


def test_an_end_that_lies_before_what_is_committed_is_no_lag() -> None:
    assert standing(Group("g", "empty", {}, {("one", 0): 12})).lag == 0


def test_some_channels_alone_are_told() -> None:
    found = standing(Group("g", "empty", {}, {("one", 0): 1, ("two", 0): 0}), ["two"])
    assert {row.location[0] for row in found.rows} == {"two"}

"""Dead letters of late records, over channels in memory. Which records are late: operators/test_late."""

from typing import Any

from penstock.analysis.dead_letters import LateRecords
from penstock.core.clock import SystemClock
from penstock.core.scan import scan
from penstock.testing import MemoryChannels


def raw(partition: int, offset: int) -> dict[str, Any]:
    """A record as Spark reads it."""
    location = {"topic": "events", "partition": partition, "offset": offset}
    return {**location, "key": b"k", "value": b"%d" % offset, "headers": None}


def locations(channels: MemoryChannels) -> list[str]:
    return sorted(dict(entry.headers)["place"].decode() for entry in channels.entries("events.dead"))


def test_a_life_that_ended_before_its_account_has_left_letters_that_are_found() -> None:
    channels = MemoryChannels()
    LateRecords("q", channels, 0).write("events", [raw(0, 1), raw(1, 1)])
    # Others write there as well: what did not fit, and what was late for another query.
    channels.append("events.dead", b"no JSON", None, [("reason", b"it is not JSON"), ("place", b"events:0:2")])
    LateRecords("other", channels, 0).write("events", [raw(0, 2)])
    LateRecords("q", channels, SystemClock().now()).write("events", [raw(0, 1), raw(0, 2), raw(1, 1), raw(1, 2)])
    own = [entry for entry in scan(channels, "events.dead") if dict(entry.headers).get("query") == b"q"]
    assert [dict(entry.headers)["place"] for entry in own] == [
        b"events:0:1",
        b"events:1:1",
        b"events:0:2",
        b"events:1:2",
    ]


def test_what_an_account_covers_is_forgotten_partition_by_partition() -> None:
    channels = MemoryChannels()
    late_records = LateRecords("q", channels, 0)
    late_records.write("events", [raw(0, 7), raw(1, 7)])
    late_records.accounted({0: 8, 1: 7})
    # Of the first nobody will ask again; were it asked for, it would have another letter.
    late_records.write("events", [raw(0, 7), raw(1, 7)])
    assert locations(channels) == ["events:0:7", "events:0:7", "events:1:7"]

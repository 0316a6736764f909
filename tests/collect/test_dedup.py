from dataclasses import replace

import orjson

from penstock.collect.dedup import DEAD_BYTES, Dedup, heartbeat_record
from penstock.collect.numbers import Numbering, Numbers, other_collectors
from penstock.core.contracts import Arrival, Intake
from penstock.core.record import Heartbeat, Origin, OutageInterval, Record

NOW = 1_700_000_000_000_000


async def nobody(error: Exception | None) -> None:
    pass


def intake(*arrivals: Arrival | Heartbeat | OutageInterval) -> Intake:
    return Intake(arrivals, nobody)


def sorting(limit: int = 100, key: str | None = None) -> Dedup:
    return Dedup("rsvps", Numbering("source", 9), Numbers(), key, limit)


def test_what_the_outside_numbers_keeps_its_number() -> None:
    found = sorting().process(intake(Arrival(b"x", Origin("a", 1, 5, 3))), NOW)
    assert found.records == [Record(b"x", Origin("a", 1, 5, 3))]
    assert found.runs == [("a", 1, 5, 5)]


def test_what_has_no_number_gets_one_at_intake() -> None:
    found = sorting().process(intake(Arrival(b"x"), Arrival(b"y")), NOW)
    assert [record.origin for record in found.records] == [Origin("source", 9, 1, NOW), Origin("source", 9, 2, NOW)]
    assert found.runs == []
    assert found.last == 2


def test_what_has_a_mark_is_known_by_it_and_keeps_both() -> None:
    process = sorting()
    first = process.process(
        intake(Arrival(b"x", cursor="a1", dedup_key="a"), Arrival(b"x", cursor="b1", dedup_key="b")), NOW
    )
    assert [record.extra for record in first.records] == [
        (("cursor", b"a1"), ("mark", b"a")),
        (("cursor", b"b1"), ("mark", b"b")),
    ]
    again = process.process(
        intake(Arrival(b"x", cursor="a2", dedup_key="a"), Arrival(b"x", cursor="a1", dedup_key="c")), NOW
    )
    assert (again.duplicates, [dict(record.extra)["mark"] for record in again.records]) == (1, [b"c"])


def test_a_number_that_came_before_is_a_duplicate_even_if_it_is_still_on_its_way() -> None:
    process = sorting()
    process.process(intake(Arrival(b"x", Origin("a", 1, 5, 3))), NOW)
    found = process.process(intake(Arrival(b"x", Origin("a", 1, 5, 3)), Arrival(b"y", Origin("a", 1, 6, 4))), NOW)
    assert found.duplicates == 1
    assert [record.value for record in found.records] == [b"y"]


def test_nobody_outside_speaks_in_the_collectors_name() -> None:
    found = sorting().process(intake(Arrival(b"x", Origin("source", 9, 1, 3)), Arrival(b"y")), NOW)
    assert [record.origin for record in found.records] == [Origin("source", 9, 1, NOW), Origin("source", 9, 2, NOW)]


def test_nobody_outside_speaks_in_the_name_of_another_collector() -> None:
    process = replace(sorting(), is_other_collector=other_collectors("source", ["source", "other"]))
    came = [Arrival(b"x", Origin("other", 2**63 - 1, 1, 3)), Arrival(b"y", Origin("meter", 1, 1, 4))]
    found = process.process(intake(*came, came[0]), NOW)
    told = [Origin("source", 9, 1, NOW), Origin("meter", 1, 1, 4), Origin("source", 9, 2, NOW)]
    assert [record.origin for record in found.records] == told
    assert found.runs == [("meter", 1, 1, 1)]


def test_exactly_the_limit_is_taken_and_one_byte_more_is_refused() -> None:
    found = sorting(limit=10).process(intake(Arrival(b"x" * 10), Arrival(b"y" * 11)), NOW)
    assert [record.value for record in found.records] == [b"x" * 10]
    (dead,) = found.dead
    assert dead.origin == Origin("source", 9, 2, NOW)
    assert dict(dead.extra) == {"reason": b"it has 11 bytes, more than the 10 that the channel takes", "size": b"11"}


def test_a_key_counts_towards_the_limit() -> None:
    found = sorting(limit=10, key="k").process(intake(Arrival(b'{"k":"12"}')), NOW)
    assert (len(found.records), len(found.dead)) == (0, 1)


def test_a_refused_payload_is_cut() -> None:
    found = sorting(limit=10).process(intake(Arrival(b"x" * (DEAD_BYTES + 1))), NOW)
    assert found.dead[0].value == b"x" * DEAD_BYTES
    assert dict(found.dead[0].extra)["size"] == b"%d" % (DEAD_BYTES + 1)


def test_records_get_their_key() -> None:
    assert sorting(key="k").process(intake(Arrival(b'{"k":5}')), NOW).records[0].key == b"5"


def test_heartbeats_and_blind_intervals_become_notices() -> None:
    found = sorting().process(intake(Heartbeat("a", 1, 5, 3), OutageInterval("source", 10, 20)), NOW)
    assert [orjson.loads(record.value or b"") for record in found.notices] == [
        {"kind": "heartbeat", "channel": "rsvps", "sender": "a", "epoch": 1, "seq": 5, "time": 3},
        {"kind": "blind", "channel": "rsvps", "source": "source", "since": 10, "until": 20},
    ]
    assert heartbeat_record("rsvps", Heartbeat("a", 1, 5, 3)).key == b"a"


def test_a_sender_without_a_name_is_a_sender() -> None:
    found = sorting().process(intake(Arrival(b"x", Origin("", 0, 0, 3)), Arrival(b"y", Origin("", 5, 1, 3))), NOW)
    assert len(found.records) == 2
    assert found.runs == [("", 0, 0, 0), ("", 5, 1, 1)]

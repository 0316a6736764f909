"""Alarms, snapshots, and the memory of rules."""

import json
from typing import Any

import pytest

from penstock.audit.settings import AuditSettings
from penstock.audit.snapshot import (
    LONGEST,
    OVER,
    Alarm,
    Growth,
    Snapshot,
    Standstill,
    lasting,
    listed,
    mappings,
    named,
    number,
    senders,
)


def test_an_alarm_is_plain_json() -> None:
    alarm = Alarm("missing", "source:rsvps", "source:rsvps misses 1 record.", 5)
    assert json.loads(json.dumps(alarm.to_json())) == {
        "name": "missing",
        "stage": "source:rsvps",
        "text": "source:rsvps misses 1 record.",
        "since": 5,
        "level": "alarm",
    }


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("kiosk 7", "kiosk 7"),
        ("Zürich 🚂", "Zürich 🚂"),
        ("a\r\nb", r"a\r\nb"),
        ("\x1b[2Jgone", r"\x1b[2Jgone"),
        ("\udc80", r"\udc80"),
        ("\u202eesrever", r"\u202eesrever"),
        ("\0", r"\x00"),
        ("x" * 1_000, "x" * LONGEST + "…"),
    ],
)
def test_a_name_from_outside_stays_in_its_line(name: str, shown: str) -> None:
    assert named(name) == shown


def test_the_first_names_are_listed_and_the_rest_is_counted() -> None:
    assert listed(["a", "b"], 2) == "a, b"
    assert listed([str(number) for number in range(1_002)], 2) == "0, 1 and 1,000 more"


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.25, "0.2 s"), (9, "9.0 s"), (75, "75 s"), (120, "2 minutes"), (7_200, "2 hours"), (172_800, "2 days")],
)
def test_a_length_of_time_has_the_unit_that_people_would_use(seconds: float, told: str) -> None:
    assert lasting(seconds) == told


def snapshot(balance: dict[str, Any] | None = None, processes: dict[str, Any] | None = None) -> Snapshot:
    return Snapshot(0, 0.0, AuditSettings(), balance or {}, processes or {})


def test_the_nodes_of_all_processes_are_seen_together() -> None:
    description = {"load": {"nodes": {"store:redis/a": {"count": 1}}}, "audit": {"nodes": {"channel:a": {"count": 2}}}}
    assert snapshot(processes=description).nodes == {"store:redis/a": {"count": 1}, "channel:a": {"count": 2}}


@pytest.mark.parametrize("word", [None, [], "x", {}, {"nodes": None}, {"nodes": []}, {"nodes": {"a": 1}}])
def test_a_word_of_another_kind_tells_of_no_node(word: object) -> None:
    assert snapshot(processes={"load": word}).nodes == {}


def test_the_newest_record_of_a_channel_is_that_of_its_senders_or_of_its_last_minute() -> None:
    generations = [{"sender": "a", "newest": 61_000_000}, {"sender": "b", "newest": None}]
    channel = {"channel": "rsvps", "by_sender": generations}
    assert snapshot({"channels": [channel]}).newest("rsvps") == 61_000_000
    assert snapshot({"channels": [channel], "minutes": {"rsvps": [[1, 5], [2, 9]]}}).newest("rsvps") == 120_000_000
    assert snapshot({"channels": [{"channel": "rsvps"}]}).newest("rsvps") == 0


def test_all_senders_are_better_than_the_worst() -> None:
    assert list(senders({"by_sender": [{"sender": "a"}], "worst": []})) == [{"sender": "a"}]
    assert list(senders({"worst": [{"sender": "b"}]})) == [{"sender": "b"}]
    assert list(senders({})) == []


@pytest.mark.parametrize("value", [None, "5", True, [], {}])
def test_what_is_no_number_was_not_told(value: object) -> None:
    assert number(value) is None


def test_what_is_no_list_of_mappings_was_not_told() -> None:
    assert list(mappings("text")) == []
    assert list(mappings([1, {"a": 1}, None])) == [{"a": 1}]


def test_what_was_there_before_the_first_call_is_no_growth() -> None:
    trail = Growth()
    assert trail.reach(0, 1_000) == (0,)
    assert trail.reach(1, 1_010) == (10,)


def test_growth_of_long_ago_is_forgotten() -> None:
    trail = Growth()
    trail.reach(0, 0)
    assert trail.reach(1, 100) == (100,)
    trail.reach(OVER / 2, 100)
    assert trail.reach(OVER, 100) == (0,)


def test_growth_of_the_last_half_is_always_known() -> None:
    trail = Growth()
    for second in range(1_000):
        (grown,) = trail.reach(second, second)
        assert min(second, OVER / 2) <= grown <= OVER


def test_who_counts_less_than_before_has_begun_anew() -> None:
    trail = Growth()
    trail.reach(0, 1_000, 10)
    assert trail.reach(1, 5, 2) == (0, 0)
    assert trail.reach(2, 7, 3) == (2, 1)


def test_the_other_totals_may_shrink_a_little() -> None:
    trail = Growth()
    trail.reach(0, 1_000, 10.01)
    assert trail.reach(1, 1_001, 10.0)[0] == 1


def test_without_input_nothing_stands_still() -> None:
    watch = Standstill()
    assert [watch.look(at, (7,), False, 100) for at in (0, 60, 3_600)] == [0, 0, 0]


def test_the_time_counts_from_when_the_input_came() -> None:
    watch = Standstill()
    watch.look(0, (7,), False)
    assert [watch.look(at, (7,), True) for at in (3_600, 3_601, 3_700)] == [0, 1, 100]


def test_a_step_ends_the_standstill() -> None:
    watch = Standstill()
    assert [watch.look(at, (state,), True) for at, state in [(0, 7), (50, 7), (51, 8), (61, 8)]] == [0, 50, 0, 10]


def test_input_is_seen_by_what_arrived_when_nobody_says_that_it_waits() -> None:
    watch = Standstill()
    assert [watch.look(at, (7,), False, total) for at, total in [(0, 100), (20, 101), (50, 102)]] == [0, 0, 30]


def test_what_is_counted_right_after_a_step_may_be_what_the_step_has_taken() -> None:
    watch = Standstill()
    assert [watch.look(at, (7,), False, total) for at, total in [(0, 95), (1, 100), (500, 100)]] == [0, 0, 0]


def test_a_channel_that_began_anew_is_input_when_it_grows() -> None:
    watch = Standstill()
    assert [watch.look(at, (7,), False, total) for at, total in [(0, 95), (20, 0), (30, 1), (40, 2)]] == [0, 0, 0, 10]

"""Stages and processes that do not get on."""

from datetime import timedelta
from typing import Any

import pytest
from tests.audit.rules.watching import SECOND, Watch, channel, hop, query

from penstock.audit.lag import Endangered
from penstock.audit.rules.base import Alarm
from penstock.audit.rules.stages import RETENTION


def test_a_stage_that_has_input_and_makes_no_progress_is_stalled() -> None:
    watch = Watch()
    parts = query(taken=500, in_flight=7), channel(records=507)
    assert watch.stay(120, *parts) == []
    (alarm,) = watch.look(*parts)
    assert (alarm.name, alarm.stage) == ("stalled", "query:by_country")
    assert alarm.since == watch.now - 120 * SECOND
    text = 'query:by_country made no progress for 2 minutes, while 7 records wait in rsvps: see "penstock status".'
    assert alarm.text == text


def test_a_stage_is_stalled_even_when_its_lag_looks_fine() -> None:
    watch = Watch()
    names: list[str] = []
    for second in range(160):
        description = {"analyse": {"at": second, "nodes": {"query:by_country": {"lag": 0, "count": None}}}}
        names = watch.names(query(taken=500), channel(records=500 + second), processes=description)
    assert names == ["stalled"]


def test_a_stage_without_input_is_not_stalled() -> None:
    assert Watch().stay(1_000, query(taken=500), channel(records=500)) == []


def test_a_stage_that_takes_something_once_a_minute_is_not_stalled() -> None:
    watch = Watch()
    for second in range(600):
        parts = query(taken=second // 60 * 60, in_flight=second % 60), channel(records=second)
        assert watch.names(*parts) == []


def test_a_record_after_a_long_rest_is_no_stall() -> None:
    watch = Watch()
    watch.stay(600, query(taken=500), channel(records=500))
    assert watch.stay(60, query(taken=500, in_flight=1), channel(records=501)) == []


def test_long_batches_need_longer_to_show_progress() -> None:
    watch = Watch(batch=timedelta(minutes=5))
    assert watch.stay(600, query(taken=500, in_flight=7)) == []
    assert watch.stay(1, query(taken=500, in_flight=7)) == ["stalled"]


def test_a_process_that_counts_and_dies_again_and_again_is_stalled() -> None:
    watch = Watch()
    names: list[str] = []
    for second in range(200):
        count = 40_000 if second < 5 else second % 10
        description = {"load": {"at": second, "nodes": {"store:redis/by_country": {"count": count, "lag": 9}}}}
        names = watch.names(hop("store:redis/by_country", "by_country", "", taken=40_000), processes=description)
    assert names == ["stalled"]


def test_what_a_process_counts_is_progress_before_it_is_accounted_for() -> None:
    watch = Watch()
    for second in range(400):
        description = {"load": {"at": second, "nodes": {"store:redis/by_country": {"count": second, "lag": 9}}}}
        assert watch.names(hop("store:redis/by_country", "by_country", "", taken=0), processes=description) == []


def test_a_stage_that_no_account_tells_of_is_watched_by_its_lag() -> None:
    watch = Watch()
    names: list[str] = []
    for second in range(125):
        description = {
            "load": {"at": second, "nodes": {"store:delta/rsvps": {"count": 5, "lag": 9}, "channel:x": {"lag": 1}}}
        }
        names = watch.names(processes=description)
    assert names == ["stalled"]


def test_a_stage_that_never_accounted_for_anything_is_stalled() -> None:
    watch = Watch(reads={"query:by_country": ["rsvps"]})
    assert watch.stay(120, channel(records=0)) == []
    assert watch.stay(120, channel(records=5)) == []
    (alarm,) = watch.look(channel(records=5))
    assert "while 5 records wait in rsvps" in alarm.text


def test_markers_of_transactions_are_no_input() -> None:
    watch, names = Watch(), list[str]()
    for second in range(300):
        description = {"analyse": {"at": second, "nodes": {"query:by_country": {"lag": 2}}}}
        names += watch.names(query(taken=500, in_flight=2), channel(records=500), processes=description)
    assert names == []


def test_when_the_audit_itself_is_stalled_no_stage_is_accused() -> None:
    watch = Watch()
    parts = query(taken=500, in_flight=7), channel(records=507, unread=12)
    watch.stay(120, *parts)
    (alarm,) = watch.look(*parts)
    assert (alarm.name, alarm.stage) == ("stalled", "audit")
    assert "while 12 entries wait" in alarm.text


def test_a_clock_that_jumps_stalls_nobody() -> None:
    watch = Watch()
    parts = query(taken=500, in_flight=7), channel(records=507)
    watch.look(*parts)
    watch.clock.move(86_400)
    assert watch.names(*parts, processes={"load": {"at": 1}}) == []
    watch.clock.move(-86_400)
    assert watch.names(*parts) == []
    assert watch.stay(120, *parts) == ["stalled"]


def test_a_source_without_a_connection_is_unheard() -> None:
    watch = Watch()
    names: list[str] = []
    alarms: list[Alarm] = []
    for second in range(200):
        away = {"connected": not 10 < second < 110, "trouble": "refused\n"}
        alarms = watch.look(processes={"collect": {"at": second, "nodes": {"source:rsvps": away}}})
        names += [alarm.text for alarm in alarms]
    assert 'source:rsvps has had no connection for 60 s (refused\\n): see "penstock status".' in names
    assert alarms == []


def nodes(**p99: float) -> dict[str, Any]:
    return {"audit": {"nodes": {f"channel:{name}": {"latency": {"p50": 1.0, "p99": ms}} for name, ms in p99.items()}}}


def test_a_slow_stage_is_told_apart_from_those_before_it() -> None:
    watch = Watch()
    parts = hop(), query(), hop("query:top", "by_country", "top"), channel()
    alarms = watch.look(*parts, processes=nodes(rsvps=20, by_country=45_000, top=46_000))
    assert [(alarm.name, alarm.stage) for alarm in alarms] == [("slow-stage", "query:by_country")]
    assert "takes 45 s for one record in a hundred" in alarms[0].text


def test_a_slow_browser_makes_no_slow_stage() -> None:
    feed = {"latency": {"p99": 90_000.0}, "delivery": {"p99": 40.0}, "browser": {"p99": 90_000.0}}
    description = {**nodes(by_country=20), "deliver": {"nodes": {"feed:by_country": feed}}}
    assert Watch().names(hop("feed:by_country", "by_country", ""), processes=description) == []


def test_a_slow_source_is_named_and_history_is_not_slow() -> None:
    assert Watch().names(hop(), processes=nodes(rsvps=31_000)) == ["slow-stage"]
    years = 1e12
    assert Watch().names(hop(), query(), processes=nodes(rsvps=years, by_country=1.02 * years)) == []


def test_where_no_node_tells_the_step_of_the_hop_counts() -> None:
    assert Watch().names(query(step={"p99": 31_000.0})) == ["slow-stage"]
    assert Watch().names(query(step={"p99": 29_000.0}, latency={"p99": 99_000.0})) == []


def test_a_process_that_says_nothing_is_away_until_it_speaks() -> None:
    watch = Watch()
    description = {"load": {"at": watch.now}, "collect": {"at": watch.now}}
    names: list[str] = []
    for _ in range(12):
        description["collect"] = {"at": watch.now}
        alarms = watch.look(processes=description)
        names = [f"{alarm.name} {alarm.stage}" for alarm in alarms]
    assert names == ["away load"]
    for _ in range(12):
        description = {name: {"at": watch.now} for name in description}
        names = watch.names(processes=description)
    assert names == []


def test_a_process_whose_clock_is_wrong_is_not_away() -> None:
    watch = Watch()
    for _ in range(60):
        assert watch.names(processes={"load": {"at": watch.now - 3_600 * SECOND}}) == []


@pytest.mark.parametrize("usage", [{"load": {}}, {"load": {}, "kafka": {}}])
def test_a_process_of_an_earlier_run_is_not_away(usage: dict[str, Any]) -> None:
    watch = Watch()
    for _ in range(60):
        description = {"run": {"at": watch.now, "usage": usage}, "load": {"at": watch.now}, "deliver": {"at": 0}}
        assert watch.names(processes=description) == []


def test_a_process_that_left_long_ago_is_not_away() -> None:
    watch = Watch()
    assert watch.stay(60, processes={"load": {"at": watch.now - 86_400 * SECOND}}) == []


def test_a_full_disk_is_an_alarm_once() -> None:
    watch = Watch()
    full = {"disk": {"folder": "/data/.penstock", "free": 1 << 20, "reserve": 256 << 20}}
    (alarm,) = watch.look(processes={"collect": full, "run": full})
    assert (alarm.name, alarm.stage) == ("disk", "/data/.penstock")
    roomy = {"disk": {**full["disk"], "free": 1 << 30}}
    assert watch.stay(20, processes={"collect": roomy, "run": roomy, "odd": {"disk": "full"}}) == []


@pytest.mark.parametrize(
    ("newest", "levels"),
    [
        (1_790_000_000 * SECOND, []),
        (1_790_000_000 * SECOND // 1_000, ["alarm"]),
        (1_790_000_000, ["alarm"]),
        (1_200_000_000 * SECOND, ["notice"]),
    ],
    ids=["right", "seconds as milliseconds", "seconds as microseconds", "history"],
)
def test_event_times_that_are_far_from_when_they_are_read_are_told(newest: int, levels: list[str]) -> None:
    at = 1_790_000_100 * SECOND
    figures = {"query:by_country": {"newest": newest, "skew": (at - newest) // 1_000}}
    found = Watch().look(processes={"analyse": {"at": 1, "nodes": figures}})
    assert [(alarm.name, alarm.stage, alarm.level) for alarm in found] == [
        ("event-time", "query:by_country", level) for level in levels
    ]


def said(one: Endangered) -> dict[str, object]:
    return {"audit": {"at": 0, RETENTION: [one.to_json()]}}


def test_what_expires_is_told_with_the_time_that_is_left() -> None:
    (alarm,) = Watch().look(processes=said(Endangered("store:delta/rsvps", "rsvps", 1200, 7200.0, 0)))
    assert (alarm.name, alarm.stage) == ("expiring", "store:delta/rsvps")
    assert "has not read 1,200 old records of rsvps" in alarm.text
    assert "removed in 2 hours" in alarm.text


def test_what_was_lost_is_told_with_its_number() -> None:
    (alarm,) = Watch().look(processes=said(Endangered("group:mine", "rsvps", 0, None, 17)))
    assert (alarm.name, alarm.stage) == ("overtaken", "group:mine")
    assert "had not read 17 offsets of rsvps" in alarm.text
    assert "penstock groups --reset --group mine --to beginning" in alarm.text


def test_the_words_of_another_version_are_no_alarm() -> None:
    assert Watch().look(processes={"audit": {RETENTION: "soon"}, "other": None}) == []

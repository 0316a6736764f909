"""Missing, unknown, refused, out of order."""

from datetime import timedelta
from typing import Any

import pytest
from tests.audit.watching import SECOND, Watch, channel, hop, query, sender

from penstock.audit.lag import Endangered
from penstock.audit.rules import RETENTION
from penstock.audit.snapshot import Alarm, Level


def test_missing_records_are_named_with_their_stage() -> None:
    gaps = [{"sender": "kiosk 7", "epoch": 1, "first": 4100, "last": 4103}]
    (alarm,) = Watch().look(hop(missing=4, gaps=gaps))
    assert (alarm.name, alarm.stage, alarm.level) == ("missing", "source:rsvps", Level.ALARM)
    assert alarm.text == 'source:rsvps misses 4 records (kiosk 7/1: 4100–4103): see "penstock audit".'


def test_of_many_missing_ranges_the_first_are_named_and_the_rest_is_counted() -> None:
    gaps = [{"sender": "a\n", "epoch": 1, "first": at, "last": at} for at in range(0, 200, 2)]
    (alarm,) = Watch().look(hop(missing=1_005, gaps=gaps))
    assert r"a\n/1: 8–8, and 1,000 more)" in alarm.text


def test_a_hop_without_numbers_misses_records_too() -> None:
    (alarm,) = Watch().look(query(missing=1))
    assert alarm.text == 'query:by_country misses 1 record of rsvps: see "penstock audit".'


def test_a_blind_interval_is_an_alarm_when_it_grows() -> None:
    watch = Watch()
    assert watch.names(hop(), channel(unknown_seconds=30.0)) == []
    (alarm,) = watch.look(hop(), channel(unknown_seconds=42.5))
    assert (alarm.name, alarm.stage) == ("unknown", "source:rsvps")
    assert "12.5 s" in alarm.text
    assert watch.stay(80, hop(), channel(unknown_seconds=42.5)) == []


def test_of_several_sources_the_channel_is_named() -> None:
    watch = Watch()
    parts = hop("source:a"), hop("source:b")
    watch.look(*parts, channel(unknown_seconds=0.0))
    assert watch.look(*parts, channel(unknown_seconds=1.0))[0].stage == "channel:rsvps"


def test_refused_records_are_an_alarm_when_they_are_many_lately() -> None:
    watch = Watch()
    assert watch.names(hop(taken=1_000, outcomes={"refused": 900})) == []
    assert watch.names(hop(taken=1_100, outcomes={"refused": 905})) == []
    (alarm,) = watch.look(hop(taken=1_200, outcomes={"refused": 920}))
    assert alarm.text == 'source:rsvps refused 20 of its last 200 records (10%): see "penstock dlq list".'
    assert watch.stay(400, hop(taken=2_000, outcomes={"refused": 920})) == []


def test_a_few_refused_records_are_a_share_of_nothing() -> None:
    watch = Watch()
    watch.look(hop(taken=0))
    assert watch.names(hop(taken=2, outcomes={"refused": 2})) == []
    assert watch.names(hop(taken=3, outcomes={"refused": 3})) == ["refused"]


def test_late_and_double_records_are_no_alarm() -> None:
    watch = Watch()
    watch.look(query(taken=0))
    assert watch.names(query(taken=100, outcomes={"late": 50, "duplicate": 50})) == []


def test_disorder_is_a_notice_and_is_told_once() -> None:
    watch = Watch()
    (notice,) = watch.look(hop(), channel(by_sender=[sender("a", 1, reordered=3)]))
    assert (notice.name, notice.level) == ("disorder", Level.NOTICE)
    for _ in range(30):
        assert watch.look(hop(), channel(worst=[])) == [notice]


def test_notices_come_last() -> None:
    watch = Watch()
    disorder = channel(by_sender=[sender("a", 1, reordered=3)])
    watch.look(hop(), disorder)
    assert watch.names(hop(missing=1), disorder) == ["missing", "disorder"]


def test_a_finding_is_an_alarm_of_its_stage() -> None:
    finding = {"kind": "changed", "stage": "store:redis/x", "count": 1, "text": "a row differs", "examples": ["nl"]}
    (alarm,) = Watch().look(discrepancies=[finding])
    assert (alarm.name, alarm.stage, alarm.level) == ("changed", "store:redis/x", Level.ALARM)


def test_a_verdict_that_stays_unknown_is_an_alarm() -> None:
    watch, doubts = Watch(), [{"kind": "process", "subject": "analyse", "text": "the process analyse is down"}]
    for _ in range(10):
        assert watch.names(doubts=doubts) == []
    (alarm,) = watch.look(doubts=doubts)
    assert (alarm.name, alarm.stage, alarm.since) == ("not-known", "audit", watch.now - 10 * 1_000_000)
    assert "the process analyse is down" in alarm.text
    assert watch.stay(11) == []


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


def sending(watch: Watch, seconds: int, *quiet: dict[str, Any], key: str = "by_sender") -> list[Alarm]:
    """A channel that receives a record of `loud` each second, and others that do not send."""
    found: list[Alarm] = []
    for _ in range(seconds):
        loud = sender("loud", watch.now + SECOND, (watch.now // SECOND) % 100_000)
        found = watch.look(hop(), channel(**{key: [loud, *quiet]}))
    return found


def test_a_sender_that_stops_while_others_send_is_silent() -> None:
    watch = Watch()
    stopped = sender("kiosk 7", watch.now)
    assert sending(watch, 60, stopped) == []
    (alarm,) = sending(watch, 15, stopped)
    assert (alarm.name, alarm.stage, alarm.since) == ("silent", "source:rsvps", stopped["newest"])
    assert alarm.text == 'rsvps receives nothing from kiosk 7 for 75 s: see "penstock audit --senders".'


def test_a_silent_sender_that_sends_again_is_not_silent() -> None:
    watch = Watch()
    assert sending(watch, 100, sender("kiosk 7", watch.now)) != []
    assert sending(watch, 20, sender("kiosk 7", watch.now + 20 * SECOND, 101)) == []


def test_the_worst_senders_are_enough_to_find_a_silent_one() -> None:
    watch = Watch()
    assert [alarm.name for alarm in sending(watch, 100, sender("kiosk 7", watch.now), key="worst")] == ["silent"]


def test_the_minutes_of_a_channel_tell_that_it_still_receives() -> None:
    watch = Watch()
    stopped, names = sender("kiosk 7", watch.now), list[str]()
    for _ in range(180):
        minutes = {"rsvps": [[watch.now // (60 * SECOND), 5]]}
        names = watch.names(hop(), channel(worst=[stopped]), minutes=minutes)
    assert names == ["silent"]


def test_when_the_whole_channel_is_silent_no_sender_is() -> None:
    watch = Watch()
    parts = hop(), channel(by_sender=[sender("a", watch.now), sender("b", watch.now - 30 * SECOND)])
    assert watch.stay(300, *parts) == []


def test_a_silent_sender_is_told_while_its_channel_receives() -> None:
    watch = Watch()
    stopped = sender("kiosk 7", watch.now)
    assert sending(watch, 100, stopped) != []
    rest = hop(), channel(by_sender=[sender("loud", watch.now), stopped])
    assert watch.stay(60, *rest) == ["silent"]
    assert watch.stay(20, *rest) == []


def test_a_sender_that_began_a_new_life_is_not_silent() -> None:
    watch = Watch()
    before = watch.now
    for _ in range(200):
        generations = [sender("a", before), sender("a", watch.now, epoch=2)]
        assert watch.names(hop(), channel(by_sender=generations)) == []


def test_a_sender_of_few_records_has_no_habit_to_break() -> None:
    watch = Watch()
    assert sending(watch, 200, sender("once", watch.now, records=9)) == []


def test_a_sender_that_sends_rarely_may_be_quiet_for_longer() -> None:
    watch = Watch()
    for minute in range(5):
        assert sending(watch, 40, sender("rare", watch.now, 100 + minute)) == []
    last = sender("rare", watch.now, 105)
    assert sending(watch, 150, last) == []
    assert [alarm.name for alarm in sending(watch, 150, last)] == ["silent"]


def test_a_sender_that_left_long_ago_is_not_silent() -> None:
    watch = Watch()
    assert sending(watch, 100, sender("gone", watch.now - 86_400 * SECOND)) == []


def test_an_audit_that_is_behind_takes_nobody_for_silent() -> None:
    watch = Watch()
    for step in range(200):
        then = watch.now - (3_600 - 10 * step) * SECOND
        generations = [sender(name, then, 100 + step) for name in "ab"]
        assert watch.names(hop(), channel(by_sender=generations)) == []


def test_twenty_silent_senders_are_named_and_the_rest_is_counted() -> None:
    watch = Watch()
    (alarm,) = sending(watch, 100, *(sender(f"s{number:03}", watch.now) for number in range(120)))
    assert "s019 for" in alarm.text
    assert "s020" not in alarm.text
    assert "and 100 more" in alarm.text


def late(name: str, count: int, mean: float) -> dict[str, Any]:
    return sender(name, 0, latency={"count": count, "min": 0.0, "mean": mean, "max": mean})


def test_a_sender_that_is_slow_lately_is_named() -> None:
    watch = Watch()
    fast = {"latency": {"p50": 2.0, "p99": 9.0}}
    watch.look(hop(), channel(by_sender=[late("a", 100, 2.0), late("b", 100, 2.0)], **fast))
    (alarm,) = watch.look(hop(), channel(by_sender=[late("a", 200, 2.0), late("b", 200, 4_001.0)], **fast))
    assert (alarm.name, alarm.stage) == ("slow-sender", "source:rsvps")
    assert "b (8.0 s)" in alarm.text
    after = hop(), channel(by_sender=[late("a", 300, 2.0), late("b", 200, 4_001.0)], **fast)
    assert watch.stay(400, *after) == []


def test_a_mean_that_is_rounded_makes_nobody_slow() -> None:
    watch = Watch()
    fast = {"latency": {"p50": 2.0}}
    watch.look(hop(), channel(by_sender=[late("a", 100_000_000, 2.0)], **fast))
    assert watch.names(hop(), channel(by_sender=[late("a", 100_000_003, 2.001)], **fast)) == []


def test_nobody_is_slow_where_all_are() -> None:
    watch = Watch()
    slow = {"latency": {"p50": 7_000.0, "p99": 20_000.0}}
    watch.look(hop(), channel(by_sender=[late("a", 1, 8_000.0)], **slow))
    assert watch.names(hop(), channel(by_sender=[late("a", 100, 8_000.0)], **slow)) == []

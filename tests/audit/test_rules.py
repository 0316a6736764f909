"""Alarms about records, stages and senders, and the memory of rules."""

import json
from datetime import timedelta
from typing import Any

import pytest
from tests.audit.watching import SECOND, Watch, balance, channel, hop, query, sender

from penstock.audit.account import Outcome
from penstock.audit.balance import SenderBalance
from penstock.audit.hops import Gap
from penstock.audit.judge import Discrepancy, Doubt
from penstock.audit.lag import Endangered
from penstock.audit.rules import LONGEST, OVER, Alarm, Growth, Snapshot, Standstill, lasting, listed, named, number
from penstock.audit.settings import AuditSettings


def test_missing_records_are_named_with_their_stage() -> None:
    (alarm,) = Watch().look(hop(missing=4, gaps=(Gap("kiosk 7", 1, 4100, 4103),)))
    assert (alarm.name, alarm.stage) == ("missing", "source:rsvps")
    assert alarm.text == 'source:rsvps misses 4 records (kiosk 7/1: 4100–4103): see "penstock audit".'


def test_of_many_missing_ranges_the_first_are_named_and_the_rest_is_counted() -> None:
    gaps = tuple(Gap("a\n", 1, at, at) for at in range(0, 200, 2))
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
    assert watch.stay(int(OVER) + 20, hop(), channel(unknown_seconds=42.5)) == []


def test_of_several_sources_the_channel_is_named() -> None:
    watch = Watch()
    parts = hop("source:a"), hop("source:b")
    watch.look(*parts, channel(unknown_seconds=0.0))
    assert watch.look(*parts, channel(unknown_seconds=1.0))[0].stage == "channel:rsvps"


def test_refused_records_are_an_alarm_when_they_are_many_lately() -> None:
    watch = Watch()
    assert watch.names(hop(taken=1_000, outcomes={Outcome.REFUSED: 900})) == []
    assert watch.names(hop(taken=1_100, outcomes={Outcome.REFUSED: 905})) == []
    (alarm,) = watch.look(hop(taken=1_200, outcomes={Outcome.REFUSED: 920}))
    assert alarm.text == 'source:rsvps refused 20 of its last 200 records (10%): see "penstock dlq list".'
    assert watch.stay(400, hop(taken=2_000, outcomes={Outcome.REFUSED: 920})) == []


def test_a_few_refused_records_are_a_share_of_nothing() -> None:
    watch = Watch()
    watch.look(hop(taken=0))
    assert watch.names(hop(taken=2, outcomes={Outcome.REFUSED: 2})) == []
    assert watch.names(hop(taken=3, outcomes={Outcome.REFUSED: 3})) == ["refused"]


def test_late_and_double_records_are_no_alarm() -> None:
    watch = Watch()
    watch.look(query(taken=0))
    assert watch.names(query(taken=100, outcomes={Outcome.LATE: 50, Outcome.DUPLICATE: 50})) == []


def test_a_finding_is_an_alarm_of_its_stage() -> None:
    finding = Discrepancy("changed", "store:redis/x", 1, "a row differs", ("nl",))
    (alarm,) = Watch().look(discrepancies=(finding,))
    assert (alarm.name, alarm.stage) == ("changed", "store:redis/x")


def test_a_verdict_that_stays_unknown_is_an_alarm() -> None:
    watch, doubts = Watch(), (Doubt("process", "analyse", "the process analyse is down"),)
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
        parts = query(taken=500, in_flight=second), channel(records=500 + second)
        names = watch.names(*parts, processes=description)
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
    ("newest", "names"),
    [
        (1_790_000_000 * SECOND, []),
        (1_790_000_000 * SECOND // 1_000, ["event-time"]),
        (1_790_000_000, ["event-time"]),
        (1_200_000_000 * SECOND, []),
    ],
    ids=["right", "seconds as milliseconds", "seconds as microseconds", "history"],
)
def test_event_times_in_another_unit_are_told(newest: int, names: list[str]) -> None:
    at = 1_790_000_100 * SECOND
    figures = {"query:by_country": {"newest": newest, "skew": (at - newest) // 1_000}}
    found = Watch().look(processes={"analyse": {"at": 1, "nodes": figures}})
    assert [(alarm.name, alarm.stage) for alarm in found] == [(name, "query:by_country") for name in names]


def test_what_expires_is_told_with_the_time_that_is_left() -> None:
    (alarm,) = Watch().look(endangered=[Endangered("store:delta/rsvps", "rsvps", 1200, 7200.0, 0)])
    assert (alarm.name, alarm.stage) == ("expiring", "store:delta/rsvps")
    assert "has not read 1,200 old records of rsvps" in alarm.text
    assert "removed in 2 hours" in alarm.text


def test_what_was_lost_is_told_with_its_number() -> None:
    (alarm,) = Watch().look(endangered=[Endangered("group:mine", "rsvps", 0, None, 17)])
    assert (alarm.name, alarm.stage) == ("overtaken", "group:mine")
    assert "had not read 17 offsets of rsvps" in alarm.text
    assert "penstock groups --reset --group mine --to beginning" in alarm.text


def sending(watch: Watch, seconds: int, *quiet: SenderBalance) -> list[Alarm]:
    """A channel that receives a record of `loud` each second, and others that do not send."""
    found: list[Alarm] = []
    for _ in range(seconds):
        loud = sender("loud", watch.now + SECOND, (watch.now // SECOND) % 100_000)
        found = watch.look(hop(), channel(by_sender=(loud, *quiet)))
    return found


def test_a_sender_that_stops_while_others_send_is_silent() -> None:
    watch = Watch()
    stopped = sender("kiosk 7", watch.now)
    assert sending(watch, 60, stopped) == []
    (alarm,) = sending(watch, 15, stopped)
    assert (alarm.name, alarm.stage, alarm.since) == ("silent", "source:rsvps", stopped.newest)
    assert alarm.text == 'rsvps receives nothing from kiosk 7 for 75 s: see "penstock audit --senders".'


def test_a_silent_sender_that_sends_again_is_not_silent() -> None:
    watch = Watch()
    assert sending(watch, 100, sender("kiosk 7", watch.now)) != []
    assert sending(watch, 20, sender("kiosk 7", watch.now + 20 * SECOND, 101)) == []


def test_the_minutes_of_a_channel_tell_that_it_still_receives() -> None:
    watch = Watch()
    stopped, names = sender("kiosk 7", watch.now), list[str]()
    for _ in range(180):
        minutes = {"rsvps": [(watch.now // (60 * SECOND), 5)]}
        names = watch.names(hop(), channel(by_sender=(stopped,)), minutes=minutes)
    assert names == ["silent"]


def test_when_the_whole_channel_is_silent_no_sender_is() -> None:
    watch = Watch()
    parts = hop(), channel(by_sender=(sender("a", watch.now), sender("b", watch.now - 30 * SECOND)))
    assert watch.stay(300, *parts) == []


def test_a_silent_sender_is_told_while_its_channel_receives() -> None:
    watch = Watch()
    stopped = sender("kiosk 7", watch.now)
    assert sending(watch, 100, stopped) != []
    rest = hop(), channel(by_sender=(sender("loud", watch.now), stopped))
    assert watch.stay(60, *rest) == ["silent"]
    assert watch.stay(20, *rest) == []


def test_a_sender_that_began_a_new_life_is_not_silent() -> None:
    watch = Watch()
    before = watch.now
    for _ in range(200):
        generations = sender("a", before), sender("a", watch.now, epoch=2)
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
        generations = tuple(sender(name, then, 100 + step) for name in "ab")
        assert watch.names(hop(), channel(by_sender=generations)) == []


def test_twenty_silent_senders_are_named_and_the_rest_is_counted() -> None:
    watch = Watch()
    (alarm,) = sending(watch, 100, *(sender(f"s{number:03}", watch.now) for number in range(120)))
    assert "s019 for" in alarm.text
    assert "s020" not in alarm.text
    assert "and 100 more" in alarm.text


def test_an_alarm_is_plain_json() -> None:
    alarm = Alarm("missing", "source:rsvps", "source:rsvps misses 1 record.", 5)
    assert json.loads(json.dumps(alarm.to_json())) == {
        "name": "missing",
        "stage": "source:rsvps",
        "text": "source:rsvps misses 1 record.",
        "since": 5,
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


def snapshot(processes: dict[str, Any]) -> Snapshot:
    return Snapshot(0, 0.0, AuditSettings(), balance(), processes)


def test_the_nodes_of_all_processes_are_seen_together() -> None:
    description = {"load": {"nodes": {"store:redis/a": {"count": 1}}}, "audit": {"nodes": {"channel:a": {"count": 2}}}}
    assert snapshot(processes=description).nodes == {"store:redis/a": {"count": 1}, "channel:a": {"count": 2}}


@pytest.mark.parametrize("word", [None, [], "x", {}, {"nodes": None}, {"nodes": []}, {"nodes": {"a": 1}}])
def test_a_word_of_another_kind_tells_of_no_node(word: object) -> None:
    assert snapshot(processes={"load": word}).nodes == {}


@pytest.mark.parametrize("value", [None, "5", True, [], {}])
def test_what_is_no_number_was_not_told(value: object) -> None:
    assert number(value) is None


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
    assert [watch.look(at, (7,), False) for at in (0, 60, 3_600)] == [0, 0, 0]


def test_the_time_counts_from_when_the_input_came() -> None:
    watch = Standstill()
    watch.look(0, (7,), False)
    assert [watch.look(at, (7,), True) for at in (3_600, 3_601, 3_700)] == [0, 1, 100]


def test_a_step_ends_the_standstill() -> None:
    watch = Standstill()
    assert [watch.look(at, (state,), True) for at, state in [(0, 7), (50, 7), (51, 8), (61, 8)]] == [0, 50, 0, 10]

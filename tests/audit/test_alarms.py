"""Alarms stay steady."""

from tests.audit.rules.watching import Watch, channel, hop, query

from penstock.audit.alarms import Alarms
from penstock.audit.settings import AuditSettings


def test_nothing_to_look_at_is_no_alarm() -> None:
    assert Alarms(AuditSettings()).look(0, {}, {}) == []


def test_an_alarm_that_lasts_keeps_its_beginning_and_tells_the_facts_of_now() -> None:
    watch = Watch()
    (first,) = watch.look(hop(missing=1))
    (later,) = watch.look(hop(missing=2))
    assert later.since == first.since
    assert "misses 2 records" in later.text


def test_an_alarm_ends_when_it_was_absent_for_ten_seconds() -> None:
    watch = Watch()
    watch.look(hop(missing=1))
    assert watch.stay(9, hop()) == ["missing"]
    assert watch.stay(1, hop()) == []


def test_an_alarm_that_comes_and_goes_is_one_alarm() -> None:
    watch = Watch()
    (first,) = watch.look(hop(missing=1))
    for _ in range(10):
        assert watch.stay(9, hop()) == ["missing"]
        assert watch.look(hop(missing=1))[0].since == first.since


def test_a_stage_in_trouble_with_two_channels_is_one_alarm_about_both() -> None:
    other = hop("query:by_country", "cities", "by_country", missing=2)
    (alarm,) = Watch().look(query(missing=1), other)
    assert "1 record of rsvps" in alarm.text
    assert "2 records of cities" in alarm.text


def test_words_that_nobody_expects_are_no_alarm() -> None:
    strange = {"x": None, "y": {"nodes": 5}, "z": {"nodes": {"query:q": "?"}}, "run": {"usage": 7}}
    words = {**strange, "w": {"at": "noon", "nodes": {"query:by_country": {"lag": "far", "latency": []}}}}
    assert Watch().names(query(), channel(latency=None), processes=words) == []

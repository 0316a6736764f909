"""Readers that retention overtakes, in words."""

from tests.audit.rules.watching import Watch

from penstock.audit.retention import Endangered
from penstock.audit.rules.retention import WHERE


def said(one: Endangered) -> dict[str, object]:
    return {"audit": {"at": 0, WHERE: [one.to_json()]}}


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
    assert Watch().look(processes={"audit": {WHERE: "soon"}, "other": None}) == []

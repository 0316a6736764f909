"""The words of an alarm."""

import json

import pytest

from penstock.audit.alarm import LONGEST, Alarm, lasting, listed, named


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

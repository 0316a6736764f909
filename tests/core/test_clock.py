from datetime import timedelta

import pytest

from penstock.core.clock import SILENT_AFTER, SystemClock, duration, is_running


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10 seconds", timedelta(seconds=10)),
        ("1 second", timedelta(seconds=1)),
        ("250 ms", timedelta(milliseconds=250)),
        ("250 milliseconds", timedelta(milliseconds=250)),
        ("1h", timedelta(hours=1)),
        ("1.5 h", timedelta(minutes=90)),
        (" 2  Minutes ", timedelta(minutes=2)),
        ("5m", timedelta(minutes=5)),
        ("3 days", timedelta(days=3)),
        ("2 weeks", timedelta(weeks=2)),
        ("0 s", timedelta(0)),
    ],
)
def test_a_duration_is_a_number_and_a_unit(text: str, expected: timedelta) -> None:
    assert duration(text) == expected


@pytest.mark.parametrize(
    "text", ["", "10", "seconds", "-1 s", "1 fortnight", "1,5 h", "1 h 30 m", "1e3 s", "9" * 30 + "d"]
)
def test_what_is_no_duration_is_answered_with_the_fix(text: str) -> None:
    with pytest.raises(ValueError, match='is not a duration; write a number and a unit, such as "10 seconds"'):
        duration(text)


def test_the_system_clock_goes_on() -> None:
    clock = SystemClock()
    now, elapsed = clock.now(), clock.elapsed()
    assert clock.elapsed() >= elapsed
    assert now > 1_700_000_000_000_000


@pytest.mark.parametrize(
    ("at", "there"),
    [
        (100, True),
        (99.5, True),
        (100 - SILENT_AFTER, True),
        (99 - SILENT_AFTER, False),
        (None, False),
        ("100", False),
    ],
)
def test_a_process_is_there_until_it_has_been_silent_for_too_long(at: object, there: bool) -> None:
    assert is_running(at, 100) is there

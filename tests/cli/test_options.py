from datetime import UTC, datetime, timedelta

import pytest

from penstock.cli.options import parse_duration, parse_time
from penstock.core.errors import Misconfigured
from penstock.testing import ManualClock


def test_a_moment_is_so_long_ago_or_a_time() -> None:
    clock = ManualClock()
    assert parse_time("--since", "10m", clock) == clock.now() - 600_000_000
    there = datetime(2026, 11, 15, 10, tzinfo=UTC).timestamp() * 1e6
    assert parse_time("--since", "2026-11-15T10:00:00+00:00", clock) == there


@pytest.mark.parametrize("text", ["", "soon", "2026-13-01", "-5m", "10 parsecs"])
def test_what_is_no_moment_is_told_with_the_ways_to_write_one(text: str) -> None:
    with pytest.raises(Misconfigured, match="is not a valid time; write how long ago"):
        parse_time("--since", text)


def test_a_duration_is_a_number_and_a_unit() -> None:
    assert parse_duration("--timeout", "5s") == timedelta(seconds=5)
    with pytest.raises(Misconfigured, match=r'^--keep: "soon" is not a duration; .*; or forever$'):
        parse_duration("--keep", "soon", "or forever")

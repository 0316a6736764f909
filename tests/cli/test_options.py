from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.cli.standing import standing

from penstock.channels.kafka import Kafka
from penstock.channels.sqlite import SqliteChannels
from penstock.cli.options import find_channels, parse_duration, parse_time
from penstock.core.clock import SystemClock
from penstock.core.errors import Misconfigured


def test_a_moment_is_so_long_ago_or_a_time() -> None:
    before = SystemClock().now()
    assert before <= parse_time("--since", "10m") + 600_000_000 <= SystemClock().now()
    there = datetime(2026, 11, 15, 10, tzinfo=UTC).timestamp() * 1e6
    assert parse_time("--since", "2026-11-15T10:00:00+00:00") == there


@pytest.mark.parametrize("text", ["", "soon", "2026-13-01", "-5m", "10 parsecs"])
def test_what_is_no_moment_is_told_with_the_ways_to_write_one(text: str) -> None:
    with pytest.raises(Misconfigured, match="is not a valid time; write how long ago"):
        parse_time("--since", text)


def test_a_duration_is_a_number_and_a_unit() -> None:
    assert parse_duration("--timeout", "5s") == timedelta(seconds=5)
    with pytest.raises(Misconfigured, match=r'^--keep: "soon" is not a duration; .*; or forever$'):
        parse_duration("--keep", "soon", "or forever")


def test_an_address_is_taken_at_its_word(tmp_path: Path) -> None:
    assert find_channels(tmp_path, None, f"file://{tmp_path}/c?sync=no") == SqliteChannels(tmp_path / "c", sync=False)


def test_a_host_and_a_port_are_those_of_a_kafka_with_the_settings_of_the_folder(tmp_path: Path) -> None:
    kafka = find_channels(tmp_path, None, "broker:9092")
    assert isinstance(kafka, Kafka)
    assert kafka.where == "kafka://broker:9092"


def test_without_an_address_the_channels_of_what_runs_in_the_folder_are_meant(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="nothing runs here"):
        find_channels(tmp_path, None, None)
    (tmp_path / "penstock.toml").write_text('[channels]\naddress = "kafka://another:9092"\n')
    assert find_channels(tmp_path, None, None).where == "kafka://another:9092"
    with standing(tmp_path, "broker:9092"):
        assert find_channels(tmp_path, None, None).where == "kafka://broker:9092"
        assert find_channels(tmp_path, None, "third:9092").where == "kafka://third:9092"

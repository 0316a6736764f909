from pathlib import Path

import pytest
from tests.cli.standing import standing

from penstock.channels.kafka import Kafka
from penstock.channels.sqlite import SqliteChannels
from penstock.cli.channels import find_channels
from penstock.core.errors import Misconfigured


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

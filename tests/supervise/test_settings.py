from pathlib import Path

import pytest

from penstock.core.errors import Misconfigured
from penstock.core.settings import load
from penstock.supervise.settings import LocalSettings


def test_small_brokers_as_many_as_there_were_are_the_default() -> None:
    settings = LocalSettings()
    assert (settings.brokers, settings.kafka_memory, settings.kafka_port) == (None, "384m", None)


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("brokers", "2", "use 1, 3 or 5"),
        ("brokers", "7", "use 1, 3 or 5"),
        ("brokers", "many", "valid integer"),
        ("kafka_port", "0", "greater than or equal to 1"),
        ("redis_port", "65536", "less than or equal to 65535"),
        ("kafka_memory", "lots", "match"),
        ("redis_fsync", "never", "everysec"),
    ],
)
def test_a_wrong_value_is_answered_with_its_place_and_a_hint(tmp_path: Path, key: str, value: str, hint: str) -> None:
    with pytest.raises(Misconfigured, match=hint) as wrong:
        load({"local": LocalSettings}, tmp_path, environ={f"PENSTOCK_LOCAL_{key.upper()}": value})
    assert wrong.value.location == "environment, [local]"


def test_the_environment_may_ask_for_three_brokers(tmp_path: Path) -> None:
    section = load({"local": LocalSettings}, tmp_path, environ={"PENSTOCK_LOCAL_BROKERS": "3"})["local"]
    assert section == LocalSettings(brokers=3)

"""What can be set."""

from pathlib import Path

from penstock.core.settings import load
from penstock.deliver.settings import DeliverSettings


def test_sites_are_listed_in_the_environment_with_commas(tmp_path: Path) -> None:
    environ = {"PENSTOCK_DELIVER_ORIGINS": "https://a.example, https://b.example", "PENSTOCK_DELIVER_PATIENCE": "2 s"}
    section = load({"deliver": DeliverSettings}, tmp_path, environ=environ)["deliver"]
    assert isinstance(section, DeliverSettings)
    assert section.origins == ("https://a.example", "https://b.example")
    assert section.patience.total_seconds() == 2

"""The script of the charts."""

from pathlib import Path

from penstock.deliver.site import VEGA_VERSION, vega_script


def test_the_script_is_built_once_and_cached(tmp_path: Path) -> None:
    made = vega_script(tmp_path / "cache")
    assert b"window.vegaEmbed" in made
    (kept,) = (tmp_path / "cache").iterdir()
    assert VEGA_VERSION in kept.name
    kept.write_bytes(b"kept")
    assert vega_script(tmp_path / "cache") == b"kept"

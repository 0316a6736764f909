"""The script that draws the charts: Vega, Vega-Lite and Embed, out of the installed package."""

import os
import tempfile
from importlib.metadata import version
from pathlib import Path

import vl_convert

VERSION = version("vl-convert-python")
_SNIPPET = "window.vegaEmbed = vegaEmbed;"


def script(cache: Path | None) -> bytes:
    """The script. Bundling takes a second or two, so it is kept in `cache`, by version."""
    kept = cache and cache / f"vega-{VERSION}.js"
    if kept and kept.is_file():
        return kept.read_bytes()
    made = vl_convert.javascript_bundle(_SNIPPET).encode()
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        # Renamed into place, so that nobody reads half of it.
        handle, draft = tempfile.mkstemp(dir=kept.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(made)
        Path(draft).replace(kept)
    return made

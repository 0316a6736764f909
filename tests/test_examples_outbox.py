"""The source of one's own in docs/sources/own.md and its test, run as users run them."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "outbox"


def test_it_is_as_good_as_ours(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "asyncio_mode=auto",
        "-o",
        "addopts=",
    ]
    asked = subprocess.run(
        [*command, "--rootdir", str(EXAMPLE), "--basetemp", str(tmp_path / "its"), str(EXAMPLE)],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert asked.returncode == 0, asked.stdout + asked.stderr
    assert "skipped" not in asked.stdout


@pytest.mark.parametrize("file", ["outbox.py", "test_outbox.py"])
def test_it_stands_in_the_documentation_as_it_is(file: str) -> None:
    assert (EXAMPLE / file).read_text().strip() in (ROOT / "docs" / "sources" / "own.md").read_text()

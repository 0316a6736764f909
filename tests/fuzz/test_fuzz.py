"""Each framing holds for inputs that are looked for, and for all that once broke it."""

import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fuzz.run import FOUND
from tests.fuzz.targets import WHERE, found

RUNS = 1_000
GUIDED = sys.platform == "linux" and platform.machine() == "x86_64" and sys.version_info < (3, 14)


def inputs() -> list[tuple[str, str]]:
    return sorted((path.parent.name, path.name) for path in FOUND.glob("*/*"))


@pytest.mark.parametrize("name", WHERE)
def test_what_holds_for_all_inputs_holds_for_the_first(name: str) -> None:
    target = found(name)
    for seed in (b"", *target.seeds):
        target.check(seed)


@pytest.mark.parametrize(("name", "what"), inputs())
def test_what_once_failed_does_not_fail_again(name: str, what: str) -> None:
    found(name).check((FOUND / name / what).read_bytes())


@pytest.mark.skipif(not GUIDED, reason="there is no fuzzer for this machine")
@pytest.mark.parametrize("name", WHERE)
def test_inputs_that_are_looked_for_find_nothing(name: str, tmp_path: Path) -> None:
    """As far as a second reaches; `make fuzz` looks for longer."""
    options = (f"-runs={RUNS}", "-seed=1", f"-artifact_prefix={tmp_path}/", str(tmp_path / "kept"))
    command = [sys.executable, "-m", "tests.fuzz.run", name, *options]
    root = Path(__file__).parents[2]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr[-5_000:]
    begun, ended = (re.search(rf"{word}\s+cov: (\d+) ft: (\d+)", ran.stderr) for word in ("INITED", "DONE"))
    assert begun is not None
    assert ended is not None
    # It is the ways through our code that tell which inputs are worth to go on with.
    assert "INFO: Instrumenting penstock.collect" in ran.stderr
    assert int(ended[1]) >= 5
    assert int(ended[2]) >= int(begun[2])

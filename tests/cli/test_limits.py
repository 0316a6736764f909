"""Too few open files are said at the start, by every command that starts something or looks at the machine."""

import json
import subprocess
import sys
from pathlib import Path

FEW = "ulimit -Sn 512; ulimit -Hn 512; exec "


def limited(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = FEW + " ".join([sys.executable, "-m", "penstock", *arguments])
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, timeout=60)


def test_the_doctor_finds_it(tmp_path: Path) -> None:
    result = limited("doctor", "--json", "--folder", str(tmp_path))
    (found,) = [one for one in json.loads(result.stdout) if one["what"] == "open files"]
    assert not found["ok"]
    assert "512" in found["details"]
    assert result.returncode == 1


def test_a_run_says_it_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "pipeline.py").write_text("this is no pipeline")
    result = limited("run", str(tmp_path / "pipeline.py"))
    assert "512 files" in result.stdout
    assert result.returncode == 2

import resource
import subprocess
import sys
from pathlib import Path

from penstock.supervise.limits import REQUIRED_FILES, DiskSpace, file_limit_warning

_RAISED = """
import resource, subprocess, sys
soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from penstock.supervise.limits import raise_file_limit
print(raise_file_limit())
print(subprocess.run(["sh", "-c", "ulimit -Sn"], capture_output=True, text=True).stdout)
"""


def raised(soft: int, hard: int) -> list[int]:
    """What a process says that begins with these limits, and what its child says."""
    done = subprocess.run([sys.executable, "-c", _RAISED, str(soft), str(hard)], capture_output=True, check=True)
    return [int(line) for line in done.stdout.split()]


def test_the_limit_of_open_files_is_raised_for_children_too() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(hard, 8_192)
    assert raised(256, most) == [most, most]


def test_too_few_open_files_are_said() -> None:
    assert raised(256, 512) == [512, 512]
    assert "512" in (file_limit_warning(512) or "")
    assert file_limit_warning(REQUIRED_FILES) is None


def test_a_disk_with_less_than_the_reserve_is_full(tmp_path: Path) -> None:
    assert DiskSpace(tmp_path, 0).shortage() is None
    assert str(tmp_path) in (DiskSpace(tmp_path, 1 << 62).shortage() or "")
    assert DiskSpace(tmp_path / "gone", 1 << 62).shortage() is None

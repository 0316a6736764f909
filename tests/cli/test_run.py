"""`penstock run` as a person meets it. What a whole pipeline does is in tests/test_run.py."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.cli.progress import NOTHING_LOST

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
PENSTOCK = [sys.executable, "-m", "penstock"]


def declare(folder: Path, partitions: int, keep: str) -> None:
    channel = f'app.channel("letters", partitions={partitions}, retention="{keep}")'
    (folder / "small.py").write_text(f'from penstock import Pipeline\n\napp = Pipeline("small")\n{channel}\n')


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [*PENSTOCK, "run", "small.py", *arguments]
    return subprocess.Popen(command, cwd=folder, env=CLEAN, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def said_until(process: subprocess.Popen[str], description: str) -> str:
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if description in line:
            break
    assert description in said
    return said


@contextmanager
def ran(folder: Path, *arguments: str) -> Iterator[str]:
    """A run of it; what it said until it was there."""
    process = started(folder, *arguments)
    try:
        yield said_until(process, " small runs; ")
    finally:
        process.terminate()
        process.communicate(timeout=60)


def penstock(folder: Path, *arguments: str) -> str:
    command = [*PENSTOCK, *arguments]
    return subprocess.run(command, cwd=folder, env=CLEAN, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.usefixtures("jars")
@pytest.mark.parametrize("address", ["file://", "redis://"])
def test_it_tells_what_becomes_of_its_channels_and_is_found_without_its_profile(address: str, tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text(f'[profiles.other.channels]\naddress = "{address}"\n')
    declare(tmp_path, partitions=1, keep="1 day")
    with ran(tmp_path, "--profile", "other") as said:
        assert " channels created: 5\n" in said
        assert "letters" in penstock(tmp_path, "topics", "--list")
    declare(tmp_path, partitions=3, keep="2 days")
    with ran(tmp_path, "--profile", "other") as said:
        assert "channels created" not in said
        assert " channel letters has more partitions now: " in said
        assert "; it is not changed\n" in said
        told = json.loads(penstock(tmp_path, "topics", "--describe", "--topic", "letters", "--json"))
        assert [len(topic["partitions"]) for topic in told["topics"]] == [3]


@pytest.mark.usefixtures("jars")
def test_who_asks_twice_to_stop_is_told_that_nothing_is_lost(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text('[channels]\naddress = "file://"\n')
    declare(tmp_path, partitions=1, keep="1 day")
    process = started(tmp_path)
    try:
        said_until(process, " small runs; ")
        # One that does not stop by itself.
        os.kill(int((tmp_path / ".penstock/ready/audit").read_text()), signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        said_until(process, "stopping")
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert NOTHING_LOST in said
    assert "Traceback" not in said

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from penstock.supervise.leftovers import Children
from penstock.supervise.notes import read_note, write_note


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        yield process
        process.kill()


def test_a_child_of_an_earlier_run_is_ended(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], gone: Callable[[int], bool]
) -> None:
    born = psutil.Process(sleeper.pid).create_time()
    Children(tmp_path / "children.json").remember("sleeper", sleeper.pid, born)
    assert Children(tmp_path / "children.json").end_leftovers() == ["sleeper"]
    assert gone(sleeper.pid)
    assert Children(tmp_path / "children.json").end_leftovers() == []


def test_a_stranger_with_the_same_pid_is_left_alone(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], gone: Callable[[int], bool]
) -> None:
    born = psutil.Process(sleeper.pid).create_time()
    Children(tmp_path / "children.json").remember("sleeper", sleeper.pid, born - 1)
    assert Children(tmp_path / "children.json").end_leftovers() == []
    assert not gone(sleeper.pid)


def test_a_child_that_ended_is_forgotten(tmp_path: Path) -> None:
    children = Children(tmp_path / "children.json")
    children.remember("a", 4_000_001, 1.5)
    children.remember("b", 4_000_002, 2.5)
    children.forget("a")
    children.forget("never")
    assert read_note(tmp_path / "children.json") == {"b": [4_000_002, 2.5]}


@pytest.mark.parametrize("noted", [None, 7, [], [1, 0.0], [0, 0.0], [-1, 0.0], ["1", 2], [4_000_001, 0.5]])
def test_a_spoilt_file_of_children_ends_nobody(tmp_path: Path, noted: object) -> None:
    write_note(tmp_path / "children.json", {"a": noted})
    assert Children(tmp_path / "children.json").end_leftovers() == []

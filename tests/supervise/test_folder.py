import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from penstock.core.errors import Misconfigured
from penstock.supervise.folder import StateFolder
from penstock.supervise.notes import write_note

HOLD = """
import sys
from pathlib import Path
from penstock.supervise.folder import StateFolder
with StateFolder(Path(sys.argv[1])).held():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the folder."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_run_is_refused_with_the_pid_of_the_first(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    with pytest.raises(Misconfigured) as refused, StateFolder(tmp_path).held():
        pass
    assert str(refused.value) == (
        f"{tmp_path}: it is in use by the process {other.pid}; "
        f"stop that one (kill {other.pid}), or start this one in another folder"
    )


def test_a_folder_is_free_once_its_holder_was_killed(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    other.kill()
    other.wait()
    with StateFolder(tmp_path).held() as folder:
        assert folder.holder() == os.getpid()


def test_the_holder_is_known_to_those_who_only_look(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    assert StateFolder(tmp_path).holder() == other.pid
    assert StateFolder(tmp_path / "unknown").holder() is None


def test_a_pid_that_is_somebody_elses_by_now_is_no_holder(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    (tmp_path / "lock").write_text(f"{os.getpid()} 1.0\n")
    assert StateFolder(tmp_path).holder() is None
    (tmp_path / "lock").write_text("")
    assert StateFolder(tmp_path).holder() is None
    with pytest.raises(Misconfigured, match="it is in use by another process"), StateFolder(tmp_path).held():
        pass


def test_one_role_does_not_exclude_another(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    with StateFolder(tmp_path, "services").held() as services:
        assert services.holder() == os.getpid()
        assert StateFolder(tmp_path).holder() == other.pid


def test_who_only_looks_keeps_nobody_out(tmp_path: Path) -> None:
    with StateFolder(tmp_path).held():
        pass
    with (tmp_path / "lock").open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        away = threading.Timer(0.1, fcntl.flock, (looking, fcntl.LOCK_UN))
        away.start()
        try:
            with StateFolder(tmp_path).held() as folder:
                assert folder.holder() == os.getpid()
        finally:
            away.join()


def test_only_the_note_of_who_holds_the_folder_is_believed(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    folder = StateFolder(tmp_path)
    assert folder.told("a.json") == {}
    write_note(tmp_path / "a.json", {"pid": other.pid, "x": 1})
    assert folder.told("a.json") == {"pid": other.pid, "x": 1}
    write_note(tmp_path / "a.json", {"pid": os.getpid(), "x": 1})
    assert folder.told("a.json") == {}
    write_note(tmp_path / "a.json", {"pid": other.pid, "x": 1})
    other.kill()
    other.wait()
    assert folder.told("a.json") == {}


def test_a_folder_that_was_held_has_no_holder(tmp_path: Path) -> None:
    with StateFolder(tmp_path).held():
        pass
    assert StateFolder(tmp_path).holder() is None


def test_holding_ends_what_a_killed_run_left(tmp_path: Path, gone: Callable[[int], bool]) -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as left:
        StateFolder(tmp_path).children.remember("left", left.pid, psutil.Process(left.pid).create_time())
        with StateFolder(tmp_path).held():
            assert gone(left.pid)


def test_sub_folders_and_logs_lie_in_the_folder(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "a" / ".penstock")
    assert folder.sub("kafka", "1") == tmp_path / "a/.penstock/kafka/1"
    assert folder.sub("kafka", "1").is_dir()
    assert folder.log("redis") == tmp_path / "a/.penstock/logs/redis.log"
    assert folder.port("redis") == folder.port("redis")


def test_version_control_does_not_see_the_folder(tmp_path: Path) -> None:
    with StateFolder(tmp_path).held():
        assert (tmp_path / ".gitignore").read_text() == "*\n"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Misconfigured, match="no state can be kept there"), StateFolder(tmp_path / "file" / "x").held():
        pass


def test_a_new_folder_is_its_owners_alone(tmp_path: Path) -> None:
    with StateFolder(tmp_path / ".penstock").held() as folder:
        assert folder.path.stat().st_mode & 0o777 == 0o700
        assert folder.sub("kafka").stat().st_mode & 0o777 == 0o700


def test_a_folder_of_an_earlier_version_is_closed_to_others(tmp_path: Path) -> None:
    state, outside = tmp_path / ".penstock", tmp_path / "outside"
    outside.touch()
    (state / "logs").mkdir(parents=True)
    (state / "logs" / "run.log").write_text("a payload")
    (state / "link").symlink_to(outside)
    for path, mode in (
        (outside, 0o644),
        (state, 0o755),
        (state / "logs", 0o755),
        (state / "logs" / "run.log", 0o644),
    ):
        path.chmod(mode)
    with StateFolder(state).held():
        pass
    assert [one.stat().st_mode & 0o777 for one in (state, state / "logs", state / "logs" / "run.log")] == [
        0o700,
        0o700,
        0o600,
    ]
    assert outside.stat().st_mode & 0o777 == 0o644


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_user_is_told_that_the_folder_is_not_his(tmp_path: Path) -> None:
    with StateFolder(tmp_path / ".penstock").held():
        pass
    ask = (
        "import os, sys; from pathlib import Path; from penstock.supervise.folder import StateFolder; os.setuid(65534)"
    )
    ask += "\ntry: StateFolder(Path(sys.argv[1])).holder()\nexcept Exception as error: print(type(error).__name__)"
    done = subprocess.run(
        [sys.executable, "-c", ask, str(tmp_path / ".penstock")], capture_output=True, text=True, check=False
    )
    assert done.stdout == "Misconfigured\n", done.stderr

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from penstock.supervise.process import (
    REQUIRED_FILES,
    Process,
    Service,
    file_limit_warning,
    start,
    stop_on_signals,
    tail,
)

Starter = Callable[[str], Process]
Wait = Callable[[Callable[[], object]], None]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Starter]:
    """Starts shell scripts in the test's folder, and ends them after the test."""
    started: list[Process] = []

    def run(script: str) -> Process:
        service = Service("x", ("sh", "-c", script), tmp_path / "logs" / "x.log", env={"ASKED": "yes"}, folder=tmp_path)
        started.append(start(service))
        return started[-1]

    yield run
    for process in started:
        process.kill()


def test_both_outputs_are_appended_to_the_log(shell: Starter, eventually: Wait) -> None:
    first = shell("echo out; echo err >&2")
    eventually(lambda: first.exit_code() == 0)
    second = shell("echo again")
    eventually(lambda: second.exit_code() == 0)
    assert first.log.read_text() == "out\nerr\nagain\n"


def test_the_last_lines_are_those_of_this_life(shell: Starter, eventually: Wait) -> None:
    first = shell("echo old")
    eventually(lambda: first.exit_code() == 0)
    second = shell("seq 1 9")
    eventually(lambda: second.exit_code() == 0)
    assert second.last_lines(3) == ["7", "8", "9"]
    assert second.last_lines() == [str(number) for number in range(1, 10)]


def test_it_gets_its_environment_over_ours_and_its_folder(shell: Starter, eventually: Wait, tmp_path: Path) -> None:
    process = shell('echo "$ASKED $PATH"; pwd')
    eventually(lambda: process.exit_code() == 0)
    assert process.last_lines() == [f"yes {os.environ['PATH']}", str(tmp_path)]


def test_it_leads_a_session_of_its_own(shell: Starter) -> None:
    process = shell("sleep 600")
    assert os.getsid(process.pid) == process.pid != os.getsid(0)


def test_it_is_known_by_the_time_of_its_birth(shell: Starter, eventually: Wait) -> None:
    process = shell("exec sleep 600")
    eventually(lambda: psutil.Process(process.pid).name() == "sleep")
    assert psutil.Process(process.pid).create_time() == process.created


def test_a_signal_shows_in_the_exit_code(shell: Starter, eventually: Wait) -> None:
    process = shell("exec sleep 600")
    process.signal(signal.SIGTERM)
    eventually(lambda: process.exit_code() is not None)
    assert process.exit_code() == -signal.SIGTERM


def test_the_end_takes_along_what_it_started(shell: Starter, eventually: Wait, gone: Callable[[int], bool]) -> None:
    process = shell("sleep 600 & echo $!; wait")
    eventually(process.last_lines)
    grandchild = int(process.last_lines()[0])
    process.kill()
    eventually(lambda: gone(grandchild))


def test_memory_counts_the_whole_family(shell: Starter, eventually: Wait) -> None:
    alone = shell("exec sleep 600")
    eventually(lambda: psutil.Process(alone.pid).name() == "sleep")
    assert 0 < alone.memory() < 20_000_000
    hold = "x = bytearray(b'1' * 50_000_000); print('held', flush=True); input()"
    family = shell(f'sleep 600 | {sys.executable} -c "{hold}"')
    eventually(lambda: "held" in family.last_lines())
    assert family.memory() > 50_000_000


def test_memory_of_one_that_is_gone_is_nothing(shell: Starter) -> None:
    process = shell("exit 0")
    process.kill()
    assert process.memory() == 0


def test_a_command_that_does_not_exist_says_so_in_the_log(tmp_path: Path, eventually: Wait) -> None:
    process = start(Service("x", ("no-such-program",), tmp_path / "x.log"))
    eventually(lambda: process.exit_code() is not None)
    assert process.exit_code() == 1
    assert process.last_lines() == ["no-such-program cannot be run: No such file or directory"]


def test_a_large_log_is_put_aside(shell: Starter, eventually: Wait, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "x.log"
    log.parent.mkdir()
    log.write_bytes(b"old\n" * 5_000_000)
    process = shell("echo new")
    eventually(lambda: process.exit_code() == 0)
    assert log.read_text() == "new\n"
    assert (tmp_path / "logs" / "x.log.1").stat().st_size == 20_000_000


def test_a_tail_is_cut_from_any_bytes(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"x" * 100_000 + b"\n\xff\xfe\nlast")
    assert tail(tmp_path / "log", 2) == ["��", "last"]
    assert tail(tmp_path / "nowhere", 2) == []


_RAISED = """
import resource, subprocess, sys
soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from penstock.supervise.process import raise_file_limit
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_sets_the_event_and_the_second_interrupts(number: signal.Signals) -> None:
    # The tests may run under nohup.
    inherited = signal.signal(number, signal.SIG_DFL)
    try:
        with stop_on_signals() as stop:
            assert not stop.is_set()
            signal.raise_signal(number)
            assert stop.is_set()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, inherited)


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.is_set()
    finally:
        signal.signal(signal.SIGHUP, before)

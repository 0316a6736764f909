import fcntl
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from penstock.core.errors import Misconfigured
from penstock.core.settings import load
from penstock.supervise.folder import (
    HOST,
    Children,
    DiskSpace,
    LocalSettings,
    StateFolder,
    from_note,
    read_note,
    write_note,
)

HOLD = """
import sys
from pathlib import Path
from penstock.supervise.folder import StateFolder
with StateFolder(Path(sys.argv[1])).locked():
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
    with pytest.raises(Misconfigured) as refused, StateFolder(tmp_path).locked():
        pass
    assert refused.value.location == str(tmp_path)
    assert f"process {other.pid}" in refused.value.problem
    assert f"kill {other.pid}" in refused.value.fix


def test_a_folder_is_free_once_its_holder_was_killed(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    other.kill()
    other.wait()
    with StateFolder(tmp_path).locked() as folder:
        assert folder.owner() == os.getpid()


def test_the_holder_is_known_to_those_who_only_look(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    assert StateFolder(tmp_path).owner() == other.pid
    assert StateFolder(tmp_path / "unknown").owner() is None


def test_a_pid_that_is_somebody_elses_by_now_is_no_holder(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    (tmp_path / "lock").write_text(f"{os.getpid()} 1.0\n")
    assert StateFolder(tmp_path).owner() is None
    (tmp_path / "lock").write_text("")
    assert StateFolder(tmp_path).owner() is None
    with pytest.raises(Misconfigured, match="in use by another process"), StateFolder(tmp_path).locked():
        pass


def test_one_role_does_not_exclude_another(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    with StateFolder(tmp_path, "services").locked() as services:
        assert services.owner() == os.getpid()
        assert StateFolder(tmp_path).owner() == other.pid


def test_who_only_looks_keeps_nobody_out(tmp_path: Path) -> None:
    with StateFolder(tmp_path).locked():
        pass
    with (tmp_path / "lock").open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        away = threading.Timer(0.1, fcntl.flock, (looking, fcntl.LOCK_UN))
        away.start()
        try:
            with StateFolder(tmp_path).locked() as folder:
                assert folder.owner() == os.getpid()
        finally:
            away.join()


def test_only_the_note_of_who_holds_the_folder_is_believed(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    folder = StateFolder(tmp_path)
    assert folder.read_note("a.json") == {}
    write_note(tmp_path / "a.json", {"pid": other.pid, "x": 1})
    assert folder.read_note("a.json") == {"pid": other.pid, "x": 1}
    write_note(tmp_path / "a.json", {"pid": os.getpid(), "x": 1})
    assert folder.read_note("a.json") == {}
    write_note(tmp_path / "a.json", {"pid": other.pid, "x": 1})
    other.kill()
    other.wait()
    assert folder.read_note("a.json") == {}


def test_a_folder_that_was_held_has_no_holder(tmp_path: Path) -> None:
    with StateFolder(tmp_path).locked():
        pass
    assert StateFolder(tmp_path).owner() is None


def test_holding_ends_what_a_killed_run_left(tmp_path: Path, gone: Callable[[int], bool]) -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as left:
        StateFolder(tmp_path).children.add("left", left.pid, psutil.Process(left.pid).create_time())
        with StateFolder(tmp_path).locked():
            assert gone(left.pid)


def test_sub_folders_and_logs_lie_in_the_folder(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "a" / ".penstock")
    assert folder.sub("kafka", "1") == tmp_path / "a/.penstock/kafka/1"
    assert folder.sub("kafka", "1").is_dir()
    assert folder.log("redis") == tmp_path / "a/.penstock/logs/redis.log"
    assert folder.port("redis") == folder.port("redis")


def test_version_control_does_not_see_the_folder(tmp_path: Path) -> None:
    with StateFolder(tmp_path).locked():
        assert (tmp_path / ".gitignore").read_text() == "*\n"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(Misconfigured, match=r"file/x: .* cannot be created"),
        StateFolder(tmp_path / "file" / "x").locked(),
    ):
        pass


def test_a_new_folder_is_its_owners_alone(tmp_path: Path) -> None:
    with StateFolder(tmp_path / ".penstock").locked() as folder:
        assert folder.path.stat().st_mode & 0o777 == 0o700
        assert folder.sub("kafka").stat().st_mode & 0o777 == 0o700


def test_a_folder_of_an_earlier_version_is_closed_to_others(tmp_path: Path) -> None:
    state = tmp_path / ".penstock"
    state.mkdir()
    state.chmod(0o755)
    with StateFolder(state).locked():
        pass
    assert state.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_user_is_told_that_the_folder_is_not_his(tmp_path: Path) -> None:
    with StateFolder(tmp_path / ".penstock").locked():
        pass
    ask = (
        "import os, sys; from pathlib import Path; from penstock.supervise.folder import StateFolder; os.setuid(65534)"
    )
    ask += "\ntry: StateFolder(Path(sys.argv[1])).owner()\nexcept Exception as error: print(type(error).__name__)"
    done = subprocess.run(
        [sys.executable, "-c", ask, str(tmp_path / ".penstock")], capture_output=True, text=True, check=False
    )
    assert done.stdout == "Misconfigured\n", done.stderr


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_note(tmp_path / "new" / "a.json", {"x": [1, 2.5], "y": "é"})
    assert read_note(tmp_path / "new" / "a.json") == {"x": [1, 2.5], "y": "é"}


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"a": '])
def test_a_spoilt_note_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    assert read_note(tmp_path / "a.json") == {}


def test_a_note_of_bytes_that_are_no_text_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"\xff\xfe\x00")
    assert read_note(tmp_path / "a.json") == {}


def test_a_missing_note_says_nothing(tmp_path: Path) -> None:
    assert read_note(tmp_path / "a.json") == {}


def test_only_the_owner_can_read_a_note(tmp_path: Path) -> None:
    (tmp_path / "a.json").touch(0o644)
    write_note(tmp_path / "a.json", {"x": 2})
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o600


@dataclass(frozen=True)
class Facts:
    a: int
    b: int = 0


def test_a_note_of_another_version_is_understood_as_far_as_it_goes() -> None:
    assert from_note(Facts, {"a": 1, "b": 2}) == Facts(1, 2)
    assert from_note(Facts, {"a": 1, "c": 3}) == Facts(1)
    assert from_note(Facts, {"b": 2}) is None
    assert from_note(Facts, {}) is None


@contextmanager
def listening(port: int = 0) -> Iterator[int]:
    with socket.create_server((HOST, port)) as server:
        yield server.getsockname()[1]


def test_a_name_keeps_its_port_in_the_next_run(tmp_path: Path) -> None:
    port = StateFolder(tmp_path).port("redis")
    assert StateFolder(tmp_path).port("redis") == port


def test_a_port_that_somebody_took_meanwhile_is_replaced(tmp_path: Path) -> None:
    port = StateFolder(tmp_path).port("redis")
    with listening(port):
        other = StateFolder(tmp_path).port("redis")
    assert other != port
    assert StateFolder(tmp_path).port("redis") == other


def test_two_names_never_share_a_port(tmp_path: Path) -> None:
    ports = StateFolder(tmp_path)
    given = [ports.port(f"service-{number}") for number in range(50)]
    assert len(set(given)) == 50


def test_a_set_port_is_given_and_another_name_yields_it(tmp_path: Path) -> None:
    port = StateFolder(tmp_path).port("redis")
    ports = StateFolder(tmp_path)
    assert ports.port("kafka", port) == port
    assert ports.port("redis") != port


def test_a_set_port_that_is_taken_is_refused_by_the_name_of_its_setting(tmp_path: Path) -> None:
    with listening() as port, pytest.raises(Misconfigured, match=rf"\[local\] redis_port: port {port} is in use"):
        StateFolder(tmp_path).port("redis", port, "[local] redis_port")


def test_a_set_port_that_another_name_has_is_refused(tmp_path: Path) -> None:
    ports = StateFolder(tmp_path)
    port = ports.port("kafka")
    with pytest.raises(Misconfigured, match="in use"):
        ports.port("redis", port)


@pytest.mark.parametrize(
    "text", ['{"redis": "x"}', '{"redis": 99999999}', '{"redis": -1}', '{"redis": null}', "nonsense"]
)
def test_a_spoilt_file_of_ports_is_no_obstacle(tmp_path: Path, text: str) -> None:
    (tmp_path / "ports.json").write_text(text)
    assert 0 < StateFolder(tmp_path).port("redis") < 65536


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        yield process
        process.kill()


def test_a_child_of_an_earlier_run_is_ended(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], gone: Callable[[int], bool]
) -> None:
    born = psutil.Process(sleeper.pid).create_time()
    Children(tmp_path / "children.json").add("sleeper", sleeper.pid, born)
    assert Children(tmp_path / "children.json").end_leftovers() == ["sleeper"]
    assert gone(sleeper.pid)
    assert Children(tmp_path / "children.json").end_leftovers() == []


def test_a_stranger_with_the_same_pid_is_left_alone(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], gone: Callable[[int], bool]
) -> None:
    born = psutil.Process(sleeper.pid).create_time()
    Children(tmp_path / "children.json").add("sleeper", sleeper.pid, born - 1)
    assert Children(tmp_path / "children.json").end_leftovers() == []
    assert not gone(sleeper.pid)


def test_a_child_that_ended_is_forgotten(tmp_path: Path) -> None:
    children = Children(tmp_path / "children.json")
    children.add("a", 4_000_001, 1.5)
    children.add("b", 4_000_002, 2.5)
    children.remove("a")
    children.remove("never")
    assert read_note(tmp_path / "children.json") == {"b": [4_000_002, 2.5]}


@pytest.mark.parametrize("noted", [None, 7, [], [1, 0.0], [0, 0.0], [-1, 0.0], ["1", 2], [4_000_001, 0.5]])
def test_a_spoilt_file_of_children_ends_nobody(tmp_path: Path, noted: object) -> None:
    write_note(tmp_path / "children.json", {"a": noted})
    assert Children(tmp_path / "children.json").end_leftovers() == []


def test_a_disk_with_less_than_the_reserve_is_full(tmp_path: Path) -> None:
    assert DiskSpace(tmp_path, 0).shortage() is None
    assert str(tmp_path) in (DiskSpace(tmp_path, 1 << 62).shortage() or "")
    assert DiskSpace(tmp_path / "gone", 1 << 62).shortage() is None


def test_small_brokers_as_many_as_there_were_are_the_default() -> None:
    settings = LocalSettings()
    assert (settings.brokers, settings.kafka_memory, settings.kafka_port) == (None, "384m", None)


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("brokers", "2", "use 1, 3 or 5"),
        ("brokers", "7", "use 1, 3 or 5"),
        ("brokers", "many", "valid integer"),
        ("kafka_port", "0", "greater than or equal to 1"),
        ("redis_port", "65536", "less than or equal to 65535"),
        ("kafka_memory", "lots", "match"),
        ("redis_fsync", "never", "everysec"),
    ],
)
def test_a_wrong_value_is_answered_with_its_place_and_a_hint(tmp_path: Path, key: str, value: str, hint: str) -> None:
    with pytest.raises(Misconfigured, match=hint) as wrong:
        load({"local": LocalSettings}, tmp_path, environ={f"PENSTOCK_LOCAL_{key.upper()}": value})
    assert wrong.value.location == "environment, [local]"


def test_the_environment_may_ask_for_three_brokers(tmp_path: Path) -> None:
    section = load({"local": LocalSettings}, tmp_path, environ={"PENSTOCK_LOCAL_BROKERS": "3"})["local"]
    assert section == LocalSettings(brokers=3)

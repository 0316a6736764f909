import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from graphlib import CycleError
from pathlib import Path

import pytest

from penstock.core.errors import Unavailable
from penstock.supervise.folder import StateFolder
from penstock.supervise.process import Service, stop_on_signals
from penstock.supervise.supervisor import Event, EventKind, Supervisor, backoff, exit_reason, last_line
from penstock.testing import ManualClock

Running = Callable[[Sequence[Service]], AbstractContextManager[Supervisor]]
Wait = Callable[[Callable[[], object]], None]
Gone = Callable[[int], bool]
Watch = Callable[[Supervisor, Callable[[], object]], None]

STUBBORN = "trap '' TERM; touch stubborn; while :; do sleep 0.05; done"


@dataclass(frozen=True)
class Scripts:
    """Services made of shell scripts that all run in one folder."""

    folder: Path

    def service(self, name: str, script: str = "exec sleep 600", *needs: str, mark: str = "") -> Service:
        """Ready when the file `mark` is there, or at once."""
        return Service(
            name,
            ("sh", "-c", script),
            self.folder / f"{name}.log",
            ready=(self.folder / mark).exists,
            folder=self.folder,
            needs=needs,
            ready_within=20,
        )


@pytest.fixture
def scripts(tmp_path: Path) -> Scripts:
    return Scripts(tmp_path)


def history(events: Sequence[Event], *kinds: EventKind) -> list[tuple[str, EventKind]]:
    return [(event.service, event.kind) for event in events if event.kind in kinds]


def test_a_service_is_ready_when_its_probe_answers(running: Running, scripts: Scripts, events: list[Event]) -> None:
    with running([scripts.service("a", "sleep 0.2; touch done; exec sleep 600", mark="done")]):
        assert (scripts.folder / "done").exists()
        assert [event.kind for event in events] == [EventKind.STARTED, EventKind.READY]


def test_a_service_starts_when_what_it_needs_is_ready(running: Running, scripts: Scripts, events: list[Event]) -> None:
    last = scripts.service("b", "exec sleep 600", "a")
    with running([last, scripts.service("a", "sleep 0.2; touch done; exec sleep 600", mark="done")]):
        assert [(event.service, event.kind) for event in events] == [
            ("a", EventKind.STARTED),
            ("a", EventKind.READY),
            ("b", EventKind.STARTED),
            ("b", EventKind.READY),
        ]


def test_services_that_do_not_need_each_other_start_side_by_side(running: Running, scripts: Scripts) -> None:
    mine = "touch {}; while ! test -e {}; do sleep 0.02; done; touch {}; exec sleep 600"
    with running(
        [
            scripts.service("a", mine.format("a1", "b1", "a2"), mark="a2"),
            scripts.service("b", mine.format("b1", "a1", "b2"), mark="b2"),
        ]
    ):
        assert (scripts.folder / "a2").exists()


def test_one_that_ends_during_the_start_shows_its_last_lines_and_the_others_stop(
    folder: StateFolder, scripts: Scripts, events: list[Event]
) -> None:
    services = [scripts.service("good"), scripts.service("bad", "seq 1 50; echo no such luck; exit 3", mark="never")]
    with pytest.raises(Unavailable) as failed:
        Supervisor(services, folder, events.append).start()
    assert "bad is unavailable: it ended with code 3" in str(failed.value)
    assert str(failed.value).endswith("\n49\n50\nno such luck")
    assert ("good", EventKind.STOPPED) in history(events, EventKind.STOPPED)


def test_one_that_stays_silent_is_given_up_after_its_patience(folder: StateFolder, tmp_path: Path) -> None:
    silent = Service("mute", ("sh", "-c", "echo hm; exec sleep 600"), tmp_path / "log", lambda: False, ready_within=0.3)
    with pytest.raises(Unavailable, match=r"mute is unavailable: it did not become ready within 0.3 s .*\nhm$"):
        Supervisor([silent], folder).start()


def test_one_that_is_killed_is_started_again(
    running: Running, scripts: Scripts, events: list[Event], watch_until: Watch
) -> None:
    with running([scripts.service("a")]) as supervisor:
        first = supervisor.processes()["a"].pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        watch_until(supervisor, lambda: len(history(events, EventKind.READY)) == 2)
        usage = supervisor.processes()["a"]
        assert usage.pid not in (None, first)
        assert usage.deaths == 1
        assert [str(event) for event in events[2:4]] == [
            "a died: it was ended by SIGKILL",
            "a starts again in 0.5 s",
        ]


def test_what_a_dead_one_left_is_ended_before_its_next_life(
    running: Running, scripts: Scripts, events: list[Event], gone: Gone, watch_until: Watch
) -> None:
    with running([scripts.service("a", "sleep 600 & echo $! > child; touch done; wait", mark="done")]) as supervisor:
        grandchild = int((scripts.folder / "child").read_text())
        os.kill(supervisor.processes()["a"].pid or 0, signal.SIGKILL)
        watch_until(supervisor, lambda: len(history(events, EventKind.STARTED)) == 2)
        assert gone(grandchild)


def test_the_pause_doubles_up_to_half_a_minute() -> None:
    assert [backoff(failures) for failures in range(1, 10)] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert backoff(5000) == 30


@pytest.mark.parametrize(("healthy", "pauses"), [(59, [0.5, 1, 2]), (61, [0.5, 0.5, 0.5])])
def test_failures_are_forgotten_after_a_minute_of_health(
    folder: StateFolder, scripts: Scripts, healthy: int, pauses: list[float]
) -> None:
    clock = ManualClock()
    told: list[float | None] = []
    stop = threading.Event()

    def react(event: Event) -> None:
        if event.kind is EventKind.RESTARTING:
            told.append(event.delay)
            clock.move(event.delay or 0)
            if len(told) == 3:
                stop.set()
        if event.kind is EventKind.READY:
            clock.move(healthy)
            (scripts.folder / "die").touch()

    mortal = scripts.service("a", "touch up; while ! test -e die; do sleep 0.02; done; rm die up", mark="up")
    supervisor = Supervisor([mortal], folder, react, clock)
    supervisor.start()
    supervisor.run_until(stop)
    supervisor.stop()
    assert told == pauses


def test_one_that_starts_again_waits_for_what_it_needs(
    running: Running, scripts: Scripts, events: list[Event], watch_until: Watch
) -> None:
    base = scripts.service("base", "touch up; trap 'rm up; exit 1' TERM; sleep 600 & wait", mark="up")
    with running([base, scripts.service("top", "exec sleep 600", "base")]) as supervisor:
        before = supervisor.processes()
        os.kill(before["base"].pid or 0, signal.SIGTERM)
        os.kill(before["top"].pid or 0, signal.SIGKILL)
        events.clear()
        watch_until(supervisor, lambda: len(history(events, EventKind.READY)) == 2)
        assert history(events, EventKind.READY, EventKind.STARTED)[1:3] == [
            ("base", EventKind.READY),
            ("top", EventKind.STARTED),
        ]


def test_the_stop_goes_against_the_order_of_needs(running: Running, scripts: Scripts, events: list[Event]) -> None:
    chain = [
        scripts.service("a"),
        scripts.service("b", "exec sleep 600", "a"),
        scripts.service("c", "exec sleep 600", "b"),
    ]
    with running(chain):
        pass
    assert history(events, EventKind.STOPPED, EventKind.KILLED) == [
        ("c", EventKind.STOPPED),
        ("b", EventKind.STOPPED),
        ("a", EventKind.STOPPED),
    ]


def test_one_that_does_not_listen_is_killed_in_time_and_the_others_keep_their_share(
    folder: StateFolder, scripts: Scripts, events: list[Event]
) -> None:
    kind = "touch kind; trap 'sleep 0.3; exit 0' TERM; sleep 600 & wait"
    supervisor = Supervisor(
        [scripts.service("kind", kind, mark="kind"), scripts.service("deaf", STUBBORN, "kind", mark="stubborn")],
        folder,
        events.append,
    )
    supervisor.start()
    before = time.monotonic()
    supervisor.stop(within=3)
    assert time.monotonic() - before < 3.5
    assert history(events, EventKind.STOPPED, EventKind.KILLED) == [
        ("deaf", EventKind.KILLED),
        ("kind", EventKind.STOPPED),
    ]


def test_a_second_signal_during_the_stop_kills_the_rest_at_once(
    folder: StateFolder, scripts: Scripts, events: list[Event], gone: Gone
) -> None:
    impatient = f"trap 'kill -INT {os.getpid()}' TERM; touch up; while :; do sleep 0.05; done"
    supervisor = Supervisor([scripts.service("a", impatient, mark="up")], folder, events.append)
    supervisor.start()
    pid = supervisor.processes()["a"].pid
    with stop_on_signals() as stop:
        stop.set()
        with pytest.raises(KeyboardInterrupt):
            supervisor.stop()
    assert pid is not None
    assert gone(pid)
    assert history(events, EventKind.KILLED) == [("a", EventKind.KILLED)]


def test_a_start_that_is_asked_to_stop_returns(folder: StateFolder, scripts: Scripts, events: list[Event]) -> None:
    stop = threading.Event()
    supervisor = Supervisor([scripts.service("slow", mark="never")], folder, lambda _event: stop.set())
    supervisor.start(stop)
    assert supervisor.processes()["slow"].pid is not None
    supervisor.stop()
    assert supervisor.processes()["slow"].pid is None


def test_to_stop_again_changes_nothing(running: Running, scripts: Scripts, events: list[Event]) -> None:
    with running([scripts.service("a")]) as supervisor:
        supervisor.stop()
        told = list(events)
        supervisor.stop()
        assert events == told


def test_the_processes_and_their_memory_are_known(running: Running, scripts: Scripts) -> None:
    with running([scripts.service("a")]) as supervisor:
        usage = supervisor.processes()["a"]
        assert usage.pid is not None
        assert usage.memory > 0
        assert usage.deaths == 0


SUPERVISE = """
import sys, threading
from pathlib import Path
from penstock.supervise.folder import StateFolder
from penstock.supervise.process import Service
from penstock.supervise.supervisor import Supervisor
home = Path(sys.argv[1])
with StateFolder(home / ".penstock").locked() as folder:
    services = [Service(name, ("sleep", "600"), home / f"{name}.log") for name in ("a", "b", "c")]
    supervisor = Supervisor(services, folder)
    supervisor.start()
    print(*(usage.pid for usage in supervisor.processes().values()), flush=True)
    supervisor.run_until(threading.Event())
"""


def test_kill_9_of_the_supervisor_leaves_no_child(tmp_path: Path, eventually: Wait, gone: Gone) -> None:
    command = [sys.executable, "-c", SUPERVISE, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pids = [int(pid) for pid in supervisor.stdout.readline().split()]
        assert len(pids) == 3
        assert not any(gone(pid) for pid in pids)
        supervisor.kill()
        eventually(lambda: all(gone(pid) for pid in pids))


def test_services_that_do_not_fit_together_are_refused(folder: StateFolder, scripts: Scripts) -> None:
    with pytest.raises(ValueError, match="a needs b, which is not there"):
        Supervisor([scripts.service("a", "", "b")], folder)
    with pytest.raises(ValueError, match="same name"):
        Supervisor([scripts.service("a"), scripts.service("a")], folder)
    with pytest.raises(CycleError):
        Supervisor([scripts.service("a", "", "b"), scripts.service("b", "", "a")], folder)


def test_usage_says_why_a_service_died(running: Running, scripts: Scripts, watch_until: Watch) -> None:
    script = "test -e again && exec sleep 600; touch again; sleep 0.1; echo first; echo 'no room' >&2; echo; exit 3"
    with running([scripts.service("a", script, mark="again")]) as supervisor:
        assert supervisor.processes()["a"].error is None
        watch_until(supervisor, lambda: supervisor.processes()["a"].deaths == 1)
        error = supervisor.processes()["a"].error
        assert error is not None
        assert "code 3" in error
        assert "no room" in error


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        (Event("redis", EventKind.STARTED, pid=7), "redis started as process 7"),
        (Event("redis", EventKind.READY, delay=1.234), "redis is ready after 1.2 s"),
        (Event("redis", EventKind.DIED, code=-9), "redis died: it was ended by SIGKILL"),
        (Event("redis", EventKind.DIED, code=3), "redis died: it ended with code 3"),
        (Event("redis", EventKind.DIED), "redis died: it did not become ready"),
        (Event("redis", EventKind.RESTARTING, delay=0.5), "redis starts again in 0.5 s"),
        (Event("redis", EventKind.STOPPED), "redis stopped"),
        (Event("redis", EventKind.KILLED), "redis did not stop in time and was killed"),
    ],
)
def test_an_event_is_a_sentence(event: Event, sentence: str) -> None:
    assert str(event) == sentence
    assert pickle.loads(pickle.dumps(event)) == event


def test_an_unknown_signal_is_told_by_its_number() -> None:
    assert exit_reason(-200) == "it was ended by signal 200"


def test_the_last_line_is_our_own_error_if_there_is_one() -> None:
    assert last_line([]) == ""
    assert last_line(["one", "two", "  "]) == "two"
    assert last_line(["penstock: the disk is full", "shutdown hook called"]) == "the disk is full"
    assert len(last_line(["x" * 10_000])) == 500

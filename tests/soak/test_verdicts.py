"""A pipeline that is harmed in every way: the verdict names it, or says what is not known, and is never "whole".

A few cases run in `make test`, 60 at random in `make soak`.
"""

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import pytest
from tests.running import Outside, Run, demo
from tests.soak.files import EVERY
from tests.soak.sizes import FAULTS, figure

TIERS = ("collect", "analyse", "load", "audit", "deliver")
SETTINGS = """
[sources]
rsvps = "{url}"

[spark]
real_time_batch = "5 seconds"
every = "1 second"

[audit]
away_after = "4 seconds"
stale_after = "6 seconds"
"""
WITHIN = 30.0
RECOVERS = 180.0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("verdicts")
    (folder / "pipeline.py").write_text(demo())
    with closing(Outside(10_000_000, 100, 5)) as feed:
        (folder / "penstock.toml").write_text(SETTINGS.format(url=feed.url))
        feed.start()
        with closing(Run(folder)) as running:
            running.start()
            running.is_up(240)
            yield running


@dataclass(frozen=True)
class Fault:
    name: str
    inject: Callable[[Run], Any]
    """A context manager that harms the pipeline while its body runs, and heals it afterwards."""
    subjects: tuple[str, ...]
    """What a finding or a doubt has to be about: one of them, or something that begins with it."""

    def __str__(self) -> str:
        return self.name


def pid_of(run: Run, process: str) -> int:
    """The process of a tier or service; `jvm` is that of Spark."""
    if process == "jvm":
        driver = psutil.Process(pid_of(run, "analyse"))
        (found,) = (one.pid for one in driver.children() if "SparkSubmit" in " ".join(one.cmdline()))
        return found
    children = json.loads((run.folder / ".penstock" / "children.json").read_text())
    return int(children[process][0])


def back(run: Run, process: str, other_than: int) -> bool:
    """Whether it was started again."""
    try:
        return pid_of(run, process) != other_than
    except (KeyError, ValueError, psutil.Error, FileNotFoundError):
        return False


@contextmanager
def stopped(run: Run, process: str) -> Iterator[None]:
    pid = pid_of(run, process)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def looping(run: Run, process: str) -> Iterator[None]:
    """It is killed three times, each time as soon as it is started."""
    for _ in range(3):
        pid = pid_of(run, process)
        os.kill(pid, signal.SIGKILL)
        wait(partial(back, run, process, pid), RECOVERS)
    yield


ACCOUNTS = ("query:", "store:", "feed:")
ABOUT = {
    "collect": ("collect",),
    "analyse": ("analyse", *ACCOUNTS),
    "load": ("load", *ACCOUNTS),
    "audit": ("audit",),
    "deliver": ("deliver", *ACCOUNTS),
    "jvm": ("analyse", *ACCOUNTS),
    "kafka-1": ("Kafka", "kafka", "audit"),
    "redis": ("redis", "store:redis"),
}


def processes() -> list[Fault]:
    halted = [Fault(f"{name} stopped", partial(stopped, process=name), ABOUT[name]) for name in ABOUT]
    again = [Fault(f"{name} killed again and again", partial(looping, process=name), ABOUT[name]) for name in TIERS]
    return halted + again


def files() -> list[Fault]:
    return [
        Fault(name, partial(harm, pid_of=pid_of, **options), about) for name, (harm, options, about) in EVERY.items()
    ]


def wait(
    condition: Callable[[], object], within: float, said: Sequence[Mapping[str, Any]] = (), every: float = 0.1
) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within, [(one["verdict"], subjects(one)) for one in said]
        time.sleep(every)
    return time.monotonic() - began


def judged(run: Run) -> dict[str, Any]:
    """What the command says; its exit code says the same."""
    result = run.penstock("audit", "--json", "--wait", "2")
    told = dict(json.loads(result.stdout))
    assert {"whole": 0, "missing": 1, "not known": 3}[told["verdict"]] == result.returncode
    if told["verdict"] == "whole":
        # Whole means that each stage has to do with every record.
        hops = told["hops"]
        (passed,) = (hop["outcomes"]["passed"] for hop in hops if not hop["reads"])
        assert {hop["stage"]: hop["due"] for hop in hops if hop["reads"] == "rsvps" and hop["due"] != passed} == {}
    return told


def subjects(told: Mapping[str, Any]) -> list[str]:
    return [one["stage"] for one in told["discrepancies"]] + [one["subject"] for one in told["doubts"]]


def cases() -> list[Fault]:
    chosen = random.Random(16)
    every = processes() + files()
    chosen.shuffle(every)
    return (every * (FAULTS // len(every) + 1))[:FAULTS]


@pytest.mark.parametrize("fault", cases(), ids=str)
def test_the_verdict_is_never_better_than_what_is_known(run: Run, fault: Fault) -> None:
    said: list[dict[str, Any]] = []

    def whole() -> bool:
        said.append(judged(run))
        return bool(said[-1]["verdict"] == "whole")

    wait(whole, RECOVERS, said)
    said.clear()
    with fault.inject(run):

        def named() -> bool:
            said.append(judged(run))
            return any(about.startswith(fault.subjects) for about in subjects(said[-1]))

        took = wait(named, WITHIN, said)
    assert said[-1]["verdict"] != "whole"
    figure(f"verdict: {fault}", f"named after {took:.0f} s")

"""examples/updates, as real processes: the same two programs over TCP and over Kafka."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.ports import later_port

FOLDER = Path(__file__).parent.parent / "examples" / "updates"
SENDERS = 4


@pytest.fixture(params=["tcp", "kafka"])
def address(request: pytest.FixtureRequest) -> str:
    if request.param == "kafka":
        return str(request.getfixturevalue("kafka").where)
    return f"tcp://127.0.0.1:{later_port()}"


@contextmanager
def running(program: str, address: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A program of the example, killed at the end if it is still there. The address is in its environment."""
    process = subprocess.Popen(
        [sys.executable, program, *options],
        cwd=FOLDER,
        env={**os.environ, "CHANNELS": address},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    return iter(process.stdout.readline, "")


def acknowledged(process: subprocess.Popen[str]) -> int:
    """The last number of the next line that tells one."""
    for line in lines(process):
        if match := re.search(r"acknowledged up to (\d+)$", line.strip()):
            return int(match[1])
    raise AssertionError("the producer ended without a word")


def acknowledges(process: subprocess.Popen[str], last: int) -> bool:
    """Whether this number is told. On a busy machine others are told before: there is a line for each second."""
    return any(line.strip().endswith(f"acknowledged up to {last}") for line in lines(process))


def ended(verifier: subprocess.Popen[str], when: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The last report of a verifier that is asked to end when it has reported this."""
    reports = (json.loads(line) for line in lines(verifier))
    assert any(when(report) for report in reports), "the verifier has ended"
    verifier.send_signal(signal.SIGTERM)
    last: dict[str, Any] = list(reports)[-1]
    assert last["final"]
    return last


def test_what_a_killed_producer_had_acknowledged_is_whole_and_its_next_life_too(
    address: str, fresh: Callable[[str], str]
) -> None:
    channel = ("--channel", fresh("updates"))
    load = (*channel, "--every", "20ms", "--count", "10", "--senders", str(SENDERS))
    with running("verifier.py", address, *channel, "--every", "200ms", "--json") as verifier:
        with running("producer.py", address, *load) as producer:
            first_life = acknowledged(producer)
            producer.kill()
            # Lines that it wrote before it was killed count as well.
            for line in lines(producer):
                if match := re.search(r"acknowledged up to (\d+)$", line.strip()):
                    first_life = int(match[1])
        with running("producer.py", address, *load, "--limit", "300") as producer:
            assert acknowledges(producer, 300)
            assert producer.wait() == 0
        expected = SENDERS * (first_life + 300)
        end = ended(verifier, lambda report: report["records"] >= expected and not report["lapse"]["records"])
        assert verifier.wait() == 0
    assert (end["verdict"], end["missing"], end["doubled"]) == ("whole", 0, 0)
    names = [f"sender-{number:02}" for number in range(1, SENDERS + 1)]
    for name in names:
        before, after = [one for one in end["by_sender"] if one["sender"] == name]
        assert before["epoch"] < after["epoch"]
        assert (before["first"], after["first"], after["last"]) == (1, 1, 300)
        assert before["last"] >= first_life


def test_a_number_that_is_left_out_is_named(address: str, fresh: Callable[[str], str]) -> None:
    channel = ("--channel", fresh("updates"))
    with (
        running("verifier.py", address, *channel, "--until", "49") as verifier,
        running("producer.py", address, *channel, "--every", "10ms", "--limit", "50", "--leave-out", "42") as producer,
    ):
        assert acknowledges(producer, 50)
        told = "".join(lines(verifier))
        assert verifier.wait() == 1
    assert re.search(r"^sender/\d+ misses 42$", told, re.MULTILINE)
    assert "49 records of 1 sender" in told

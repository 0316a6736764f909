"""docs/quickstart.md, followed step by step."""

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.ports import later_port
from tests.running import Run

from penstock.supervise.java import Java

TEXT = (Path(__file__).parent.parent / "docs" / "quickstart.md").read_text()
STEPS = re.split(r"^## \d\. ", TEXT, flags=re.MULTILINE)


def commands(step: int) -> list[str]:
    return re.findall(r"^\$ (.*)$", STEPS[step], flags=re.MULTILINE)


class Shell:
    """A terminal in the folder of the pipeline. The port of the text may be taken here: another one stands for it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._port = folder, later_port()
        (code,) = re.findall(r"```python.*?\n(.*?)```", STEPS[2], flags=re.DOTALL)
        (folder / "pipeline.py").write_text(self.here(code))

    def here(self, text: str) -> str:
        return text.replace("8700", str(self._port))

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        description = shlex.split(self.here(command))
        if description[0] == "penstock":
            description[:1] = [sys.executable, "-m", "penstock"]
        else:
            description += ["--silent", "--write-out", "%{http_code}"]
        return subprocess.run(description, cwd=self.folder, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory, java: Java, jars: object) -> Shell:
    return Shell(tmp_path_factory.mktemp("quickstart"))


@pytest.fixture(scope="module")
def pipeline(shell: Shell) -> Iterator[Run]:
    run = Run(shell.folder)
    run.start()
    run.is_up(240)
    yield run
    run.close()


def rows(run: Run) -> dict[str, tuple[int, float]]:
    return {row["city"]: (row["orders"], row["revenue"]) for row in run.rows("by_city").values()}


def wait(condition: object, within: float = 120) -> None:
    assert callable(condition)
    until = time.monotonic() + within
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.2)


def test_the_plan_has_nothing_against_it(shell: Shell) -> None:
    (plan,) = commands(3)
    done = shell.run(plan)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "by_city" in done.stdout


def test_orders_are_counted_refused_audited_and_survive_a_kill(shell: Shell, pipeline: Run) -> None:
    assert commands(4) == ["penstock run pipeline.py"]
    for order in commands(5):
        assert shell.run(order).stdout.endswith("202")
    wait(lambda: rows(pipeline) == {"Paris": (2, 20.0), "Lagos": (1, 80.0)})

    wrong, listed = commands(6)
    shell.run(wrong)
    wait(lambda: "amount" in shell.run(listed).stdout)

    (audit,) = commands(7)
    wait(lambda: shell.run(audit).returncode == 0)

    (kill,) = commands(8)[:1]
    assert "KILL" in kill
    children = pipeline.kill()
    wait(lambda: not any(child.is_running() and child.status() != "zombie" for child in children))
    pipeline.start()
    wait(lambda: pipeline.said.count(" runs; the page is at ") == 2, 240)
    order, audit, recompute = commands(8)[1:]
    assert shell.run(order).stdout.endswith("202")
    wait(lambda: rows(pipeline) == {"Paris": (2, 20.0), "Lagos": (1, 80.0), "Quito": (1, 20.0)})
    wait(lambda: shell.run(audit).returncode == 0)
    assert json.loads(shell.run(f"{audit} --json").stdout)["verdict"] == "whole"
    compared = shell.run(recompute)
    assert compared.returncode == 0, compared.stdout + compared.stderr


def test_ctrl_c_stops_it(pipeline: Run) -> None:
    assert pipeline.stop() == 0

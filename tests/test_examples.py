"""The examples, as far as they need no pipeline that runs."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pyspark.sql import SparkSession

from penstock.audit.verify import Integrity
from penstock.core.record import Origin
from penstock.testing import ManualClock, MemoryChannels
from penstock.testing.frames import BEGIN, answer, frame, rows

EXAMPLES = Path(__file__).parent.parent / "examples"


def loaded(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, EXAMPLES / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_random_walk_is_its_steps(spark: SparkSession) -> None:
    app = loaded("random_walk/pipeline.py").app
    channel = app.describe().channels["random_walk"]
    steps: list[dict[str, Any]] = [
        {"value": "0.5000"},
        {"value": "-0.1234", "origin": Origin("random-walk", 7, 9, BEGIN + 5_000)},
    ]
    found = answer(app, "steps", frame(spark, channel, *steps))
    assert rows(found, "epoch", "step", "time", "position") == [
        (1, 1, BEGIN // 1_000, 0.5),
        (7, 9, BEGIN // 1_000 + 5, -0.1234),
    ]


@pytest.mark.parametrize(
    ("program", "arguments", "said"),
    [
        ("exactly_once/consumer.py", ["payments", "balances.db"], "no binder knows this address"),
        ("updates/producer.py", ["--channels", "file:///dev/null/there"], "/dev/null/there"),
        ("updates/verifier.py", ["--channels", "nonsense"], "no binder knows this address"),
        ("ads/visitors.py", [], "nothing runs here"),
    ],
)
def test_what_cannot_work_is_told_in_a_sentence(tmp_path: Path, program: str, arguments: list[str], said: str) -> None:
    command = [sys.executable, str(EXAMPLES / program), *arguments]
    done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


class Stalled(ManualClock):
    """A clock that stands still, but for one long stall; at each look at it, the channel gets another record."""

    def __init__(self, channels: MemoryChannels) -> None:
        super().__init__()
        self._channels, self._looks = channels, 0

    def elapsed(self) -> float:
        self._looks += 1
        self._channels.append("updates", b"{}", None, Origin("a", 1, self._looks, 0).headers())
        if self._looks == 10:
            self.move(100)
        return super().elapsed()


@pytest.mark.parametrize(("every", "told"), [(1, [False, True]), (0, [True])])
def test_a_verifier_reports_once_after_a_stall_and_not_before_its_end_if_it_shall_not(
    capsys: pytest.CaptureFixture[str], every: int, told: list[bool]
) -> None:
    channels = MemoryChannels(1)
    clock = Stalled(channels)
    for _ in range(100 * (not every)):
        clock.elapsed()
    verdict = loaded("updates/verifier.py").verify(channels, "updates", every, 100, True, clock)
    assert verdict is Integrity.WHOLE
    assert [json.loads(line)["final"] for line in capsys.readouterr().out.splitlines()] == told
